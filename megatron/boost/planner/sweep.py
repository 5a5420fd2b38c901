"""What a calibration times: products, attention, small kernels, copies and collectives, by size."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from megatron.boost.accounting.products import Product

Role = Literal["forward", "input gradient", "weight gradient"]


@dataclass(frozen=True)
class ProductCall:
    """A product `[m, k]·[k, n]`, with its operands in memory as a projection's of that role are."""

    role: Role
    m: int
    n: int
    k: int

    @property
    def flops(self) -> int:
        """2·m·n·k."""
        return 2 * self.m * self.n * self.k

    def bytes(self, itemsize: int) -> int:
        """Both operands and the result, each once."""
        return itemsize * (self.m * self.k + self.k * self.n + self.m * self.n)


@dataclass(frozen=True)
class AttentionCall:
    """One direction of causal attention over `batch` sequences."""

    direction: Literal["forward", "backward"]
    batch: int
    heads: int
    sequence: int
    head: int


@dataclass(frozen=True)
class KernelCall:
    """One small kernel of a layer; `bytes` are read and written."""

    name: str
    bytes: int


@dataclass(frozen=True)
class CopyCall:
    """A copy of `bytes` / 2."""

    bytes: int


@dataclass(frozen=True)
class CollectiveCall:
    """An all-reduce of `bytes` in every group of `ranks` ranks at the same time."""

    ranks: int
    bytes: int


@dataclass(frozen=True)
class OverlapCall:
    """An all-reduce over all ranks, products, or both at once."""

    what: Literal["collective", "products", "both"]


@dataclass(frozen=True)
class LayerCall:
    """Forward and backward of one tiny layer, which keeps the host busy alone."""


Call = (
    ProductCall | AttentionCall | KernelCall | CopyCall | CollectiveCall | OverlapCall | LayerCall
)


@dataclass(frozen=True, kw_only=True)
class Sweep:
    """The sizes that are timed, and how often each is."""

    tokens: int
    """n, of a micro-batch."""
    hidden: tuple[int, ...]
    """Sizes d: products are those of projections between d, r = d/4 and f = 11·d/4, whole and
    halved by tensor parallelism; the small kernels have the first."""
    attention: tuple[tuple[int, int, int], ...]
    """(heads, head size, sequence length), of so many sequences that they have n tokens."""
    messages: tuple[int, ...]
    """Bytes that are all-reduced."""
    copied_bytes: int
    walk_bytes: int
    """Of the memory that operands come from, more than caches hold."""
    seconds: float
    """That a timing takes at least; shorter calls are repeated in it."""
    rounds: int

    def projections(self) -> list[tuple[int, int]]:
        """(out, in) of the weights on a rank of full-rank layers, vanilla and BTP."""
        found: set[tuple[int, int]] = set()
        for d in self.hidden:
            r, f = d // 4, 11 * d // 4
            for share in (1, 2):
                full = {(d // share, d), (d, d // share), (f // share, d), (d, f // share)}
                thin = r // share
                vanilla = {(3 * thin, d), (thin, d), (d, thin), (f, thin), (thin, f)}
                btp = {(3 * r, d // share), (r, d // share), (d // share, r)}
                btp |= {(r, f // share), (f // share, r)}
                found |= full | vanilla | btp
        return sorted(found)

    def products(self) -> Iterator[ProductCall]:
        """Of every projection."""
        for size_out, size_in in self.projections():
            product = Product((), "full", self.tokens, size_out, size_in)
            roles: dict[Role, Product] = {
                "forward": product,
                "input gradient": product.input_gradient,
                "weight gradient": product.weight_gradient,
            }
            for role, p in roles.items():
                yield ProductCall(role, p.m, p.n, p.k)


CPU_SWEEP = Sweep(
    tokens=2048,
    hidden=(1024, 1536),
    attention=((8, 64, 512), (16, 64, 512)),
    messages=tuple(2**exponent for exponent in (12, 16, 20, 21, 22, 23, 24)),
    copied_bytes=2**26,
    walk_bytes=2**28,
    seconds=0.01,
    rounds=4,
)
CUDA_SWEEP = Sweep(
    tokens=16384,
    hidden=(4096, 8192),
    attention=((8, 128, 4096), (32, 128, 4096)),
    messages=tuple(2**exponent for exponent in range(14, 28, 2)),
    copied_bytes=2**30,
    walk_bytes=2**31,
    seconds=0.002,
    rounds=10,
)
QUICK_SWEEP = Sweep(
    tokens=64,
    hidden=(64, 128),
    attention=((2, 32, 32),),
    messages=(2**10, 2**14, 2**16),
    copied_bytes=2**16,
    walk_bytes=2**20,
    seconds=0.0005,
    rounds=2,
)
"""Tiny, to see that everything runs."""
