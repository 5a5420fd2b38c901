"""The time of the optimiser, of accumulating gradients and of reducing them over data parallelism.

Adam in mixed precision reads and writes every number of its state once, and the gradients are read
for their norm and set to zero: memory-bound. Source: Megatron's optimisers, as `accounting.state`
has them. With the distributed optimiser (ZeRO-1) each of D ranks does 1/D.
"""

from __future__ import annotations

from dataclasses import dataclass

from megatron.boost.accounting.parameters import rank_parameters
from megatron.boost.accounting.sizes import Layout, Model
from megatron.boost.accounting.state import state_bytes_per_parameter
from megatron.boost.planner.cluster import Cluster
from megatron.boost.planner.collectives import collective_seconds

_FP32_BYTES = 4
_BUCKET, _BUCKET_OF_RANK = 40_000_000, 1_000_000


def step_bytes_per_parameter(layout: Layout) -> float:
    """Adam reads gradient, weight and two moments and writes the last three in fp32; the norm reads
    the gradient, clipping reads and writes it; a 16-bit copy of the weight is written. All of that
    for this rank's share. The gradients' buffer is set to zero whole."""
    state = state_bytes_per_parameter(layout)
    share = layout.data_parallel if layout.distributed_optimizer else 1
    gradient = (1 + 1 + 2) * _FP32_BYTES
    weights_and_moments = 2 * 3 * _FP32_BYTES
    narrow_weight = state.weights if state.main_weights else 0
    return (gradient + weights_and_moments + narrow_weight) / share + state.gradients


def step_seconds(model: Model, layout: Layout, pp_rank: int, cluster: Cluster) -> float:
    """Of one step on one rank."""
    parameters = rank_parameters(model, layout, pp_rank)
    return parameters * step_bytes_per_parameter(layout) / cluster.elementwise_bytes_per_s


def accumulation_bytes_per_parameter(layout: Layout, *, fused: bool) -> float:
    """Of one micro-batch: the weight gradient is added to the gradients' buffer, which is read and
    written, by the GEMM that computes it (`fused`) or in a pass of its own that reads it again."""
    buffer = state_bytes_per_parameter(layout).gradients
    return 2 * buffer if fused else 2 * buffer + layout.dtype.itemsize


@dataclass(frozen=True)
class Reduction:
    """Of the gradients over the data-parallel ranks, bucket by bucket."""

    buckets: int
    seconds: float
    """All buckets, one after the other."""
    last_seconds: float
    """The last bucket, which is complete only when the backward is."""

    def exposed(self, beside: float) -> float:
        """What is left when `beside` seconds of computing hide all but the last bucket."""
        return max(self.last_seconds, self.seconds - beside)


def reduction(model: Model, layout: Layout, pp_rank: int, cluster: Cluster) -> Reduction:
    """An all-reduce of the gradients of each bucket, or with the distributed optimiser a
    reduce-scatter of them and an all-gather of the weights. A bucket has 40 M parameters or 1 M for
    every data-parallel rank, Megatron's default for `--ddp-bucket-size`: with more ranks there are
    fewer, larger ones to hide. Buckets end with a whole parameter, and the embedding's, which is
    the last of the backward, may be larger than that."""
    parameters = rank_parameters(model, layout, pp_rank)
    state = state_bytes_per_parameter(layout)
    ranks, spread = layout.data_parallel, layout.tensor_parallel
    bucket = max(_BUCKET, _BUCKET_OF_RANK * ranks)
    buckets = max(1, round(parameters / bucket))
    last = min(parameters, bucket)
    if layout.has_embedding(pp_rank):
        rows = model.padded_vocab_size // layout.tensor_parallel
        last = min(parameters, max(last, rows * model.hidden_size))

    def seconds(numbers: float) -> float:
        gradients = numbers * state.gradients
        if not layout.distributed_optimizer:
            return collective_seconds("all_reduce", gradients, ranks, cluster, spread=spread)
        weights = numbers * state.weights / ranks
        return collective_seconds(
            "reduce_scatter", gradients, ranks, cluster, spread=spread
        ) + collective_seconds("all_gather", weights, ranks, cluster, spread=spread)

    return Reduction(buckets, buckets * seconds(parameters / buckets), seconds(last))


def tied_embedding_seconds(model: Model, layout: Layout, cluster: Cluster) -> float:
    """Of the all-reduce of a tied embedding's gradient between the first and the last stage."""
    if not model.tied or layout.pipeline_parallel == 1:
        return 0.0
    rows = model.padded_vocab_size // layout.tensor_parallel
    size = rows * model.hidden_size * state_bytes_per_parameter(layout).gradients
    # As far apart as the GPUs of the model are.
    spread = layout.gpus // 2
    return collective_seconds("all_reduce", size, 2, cluster, spread=spread)
