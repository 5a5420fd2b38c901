"""Every layout of a model on a cluster, with its time and memory, the fastest first."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

from boost_layers.config import LowRankConfig
from megatron.boost.accounting.sizes import Layout, Model, Recompute, validate_layout
from megatron.boost.planner.cluster import Cluster
from megatron.boost.planner.iteration import DTYPES, Estimate, estimate, model_flops_utilisation
from megatron.boost.planner.memory import GIB, MemoryNeed, memory_need
from megatron.boost.planner.models import padded

Strategy = Literal["btp", "full-rank", "vanilla"]
STRATEGIES: tuple[Strategy, ...] = ("btp", "full-rank", "vanilla")

_LARGEST_MICRO_BATCH = 64
_MOST_VIRTUAL_STAGES = 8


@dataclass(frozen=True, kw_only=True)
class Workload:
    """What is trained, whatever the layout."""

    model: Model
    """With the low-rank settings; full-rank is its dense equivalent."""
    sequence_length: int = 4096
    global_batch: int = 1024
    """Sequences of an iteration."""
    dtype: str = "bf16"
    function_flags: tuple[str, ...] = ()
    """More flags of training that make it this model."""

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise ValueError(
                f"--dtype {self.dtype}: must be one of {', '.join(DTYPES)}; "
                f"nearest legal value: bf16"
            )

    @property
    def tokens(self) -> int:
        """Of an iteration."""
        return self.global_batch * self.sequence_length


@dataclass(frozen=True)
class Plan:
    """One layout."""

    strategy: Strategy
    model: Model
    layout: Layout
    cluster: Cluster

    @cached_property
    def estimate(self) -> Estimate:
        """Its time, with the data-parallel reduction overlapped."""
        return estimate(self.model, self.layout, self.cluster)

    @cached_property
    def memory(self) -> MemoryNeed:
        """Of the GPU that needs most."""
        return memory_need(self.model, self.layout, self.cluster)

    @property
    def fits(self) -> bool:
        """Whether the GPU has that memory."""
        return self.memory.fits

    @property
    def seconds(self) -> float:
        """Of an iteration."""
        return self.estimate.seconds

    @property
    def seconds_without_overlap(self) -> float:
        """Of an iteration whose gradients are reduced after the backward."""
        whole = estimate(self.model, self.layout, self.cluster, overlap_reduction=False)
        return whole.seconds

    @property
    def gpus(self) -> int:
        """All of them."""
        return self.layout.gpus

    @property
    def nodes(self) -> int:
        """That the GPUs are in."""
        return -(-self.gpus // self.cluster.gpus_per_node)

    @property
    def tokens_per_second(self) -> float:
        """Of all GPUs."""
        layout = self.layout
        batches = layout.micro_batches * layout.data_parallel
        return layout.tokens * batches / self.seconds

    @property
    def utilisation(self) -> float:
        """Model FLOP/s over peak."""
        return model_flops_utilisation(self.model, self.layout, self.cluster, self.seconds)

    @property
    def recompute(self) -> str:
        """none, latents or full."""
        return "latents" if self.model.low_rank.recompute else self.layout.recompute


def find_plans(
    workload: Workload,
    cluster: Cluster,
    gpus: int,
    strategies: Sequence[Strategy] = ("btp", "full-rank"),
) -> tuple[list[Plan], int]:
    """The layouts that fit in memory, the fastest first, and the number of those that do not.

    Raises:
        ValueError: for a number of GPUs that the cluster does not have, and where no layout
            divides the model or none fits.
    """
    require_gpus(cluster, gpus)
    fitting: list[Plan] = []
    too_large: list[Plan] = []
    for plan in _candidates(workload, cluster, gpus, strategies):
        (fitting if plan.fits else too_large).append(plan)
    if not fitting and not too_large:
        nearest = _nearest_batch(workload, cluster, gpus, strategies)
        raise ValueError(
            f"--global-batch-size {workload.global_batch}: no layout of {gpus} GPUs divides it "
            f"and the model; nearest legal value: {nearest}"
        )
    if not fitting:
        least = min(plan.memory.total for plan in too_large) / GIB
        enough = _enough_gpus(workload, cluster, gpus, strategies)
        raise ValueError(
            f"--gpus {gpus}: no layout fits: the smallest needs {least:.1f} GiB on one GPU, and "
            f"{cluster.name} has {cluster.memory.capacity_gib:g} GiB; nearest legal value: "
            + (str(enough) if enough else "a smaller model or a shorter sequence")
        )
    finite = [plan for plan in fitting if math.isfinite(plan.seconds)]
    if not finite:
        linked = any(cluster.node.bus_gb_per_s.values()) and gpus > cluster.gpus_per_node
        within = cluster.gpus_per_node if linked else 1
        raise ValueError(
            f"--gpus {gpus}: every layout needs a link that {cluster.name} does not have "
            f"(bandwidth 0); nearest legal value: {within}"
        )
    return sorted(finite, key=lambda plan: plan.seconds), len(too_large)


def _nearest_batch(
    workload: Workload, cluster: Cluster, gpus: int, strategies: Sequence[Strategy]
) -> int:
    """The global batch nearest to that asked for which some layout divides; data parallelism over
    all GPUs is always one, so that a multiple of them is."""
    divisible = replace(workload, global_batch=gpus)
    replicas = {
        plan.layout.data_parallel for plan in _candidates(divisible, cluster, gpus, strategies)
    }
    asked = workload.global_batch
    return min(
        (max(1, round(asked / dp)) * dp for dp in replicas), key=lambda batch: abs(batch - asked)
    )


def _enough_gpus(
    workload: Workload, cluster: Cluster, gpus: int, strategies: Sequence[Strategy]
) -> int | None:
    """Twice as many, and again, until a layout fits; None where that never happens."""
    while 2 * gpus <= cluster.most_gpus:
        gpus *= 2
        if gpus > cluster.gpus_per_node and gpus % cluster.gpus_per_node:
            return None
        if any(plan.fits for plan in _candidates(workload, cluster, gpus, strategies)):
            return gpus
    return None


def fastest(plans: Sequence[Plan], strategy: Strategy | None = None) -> Plan | None:
    """The first of a strategy in sorted plans; None where there is none."""
    found = [plan for plan in plans if strategy in (None, plan.strategy)]
    return found[0] if found else None


def require_gpus(cluster: Cluster, gpus: int) -> None:
    """Raise ValueError for a number of GPUs that the cluster does not have in whole nodes."""
    if gpus > cluster.most_gpus:
        raise ValueError(
            f"--gpus {gpus}: {cluster.name} has {cluster.most_gpus}; nearest legal value: "
            f"{cluster.most_gpus // cluster.gpus_per_node * cluster.gpus_per_node}"
        )
    if gpus > cluster.gpus_per_node and gpus % cluster.gpus_per_node:
        most_nodes = cluster.most_gpus // cluster.gpus_per_node
        whole = min(round(gpus / cluster.gpus_per_node), most_nodes) * cluster.gpus_per_node
        raise ValueError(
            f"--gpus {gpus}: is no whole number of nodes of {cluster.gpus_per_node}; "
            f"nearest legal value: {whole}"
        )


def _candidates(
    workload: Workload, cluster: Cluster, gpus: int, strategies: Sequence[Strategy]
) -> Iterator[Plan]:
    """All layouts that divide model, batch and GPUs. Tensor parallelism stays within a node: across
    nodes its collectives, several a layer, would run at the network's rate."""
    for strategy in dict.fromkeys(strategies):
        for tp in _divisors(min(gpus, cluster.gpus_per_node), gpus):
            if strategy == "vanilla" and tp == 1 and "btp" in strategies:
                # On one rank both are the same model.
                continue
            model = _model_of(workload.model, strategy, tp)
            for pp in _divisors(min(gpus // tp, model.num_layers), gpus // tp):
                yield from _of_grid(workload, cluster, strategy, model, tp, pp, gpus // (tp * pp))


def _of_grid(
    workload: Workload,
    cluster: Cluster,
    strategy: Strategy,
    model: Model,
    tp: int,
    pp: int,
    dp: int,
) -> Iterator[Plan]:
    if workload.global_batch % dp:
        return
    sequences = workload.global_batch // dp
    for by_sequence in (False, True) if strategy == "full-rank" and tp > 1 else (False,):
        for virtual in _virtual_stages(model, pp):
            layout = Layout(
                sequence_length=workload.sequence_length,
                micro_batch_size=1,
                tensor_parallel=tp,
                pipeline_parallel=pp,
                virtual_stages=virtual,
                data_parallel=dp,
                sequence_parallel=by_sequence or (strategy == "btp" and tp > 1),
                dtype=DTYPES[workload.dtype],
                distributed_optimizer=dp > 1,
            )
            if not _divides(model, layout):
                return
            micro_batches = [
                size
                for size in _divisors(_LARGEST_MICRO_BATCH, sequences)
                if virtual == 1 or sequences // size % pp == 0
            ]
            plan = Plan(strategy, model, layout, cluster)
            yield from _with_micro_batches(plan, micro_batches, sequences)


def _with_micro_batches(plan: Plan, micro_batches: Sequence[int], sequences: int) -> Iterator[Plan]:
    """The plan with every micro-batch that fits, in the first way to recompute that it fits with,
    and the first that fits in none: recompute never makes the same layout faster."""
    for recompute in _recomputes(plan.strategy):
        granularity: Recompute = "full" if recompute == "full" else "none"
        settings = replace(plan.model.low_rank, recompute=recompute == "latents")
        model = replace(plan.model, low_rank=settings)
        for position, size in enumerate(micro_batches):
            layout = replace(
                plan.layout,
                micro_batch_size=size,
                micro_batches=sequences // size,
                recompute=granularity,
            )
            found = replace(plan, model=model, layout=layout)
            yield found
            if not found.fits:
                micro_batches = micro_batches[position:]
                break
        else:
            return


def _model_of(model: Model, strategy: Strategy, tp: int) -> Model:
    model = padded(model, tp)
    if strategy == "full-rank":
        return replace(model, low_rank=LowRankConfig(arch="dense"))
    return replace(
        model, low_rank=replace(model.low_rank, tp="btp" if strategy == "btp" else "vanilla")
    )


def _recomputes(strategy: Strategy) -> tuple[str, ...]:
    return ("none", "latents", "full") if strategy == "btp" else ("none", "full")


def _virtual_stages(model: Model, pp: int) -> list[int]:
    if pp == 1:
        return [1]
    of_stage = model.num_layers // pp
    return _divisors(min(_MOST_VIRTUAL_STAGES, of_stage), of_stage)


def _divides(model: Model, layout: Layout) -> bool:
    try:
        validate_layout(model, layout)
    except ValueError:
        return False
    return True


def _divisors(most: int, of: int) -> list[int]:
    return [number for number in range(1, most + 1) if of % number == 0]
