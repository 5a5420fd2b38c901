"""Initial weights that do not depend on how the model is laid out.

The whole tensor is drawn from a generator seeded by (seed, canonical name) and each rank takes its
shard, so TP, PP, DP, grouping and strategy never change a weight. Megatron's own initialisation
draws shards instead and varies with TP and PP.
"""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor


def shard_of(whole: Tensor, axis: int, tp_rank: int, tp_size: int) -> Tensor:
    """This rank's `1/T` of a whole tensor along `axis`, a view."""
    return whole.chunk(tp_size, dim=axis)[tp_rank]


def draw_normal(
    shape: tuple[int, ...], std: float, seed: int, name: str, device: torch.device | str
) -> Tensor:
    """The whole tensor N(0, std²) in fp32 that belongs to a canonical name; the same on every rank
    with the same kind of device."""
    whole, generator = _whole_and_generator(shape, seed, name, device)
    return whole if generator is None else whole.normal_(0.0, std, generator=generator)


def draw_uniform(
    shape: tuple[int, ...], bound: float, seed: int, name: str, device: torch.device | str
) -> Tensor:
    """As `draw_normal`, uniform between −bound and bound."""
    whole, generator = _whole_and_generator(shape, seed, name, device)
    return whole if generator is None else whole.uniform_(-bound, bound, generator=generator)


def draw_truncated_normal(
    shape: tuple[int, ...], std: float, seed: int, name: str, device: torch.device | str
) -> Tensor:
    """As `draw_normal`, cut at ±2 (which timm's and torch's `trunc_normal_` take as absolute)."""
    whole, generator = _whole_and_generator(shape, seed, name, device)
    if generator is None:
        return whole
    return torch.nn.init.trunc_normal_(whole, std=std, generator=generator)


def _whole_and_generator(
    shape: tuple[int, ...], seed: int, name: str, device: torch.device | str
) -> tuple[Tensor, torch.Generator | None]:
    """An unset tensor and the generator that belongs to a canonical name (none on meta)."""
    whole = torch.empty(shape, dtype=torch.float32, device=device)
    if whole.is_meta:
        return whole, None
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    generator = torch.Generator(device=device)
    generator.manual_seed(int.from_bytes(digest[:8], "little") >> 1)
    return whole, generator


def cola_std(in_features: int, out_features: int, rank: int) -> float:
    """CoLA's standard deviation of both factors, r^(−1/4)·(in+out)^(−1/4) with the sizes of the
    whole layer, so that (B·A)_ij has (in+out)^(−1/2) (arXiv 2502.10940)."""
    return float(rank**-0.25 * (in_features + out_features) ** -0.25)
