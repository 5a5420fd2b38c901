"""The memory of the GPU that needs most: state and activations by the accounting, what a step needs
for a moment beside them, and what the cluster reserves.

For a moment: the backward of a layer holds the gradients of what the layer kept, and that of the
loss the gradient of the fp32 logits and their 16-bit copy; what checkpointing at the latents
computes again is there while one layer's backward runs.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

from boost_layers.config import LowRankConfig
from megatron.boost.accounting.activations import layer_activation_bytes, rank_activation_bytes
from megatron.boost.accounting.sizes import Layout, Model
from megatron.boost.accounting.state import rank_state_bytes
from megatron.boost.planner.cluster import Cluster

GIB = 1024**3
_FP32_BYTES = 4


@dataclass(frozen=True)
class MemoryNeed:
    """Bytes on one rank of a pipeline stage."""

    pp_rank: int
    state: float
    activations: float
    transient: float
    reserved: float
    capacity: float
    """What a GPU has."""

    @property
    def fits(self) -> bool:
        """Whether it is not more than a GPU has."""
        return self.total <= self.capacity

    @property
    def total(self) -> float:
        """All of them."""
        return self.state + self.activations + self.transient + self.reserved


def memory_need(model: Model, layout: Layout, cluster: Cluster) -> MemoryNeed:
    """Of the stage that needs most. The first and the last stage of a pipeline of equal stages
    always hold most, by activations in flight and by the head."""
    stages = {0, layout.pipeline_parallel - 1}
    return max((_of_stage(model, layout, s, cluster) for s in stages), key=lambda need: need.total)


def _of_stage(model: Model, layout: Layout, pp_rank: int, cluster: Cluster) -> MemoryNeed:
    return MemoryNeed(
        pp_rank=pp_rank,
        state=rank_state_bytes(model, layout, pp_rank).total,
        activations=rank_activation_bytes(model, layout, pp_rank),
        transient=_transient_bytes(model, layout, pp_rank),
        reserved=cluster.memory.reserved_gib * GIB,
        capacity=cluster.memory.capacity_gib * GIB,
    )


@lru_cache(maxsize=64)
def _keeping_all(low_rank: LowRankConfig) -> LowRankConfig:
    return replace(low_rank, recompute=False, recompute_residual=False, recompute_shard=False)


def _transient_bytes(model: Model, layout: Layout, pp_rank: int) -> float:
    layers = layout.layers(model, pp_rank)
    whole = replace(model, low_rank=_keeping_all(model.low_rank))
    inside = sum(layer_activation_bytes(whole, layout, layers[0]).values()) if layers else 0
    again = inside if layers and model.settings(layers[0]).recompute else 0
    head = 0.0
    if layout.has_head(pp_rank):
        logits = layout.tokens * model.padded_vocab_size / layout.tensor_parallel
        head = logits * (_FP32_BYTES + layout.dtype.itemsize)
    return max(inside + again, head)
