"""The time of one training iteration, and what it is spent on.

A stage's micro-batch takes forward and backward of its layers, embedding and head; the schedule
makes an iteration of them; then come the gradients' reduction, of which overlapping hides what fits
under the last micro-batch's backward (and under the first one's forward for the weights of the
distributed optimiser), and the optimiser's step.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

import torch

from megatron.boost.accounting.collectives import stage_message_bytes
from megatron.boost.accounting.flops import Work, model_flops
from megatron.boost.accounting.sizes import Layout, Model
from megatron.boost.planner.cluster import Cluster
from megatron.boost.planner.collectives import point_to_point_seconds
from megatron.boost.planner.implementation import BOOST, Implementation
from megatron.boost.planner.layers import stage_layer_phases
from megatron.boost.planner.optimiser import reduction, step_seconds, tied_embedding_seconds
from megatron.boost.planner.phase import Phase
from megatron.boost.planner.pipeline import bubble_seconds, exposed_transfers
from megatron.boost.planner.vocabulary import vocabulary_phases

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """Seconds of one iteration, by what they are spent on."""

    gemm: float
    attention: float
    elementwise: float
    """Norms, residuals, φ, rotary embedding, gate, loss; accumulating gradients."""
    tensor_parallel: float
    """Collectives that nothing hides."""
    host: float
    """The GPU waits for the host to launch."""
    bubble: float
    transfers: float
    """Between pipeline stages."""
    data_parallel: float
    optimiser: float

    @property
    def seconds(self) -> float:
        """All of it."""
        return sum(self.parts().values())

    def parts(self) -> dict[str, float]:
        """Seconds by name."""
        return {name: getattr(self, name) for name in self.__dataclass_fields__}


def dtype_name(layout: Layout) -> str:
    """As the clusters' files call it."""
    return next(name for name, dtype in DTYPES.items() if dtype == layout.dtype)


def estimate(
    model: Model,
    layout: Layout,
    cluster: Cluster,
    *,
    implementation: Implementation = BOOST,
    overlap_reduction: bool = True,
    optimiser: bool = True,
) -> Estimate:
    """One iteration of `layout.micro_batches` micro-batches on every data-parallel rank.

    `overlap_reduction` is Megatron's `--overlap-grad-reduce` and `--overlap-param-gather`; without
    `optimiser` only forward and backward are counted.
    """
    known: dict[Hashable, tuple[Phase, Phase]] = {}
    stages = []
    for pp_rank in range(layout.pipeline_parallel):
        kind = _stage_kind(model, layout, pp_rank)
        if kind not in known:
            known[kind] = _stage_phases(model, layout, pp_rank, cluster, implementation)
        stages.append(known[kind])
    host = cluster.host_us_per_operation
    waits = [forward.waiting(host) + backward.waiting(host) for forward, backward in stages]
    walls = [
        forward.device + backward.device + wait
        for (forward, backward), wait in zip(stages, waits, strict=True)
    ]
    slowest = max(range(len(walls)), key=walls.__getitem__)
    forward, backward = stages[slowest]
    whole = forward + backward
    reduced, step = 0.0, 0.0
    if optimiser:
        needed = reduction(model, layout, slowest, cluster)
        beside = cluster.collective_overlap * whole.device
        reduced = needed.exposed(beside) if overlap_reduction else needed.seconds
        reduced += tied_embedding_seconds(model, layout, cluster)
        step = step_seconds(model, layout, slowest, cluster)
    m = layout.micro_batches
    return Estimate(
        gemm=m * whole.gemm,
        attention=m * whole.attention,
        elementwise=m * (whole.elementwise + whole.accumulation),
        tensor_parallel=m * whole.collectives,
        host=m * waits[slowest],
        bubble=bubble_seconds(walls, layout.virtual_stages),
        transfers=_transfer_seconds(model, layout, cluster),
        data_parallel=reduced,
        optimiser=step,
    )


def _stage_kind(model: Model, layout: Layout, pp_rank: int) -> Hashable:
    """What two stages that cost the same have in common."""
    layers = tuple(
        (model.settings(layer), place.crosses, place.hands_on, place.enters_by_sequence)
        for layer in layout.layers(model, pp_rank)
        for place in (model.place(layer),)
    )
    return layers, layout.has_embedding(pp_rank), layout.has_head(pp_rank)


def _stage_phases(
    model: Model,
    layout: Layout,
    pp_rank: int,
    cluster: Cluster,
    implementation: Implementation,
) -> tuple[Phase, Phase]:
    dtype = dtype_name(layout)
    forward, backward = stage_layer_phases(model, layout, pp_rank, cluster, dtype, implementation)
    more = vocabulary_phases(model, layout, pp_rank, cluster, dtype)
    return forward + more[0], backward + more[1]


def _transfer_seconds(model: Model, layout: Layout, cluster: Cluster) -> float:
    number = exposed_transfers(
        layout.pipeline_parallel, layout.micro_batches, layout.virtual_stages
    )
    # Where a pipeline crosses nodes, its slowest hop sets the pace.
    message = stage_message_bytes(model, layout)
    return number * point_to_point_seconds(message, layout.gpus, cluster) if number else 0.0


def model_flops_utilisation(
    model: Model, layout: Layout, cluster: Cluster, seconds: float
) -> float:
    """The model's operations, without what is computed again, over what the GPUs could compute."""
    work = Work.of_sequences(
        layout.micro_batch_size * layout.micro_batches * layout.data_parallel,
        layout.sequence_length,
    )
    peak = cluster.products(dtype_name(layout)).peak_tflops * 1e12
    return model_flops(model, work) / (seconds * layout.gpus * peak)
