"""Strong and weak scaling: the fastest layout of a model from one node to the whole cluster."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from megatron.boost.planner.cluster import Cluster
from megatron.boost.planner.layouts import (
    Plan,
    Strategy,
    Workload,
    find_plans,
    require_gpus,
)

Scaling = Literal["strong", "weak"]


@dataclass(frozen=True)
class Point:
    """The fastest layout on a number of GPUs."""

    plan: Plan
    workload: Workload
    efficiency: float
    """Tokens per second and GPU, over those of the number of GPUs that has most."""


def scaling(
    workload: Workload, cluster: Cluster, gpus: int, kind: Scaling, strategy: Strategy
) -> list[Point]:
    """From the fewest GPUs that hold the model to `gpus`, each time twice as many.

    Strong: the global batch stays. Weak: `workload.global_batch` is that of `gpus`, and a smaller
    number of GPUs gets its share, so that each GPU has as many sequences everywhere. A number of
    GPUs that no layout divides or fits is left out.

    Raises:
        ValueError: where no number has a layout.
    """
    require_gpus(cluster, gpus)
    found: list[tuple[Plan, Workload]] = []
    for number in _numbers(cluster, gpus):
        batch = workload.global_batch
        if kind == "weak":
            if batch * number % gpus:
                continue
            batch = batch * number // gpus
        here = replace(workload, global_batch=batch)
        try:
            plans, _ = find_plans(here, cluster, number, [strategy])
        except ValueError:
            continue
        found.append((plans[0], here))
    if not found:
        # For its message: the largest number has the best chance.
        find_plans(workload, cluster, gpus, [strategy])
        raise ValueError(f"--gpus {gpus}: no number of GPUs up to that has a layout")
    most = max(plan.tokens_per_second / plan.gpus for plan, _ in found)
    return [Point(plan, here, plan.tokens_per_second / plan.gpus / most) for plan, here in found]


def _numbers(cluster: Cluster, gpus: int) -> list[int]:
    """1, 2, 4, … GPUs within a node, then 1, 2, 4, … nodes, and `gpus`."""
    found = {gpus}
    for start, end in ((1, min(gpus, cluster.gpus_per_node)), (cluster.gpus_per_node, gpus)):
        number = start
        while number < end:
            found.add(number)
            number *= 2
    return sorted(found)
