"""Published times of products and collectives, which the cluster `a100-80` is calibrated on.

Source: as for `published`. Products: forward of one block at TP 4. The tables give attention's and
the MLP's time per projection, a quarter and a third of the block's: only so do they agree with the
utilisations that are given beside them, and with the grouped products.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from boost_layers.config import LowRankConfig
from megatron.boost.accounting.collectives import layer_messages
from megatron.boost.accounting.products import Product, layer_products
from megatron.boost.accounting.sizes import Layout, Model
from megatron.boost.planner.models import SIZES, model_of_size
from megatron.boost.planner.published import PUBLISHED_UTILISATION, SEQUENCE

TENSOR_PARALLEL = 4
_A100_PEAK = 312e12
_SIZES = ("3B", "7B", "13B")
_FULL_RANK = LowRankConfig(arch="dense")
_VANILLA = LowRankConfig(arch="cola", tp="vanilla", vanilla_attention="replicated")
_BTP = LowRankConfig(arch="cola")
_UNGROUPED = replace(_BTP, grouping=False)

_ATTENTION = frozenset({"q_proj", "k_proj", "v_proj", "o_proj"})
_MLP = frozenset({"gate_proj", "up_proj", "down_proj"})
_QKV = frozenset({"q_proj", "k_proj", "v_proj"})
_GATE_UP = frozenset({"gate_proj", "up_proj"})

# Milliseconds per projection, micro-batch 4, of 3B, 7B and 13B.
_PER_PROJECTION = (
    (_FULL_RANK, _ATTENTION, (0.345, 0.566, 0.791)),
    (_FULL_RANK, _MLP, (0.849, 1.488, 2.202)),
    (_VANILLA, _ATTENTION, (0.281, 0.358, 0.543)),
    (_VANILLA, _MLP, (0.487, 0.654, 0.978)),
    (_BTP, _ATTENTION, (0.207, 0.303, 0.447)),
    (_BTP, _MLP, (0.338, 0.539, 0.839)),
)
# Milliseconds, 7B, by micro-batch.
_GROUPING = (
    (_UNGROUPED, _QKV, {1: 0.401, 4: 0.893}),
    (_BTP, _QKV, {1: 0.259, 4: 0.834}),
    (_UNGROUPED, _GATE_UP, {1: 0.362, 4: 1.064}),
    (_BTP, _GATE_UP, {1: 0.298, 4: 1.029}),
)
# Milliseconds of a block's forward, by size and micro-batch.
_COLLECTIVES = (
    (_FULL_RANK, {("3B", 4): 1.542, ("7B", 4): 1.993, ("13B", 4): 2.462}),
    (_FULL_RANK, {("7B", 1): 0.569, ("7B", 2): 1.070, ("7B", 8): 3.826}),
    (_VANILLA, {("3B", 4): 7.496, ("7B", 4): 9.747, ("13B", 4): 12.087}),
    (_VANILLA, {("7B", 1): 2.644, ("7B", 2): 5.028, ("7B", 8): 19.000}),
    (_BTP, {("3B", 4): 1.453, ("7B", 4): 1.858, ("13B", 4): 2.276}),
    (_BTP, {("7B", 1): 0.613, ("7B", 2): 1.035, ("7B", 8): 3.484}),
)


@dataclass(frozen=True)
class ProductTime:
    """Products that were timed together."""

    products: tuple[Product, ...]
    seconds: float


@dataclass(frozen=True)
class CollectiveTime:
    """All-reduces over four ranks that were timed together."""

    sizes: tuple[float, ...]
    """Bytes of each."""
    seconds: float


def product_times() -> list[ProductTime]:
    """All published times of products."""
    times = [
        ProductTime(_products(settings, size, 4, members), len(members) * ms * 1e-3)
        for settings, members, figures in _PER_PROJECTION
        for size, ms in zip(_SIZES, figures, strict=True)
    ]
    for settings, members, by_batch in _GROUPING:
        for micro_batch, ms in by_batch.items():
            times.append(ProductTime(_products(settings, "7B", micro_batch, members), ms * 1e-3))
    for (strategy, block), by_micro_batch in PUBLISHED_UTILISATION.items():
        settings = _BTP if strategy == "BTP" else _VANILLA
        members = _ATTENTION if block == "attention" else _MLP
        for micro_batch, percent in by_micro_batch.items():
            # Micro-batch 4 is in the times per projection.
            if micro_batch != 4:
                products = _products(settings, "7B", micro_batch, members)
                flops = sum(product.flops for product in products)
                times.append(ProductTime(products, flops / (percent / 100 * _A100_PEAK)))
    return times


def collective_times() -> list[CollectiveTime]:
    """All published times of collectives."""
    return [
        CollectiveTime(_sizes(settings, size, micro_batch), ms * 1e-3)
        for settings, figures in _COLLECTIVES
        for (size, micro_batch), ms in figures.items()
    ]


def _products(
    settings: LowRankConfig, size: str, micro_batch: int, members: frozenset[str]
) -> tuple[Product, ...]:
    found = layer_products(_model(settings, size), _layout(micro_batch), 0)
    return tuple(product for product in found if set(product.members) <= members)


def _sizes(settings: LowRankConfig, size: str, micro_batch: int) -> tuple[float, ...]:
    messages = layer_messages(_model(settings, size), _layout(micro_batch), 0)
    return tuple(m.bytes for m in messages if m.phase == "forward")


def _model(settings: LowRankConfig, size: str) -> Model:
    low_rank = replace(settings, rank=SIZES[size].rank) if settings.low_rank else settings
    return model_of_size(SIZES[size], low_rank, tied=True)


def _layout(micro_batch: int) -> Layout:
    return Layout(
        sequence_length=SEQUENCE, micro_batch_size=micro_batch, tensor_parallel=TENSOR_PARALLEL
    )
