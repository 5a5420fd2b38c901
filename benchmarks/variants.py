"""What the benchmarks race: the model's sizes and the variants of it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from boost_layers.config import LowRankConfig

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
"""By the name that the command lines have for them."""


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """The model and its micro-batch. Low-rank variants have CoLA's activation and product MLP in
    all seven projections."""

    hidden: int = 1024
    ffn: int = 2752
    heads: int = 16
    layers: int = 4
    sequence: int = 512
    micro_batch: int = 4
    rank: int = 256
    vocabulary: int = 4096

    def divisible_by(self, tp: int) -> bool:
        """Whether every strategy can split this model over `tp` ranks."""
        split = (
            self.hidden,
            self.ffn,
            self.heads,
            self.sequence,
            self.rank,
            self.vocabulary,
        )
        return all(size % tp == 0 for size in split)

    def of(self, variant: Variant) -> Sizes:
        """The sizes of a variant's model."""
        return replace(self, layers=self.layers // 2) if variant.half_depth else self

    @property
    def tokens(self) -> int:
        """Tokens of one iteration."""
        return self.sequence * self.micro_batch


FULL_SIZES = Sizes()
QUICK_SIZES = Sizes(
    hidden=64, ffn=96, heads=4, layers=2, sequence=32, micro_batch=2, rank=16, vocabulary=128
)


@dataclass(frozen=True, kw_only=True)
class Variant:
    """One way to compute the full-rank or the low-rank model."""

    key: str
    title: str
    low_rank: bool
    """Whether the model is the low-rank one: variants of one model have the same weights and loss.
    """
    layers: LowRankConfig | None
    """Our layers' settings (the rank is the sizes'); None: plain PyTorch, at TP 1."""
    sequence_parallel: bool = False
    full_recompute: bool = False
    """Megatron's recomputation of every layer."""
    half_depth: bool = False
    """Whether the model has half of the layers: the other half is what the whole model has more."""


def _ours(key: str, title: str, *, sequence_parallel: bool = False, **settings: object) -> Variant:
    # One core attention for all, and the same as plain PyTorch's.
    layers = LowRankConfig(core_attention="sdpa", **settings)  # type: ignore[arg-type]
    return Variant(
        key=key,
        title=title,
        low_rank=layers.low_rank,
        layers=layers,
        sequence_parallel=sequence_parallel,
    )


BTP = _ours("btp", "BTP", sequence_parallel=True, arch="cola")
FULL_RANK = (
    _ours("full_rank", "full-rank", arch="dense"),
    _ours(
        "full_rank_sequence_parallel",
        "full-rank, sequence parallelism",
        sequence_parallel=True,
        arch="dense",
    ),
)
VANILLA = (
    _ours("vanilla_sliced", "vanilla low-rank, sliced heads", arch="cola", tp="vanilla"),
    _ours(
        "vanilla_replicated",
        "vanilla low-rank, replicated attention",
        arch="cola",
        tp="vanilla",
        vanilla_attention="replicated",
    ),
)


def strategies(tp: int) -> list[Variant]:
    """What is raced at that TP size; on one rank both forms of a baseline are the same."""
    return [BTP, *FULL_RANK, *VANILLA] if tp > 1 else [BTP, FULL_RANK[0], VANILLA[0]]


def half_depth(variant: Variant) -> Variant:
    """The variant with half of the layers."""
    title = f"{variant.title}, half of the layers"
    return replace(variant, key=f"{variant.key}_half_depth", title=title, half_depth=True)


def _recomputed(variant: Variant, **settings: Any) -> Variant:
    """The variant with Megatron's full recomputation or, given `settings`, with ours."""
    assert variant.layers is not None
    if not settings:
        return replace(
            variant,
            key=f"{variant.key}_full_recompute",
            title=f"{variant.title}, full recompute",
            full_recompute=True,
        )
    options = [name for name in settings if name != "recompute"]
    return replace(
        variant,
        key="_".join([variant.key, "latent", *(o.removeprefix("recompute_") for o in options)]),
        title=", ".join([variant.title, "at the latents", *(_OPTIONS[o] for o in options)]),
        layers=replace(variant.layers, **settings),
    )


_OPTIONS = {
    "recompute_residual": "second residual made again",
    "recompute_shard": "latents sharded",
}
CHECKPOINTED = {
    BTP: [
        _recomputed(BTP, recompute=True),
        _recomputed(BTP, recompute=True, recompute_residual=True),
        _recomputed(BTP, recompute=True, recompute_shard=True),
        _recomputed(BTP, recompute=True, recompute_residual=True, recompute_shard=True),
        _recomputed(BTP),
    ],
    FULL_RANK[0]: [_recomputed(FULL_RANK[0])],
    VANILLA[0]: [_recomputed(VANILLA[0])],
}
"""What `memory.py` compares: each strategy and its ways to keep less for backward."""

_PLAIN_LOW_RANK = Variant(
    key="tp1_low_rank_plain", title="low-rank, plain PyTorch", low_rank=True, layers=None
)
GUARDS = (
    (
        _ours("tp1_full_rank", "full-rank, TP 1", arch="dense"),
        Variant(
            key="tp1_full_rank_plain",
            title="full-rank, plain PyTorch",
            low_rank=False,
            layers=None,
        ),
    ),
    (
        _ours(
            "tp1_low_rank",
            "vanilla low-rank without grouping, TP 1",
            arch="cola",
            tp="vanilla",
            grouping=False,
        ),
        _PLAIN_LOW_RANK,
    ),
    (_ours("tp1_btp", "BTP, TP 1", arch="cola"), _PLAIN_LOW_RANK),
)
"""Our layers at TP 1, each with the plain PyTorch model that it may not be slower than. The plain
low-rank model is ungrouped."""


def guards() -> list[Variant]:
    """The variants of `GUARDS`, once each, our layers before the plain models."""
    return list(dict.fromkeys(variant for pair in GUARDS for variant in pair))
