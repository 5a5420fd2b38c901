"""`tools/plan.py --plot`: the pictures, and where they lie."""

from __future__ import annotations

from pathlib import Path

from megatron.boost.command_line import why_unwritable
from megatron.boost.planner.cluster import Cluster
from megatron.boost.planner.layouts import Workload
from megatron.boost.planner.plots import planner_figure, save_figure
from megatron.boost.planner.reports.report import Report


def plots_report(
    workload: Workload, cluster: Cluster, tensor_parallel: int, micro_batch: int, prefix: Path
) -> Report:
    """Draws and saves.

    Raises:
        ValueError: for a prefix that cannot be written, and a model that the tensor-parallel size
            does not divide.
    """
    if reason := why_unwritable(prefix):
        raise ValueError(f"--plot {prefix}: cannot be written: {reason}")
    report = Report()
    title = (
        f"{workload.model.low_rank.arch}, d {workload.model.hidden_size}, "
        f"{workload.model.num_layers} layers, TP {tensor_parallel}, {cluster.name}"
    )
    figure = planner_figure(workload, cluster, tensor_parallel, micro_batch)
    picture, page = save_figure(figure, prefix, title)
    report.say(f"Drawn: {picture} and {page}")
    report.flat = {"picture": str(picture), "page": str(page)}
    return report
