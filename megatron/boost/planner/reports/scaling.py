"""`tools/plan.py --scaling`: the fastest layouts from one GPU to the whole cluster."""

from __future__ import annotations

from collections.abc import Sequence

from megatron.boost.planner.cluster import Cluster
from megatron.boost.planner.layouts import Strategy, Workload
from megatron.boost.planner.memory import GIB
from megatron.boost.planner.reports.plan import name_of
from megatron.boost.planner.reports.report import Report
from megatron.boost.planner.scaling import Point, Scaling, scaling


def scaling_report(
    workload: Workload,
    cluster: Cluster,
    gpus: int,
    kind: Scaling,
    strategies: Sequence[Strategy],
) -> Report:
    """A table for each strategy that has a layout.

    Raises:
        ValueError: where none has.
    """
    report = Report()
    refusals: list[ValueError] = []
    for strategy in strategies:
        model = "full-rank" if strategy == "full-rank" else workload.model.low_rank.arch
        try:
            points = scaling(workload, cluster, gpus, kind, strategy)
        except ValueError as refusal:
            refusals.append(refusal)
            if len(refusals) == len(strategies):
                raise
            report.say(f"The {model} model has no layout: {refusal}")
            continue
        report.table(
            f"{kind.capitalize()} scaling of the {model} model, {cluster.name}",
            _COLUMNS,
            [_row(point) for point in points],
        )
        for point in points:
            key = f"{strategy.replace('-', '_')}_{point.plan.gpus}_gpus"
            report.flat[f"{key}_seconds_per_iteration"] = point.plan.seconds
            report.flat[f"{key}_tokens_per_second"] = point.plan.tokens_per_second
            report.flat[f"{key}_efficiency"] = point.efficiency
    report.say(
        "Efficiency: tokens per second and GPU over those of the row that has most. Exposed DP, "
        "bubble and exposed TP: percent of the iteration. No overlap: seconds of an iteration "
        "whose gradients are reduced after the backward."
    )
    return report


_COLUMNS = [
    "GPUs",
    "nodes",
    "batch",
    "model",
    "TP",
    "PP",
    "virtual",
    "DP",
    "micro-batch",
    "s/iteration",
    "tokens/s",
    "efficiency %",
    "exposed TP %",
    "bubble %",
    "exposed DP %",
    "no overlap s",
    "GiB",
]


def _row(point: Point) -> list[str]:
    plan = point.plan
    layout, estimate = plan.layout, plan.estimate

    def share(seconds: float) -> str:
        return f"{100 * seconds / plan.seconds:.1f}"

    return [
        f"{plan.gpus:,}",
        f"{plan.nodes:,}",
        f"{point.workload.global_batch:,}",
        name_of(plan),
        str(layout.tensor_parallel),
        str(layout.pipeline_parallel),
        str(layout.virtual_stages),
        str(layout.data_parallel),
        str(layout.micro_batch_size),
        f"{plan.seconds:.3f}",
        f"{plan.tokens_per_second:,.0f}",
        f"{100 * point.efficiency:.0f}",
        share(estimate.tensor_parallel),
        share(estimate.bubble + estimate.transfers),
        share(estimate.data_parallel),
        f"{plan.seconds_without_overlap:.3f}",
        f"{plan.memory.total / GIB:.1f}",
    ]
