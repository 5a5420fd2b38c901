"""`tools/plan.py --validate`: predicted against published iteration times."""

from __future__ import annotations

from megatron.boost.planner.cluster import Cluster
from megatron.boost.planner.reports.report import Report
from megatron.boost.planner.validation import (
    compare,
    compare_ratios,
    mean_error,
    worst_error,
)


def validation_report(cluster: Cluster) -> Report:
    """Every row with its error and what it assumes, the ratios, and the mean and worst error."""
    report = Report()
    comparisons = compare(cluster)
    report.table(
        f"Predicted against published iteration times, {cluster.name}",
        ["row", "published s", "predicted s", "error %", "assumes"],
        [
            [
                found.run.title,
                f"{found.run.seconds:.3f}",
                f"{found.predicted:.3f}",
                f"{100 * found.error:+.1f}",
                found.run.assumes,
            ]
            for found in comparisons
        ],
    )
    ratios = compare_ratios(comparisons)
    report.table(
        "Full-rank over BTP",
        ["row", "published", "predicted", "error %"],
        [
            [
                ratio.row.title,
                f"{ratio.published:.2f}",
                f"{ratio.predicted:.2f}",
                f"{100 * ratio.error:+.1f}",
            ]
            for ratio in ratios
        ],
    )
    mean, worst = 100 * mean_error(comparisons), 100 * worst_error(comparisons)
    report.say(
        f"Mean error {mean:.1f} %, worst {worst:.1f} %. Two constants of {cluster.name}'s file are "
        "fitted to these times: host_us_per_operation and memory.elementwise_efficiency. Products "
        "and collectives are fitted to published microbenchmarks."
    )
    report.flat = {"mean_error_percent": mean, "worst_error_percent": worst}
    for found in comparisons:
        report.flat[f"{found.run.title}, predicted_seconds"] = found.predicted
        report.flat[f"{found.run.title}, published_seconds"] = found.run.seconds
    for ratio in ratios:
        report.flat[f"{ratio.row.title}, full_rank_over_btp_error_percent"] = 100 * ratio.error
    return report
