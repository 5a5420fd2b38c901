"""Predicted against published iteration times, and the ratios between strategies."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from megatron.boost.accounting.sizes import Strategy
from megatron.boost.planner.cluster import Cluster
from megatron.boost.planner.iteration import estimate
from megatron.boost.planner.published import CODE, Row, Run, runs


@dataclass(frozen=True)
class Comparison:
    """One published time and what the model of costs says of it."""

    run: Run
    predicted: float
    """Seconds."""

    @property
    def error(self) -> float:
        """(predicted − published) / published."""
        return self.predicted / self.run.seconds - 1


@dataclass(frozen=True)
class RatioComparison:
    """Full-rank over BTP of one row."""

    row: Row
    published: float
    predicted: float

    @property
    def error(self) -> float:
        """(predicted − published) / published."""
        return self.predicted / self.published - 1


def compare(cluster: Cluster) -> list[Comparison]:
    """Every published time; `cluster` is what they were measured on."""
    return [
        Comparison(run, estimate(run.model, run.layout, cluster, implementation=CODE).seconds)
        for run in runs()
    ]


def compare_ratios(comparisons: Sequence[Comparison]) -> list[RatioComparison]:
    """Full-rank over BTP of every row that has both."""
    by_row: dict[Row, dict[Strategy, Comparison]] = {}
    for comparison in comparisons:
        by_row.setdefault(comparison.run.row, {})[comparison.run.strategy] = comparison
    return [
        RatioComparison(
            row,
            found["dense"].run.seconds / found["btp"].run.seconds,
            found["dense"].predicted / found["btp"].predicted,
        )
        for row, found in by_row.items()
        if "dense" in found
    ]


def mean_error(comparisons: Sequence[Comparison]) -> float:
    """Of the absolute errors."""
    return fmean(abs(comparison.error) for comparison in comparisons)


def worst_error(comparisons: Sequence[Comparison]) -> float:
    """Of the absolute errors."""
    return max(abs(comparison.error) for comparison in comparisons)
