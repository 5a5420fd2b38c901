"""Megatron checkpoints of weights drawn at random, without training one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from boost_layers.config import LowRankConfig
from megatron.boost.conversion.checkpoint_writer import checkpoint_entries, write_checkpoint
from megatron.boost.conversion.description import HEAD, ModelDescription
from megatron.boost.conversion.megatron_arguments import arguments_from_description


def description(low_rank: LowRankConfig, **sizes: Any) -> ModelDescription:
    """A small model with grouped KV heads wider than hidden/heads."""
    values: dict[str, Any] = {
        "vocab_size": 100,
        "hidden_size": 32,
        "ffn_hidden_size": 48,
        "num_layers": 3,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 16,
        "max_positions": 64,
        "norm_eps": 1e-6,
        "tied": False,
        "dtype": torch.float32,
    }
    return ModelDescription(**{**values, **sizes}, low_rank=low_rank)


def random_tensors(model: ModelDescription, seed: int = 5) -> dict[str, Tensor]:
    """Weights by canonical name, scaled so that every part of the model shows in its logits."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, shape in model.tensors().items():
        drawn = torch.randn(shape, generator=generator)
        if "norm" in name:
            drawn = 1.0 + 0.2 * drawn if not name.endswith("bias") else 0.2 * drawn
        elif len(shape) == 2:
            drawn /= shape[1] ** 0.5
            # Logits of about 1, whose rounding the tests' tolerance is for.
            drawn *= 0.5 if name == HEAD else 1.0
        tensors[name] = drawn.to(model.dtype)
    return tensors


def save_checkpoint(
    folder: Path,
    model: ModelDescription,
    tensors: dict[str, Tensor] | None = None,
    *,
    megatrons_own: bool = False,
    act_anneal: int = 0,
) -> dict[str, Tensor]:
    """Write a release checkpoint of the model to `folder`; its weights by canonical name."""
    tensors = random_tensors(model) if tensors is None else tensors
    folder.mkdir()
    write_checkpoint(
        folder,
        checkpoint_entries(model, megatrons_own=megatrons_own),
        tensors.__getitem__,
        {name: tensor.dtype for name, tensor in tensors.items()},
        arguments_from_description(model, megatrons_own=megatrons_own, act_anneal=act_anneal),
    )
    return tensors
