"""The time of the core attention, softmax(Q·Kᵀ)·V under a causal mask.

A fused kernel computes 2·q·Σs² operations forward (half of the square, as `accounting.flops`
counts) and 5/2 of that backward: its five products instead of two, one of them the forward's again.
The share of the peak that it reaches is the cluster's. Source of the factor: FlashAttention-2
(arXiv 2307.08691).
"""

from __future__ import annotations

from dataclasses import dataclass

from megatron.boost.accounting.flops import Work, rank_attention_flops
from megatron.boost.accounting.sizes import Layout, Model
from megatron.boost.planner.cluster import Cluster

BACKWARD_PRODUCTS = 5 / 2
"""Of a backward, in those of a forward."""


@dataclass(frozen=True)
class AttentionSeconds:
    """Of one layer and micro-batch on one rank."""

    forward: float
    backward: float


def attention_seconds(
    model: Model, layout: Layout, layer: int, cluster: Cluster, dtype: str
) -> AttentionSeconds:
    """This rank's heads, or all where vanilla tensor parallelism replicates them."""
    work = Work.of_sequences(layout.micro_batch_size, layout.sequence_length)
    flops = rank_attention_flops(model, layout, layer, work)
    compute = cluster.products(dtype)
    peak = compute.peak_tflops * 1e12
    return AttentionSeconds(
        forward=flops / (peak * compute.attention_forward_efficiency),
        backward=BACKWARD_PRODUCTS * flops / (peak * compute.attention_backward_efficiency),
    )
