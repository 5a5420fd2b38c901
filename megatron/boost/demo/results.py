"""What one run measured, read from its log and from its report of collectives."""

import json
import statistics
from dataclasses import dataclass
from pathlib import Path

from megatron.boost.demo.launch import TrainingFailed
from megatron.boost.demo.recipe import Recipe, Strategy
from megatron.boost.training_log import TrainingLog

WARMUP_ITERATIONS = 10
"""Left out of the speed: memory is first touched, caches fill."""

OPERATIONS = {"all_reduce": "AR", "all_gather": "AG", "reduce_scatter": "RS"}


@dataclass(frozen=True)
class Collectives:
    """What one layer communicates for one micro-batch in one direction."""

    calls: dict[str, float]
    """By operation."""
    mib: float
    """Of the tensors handed over on one rank."""

    def __str__(self) -> str:
        """As `7 AR + 1 AG`."""
        parts = [f"{self.calls[name]:g} {OPERATIONS[name]}" for name in OPERATIONS]
        return " + ".join(part for part in parts if not part.startswith("0 ")) or "none"


@dataclass(frozen=True)
class Result:
    """What one run measured."""

    strategy: Strategy
    losses: list[float]
    """Of every iteration."""
    milliseconds: list[float]
    """Of every iteration."""
    loss: float
    """Mean of the last tenth of the iterations; a single batch's says little."""
    validation_loss: float
    iteration_ms: float
    """Median, without the first iterations."""
    tokens_per_second: float
    forward: Collectives
    backward: Collectives
    parameters: int
    peak_memory_mib: float
    """Of the rank that needed most."""


def read_result(strategy: Strategy, recipe: Recipe, log: TrainingLog, report: Path) -> Result:
    """The result of a finished run. Raises `TrainingFailed` when its log lacks a part."""
    if len(log.iterations) != recipe.steps:
        raise TrainingFailed(
            f"{strategy.title}: the log has {len(log.iterations)} of {recipe.steps} iterations"
        )
    if not log.validations:
        raise TrainingFailed(f"{strategy.title}: the log has no validation loss")
    measured = json.loads(report.read_text(encoding="utf-8"))
    losses = [iteration.loss for iteration in log.iterations]
    milliseconds = [iteration.milliseconds for iteration in log.iterations]
    iteration_ms = statistics.median(milliseconds[min(WARMUP_ITERATIONS, recipe.steps // 2) :])
    return Result(
        strategy=strategy,
        losses=losses,
        milliseconds=milliseconds,
        loss=statistics.fmean(losses[-max(1, recipe.steps // 10) :]),
        validation_loss=log.validations[-1].loss,
        iteration_ms=iteration_ms,
        tokens_per_second=recipe.tokens_per_step / iteration_ms * 1000,
        forward=_collectives(measured, "forward"),
        backward=_collectives(measured, "backward"),
        parameters=int(measured["parameters"]),
        peak_memory_mib=float(measured["peak_memory_mib"]),
    )


def _collectives(measured: dict[str, float], phase: str) -> Collectives:
    return Collectives(
        {name: measured[f"{phase}_{name}_calls_per_layer"] for name in OPERATIONS},
        sum(measured[f"{phase}_{name}_mib_per_layer"] for name in OPERATIONS),
    )


def flat_results(results: list[Result]) -> dict[str, object]:
    """All results as `--json` gives them: the strategy's key, then the quantity and its unit."""
    flat: dict[str, object] = {}
    for result in results:
        key = result.strategy.key
        flat[f"{key}_loss"] = result.loss
        flat[f"{key}_validation_loss"] = result.validation_loss
        flat[f"{key}_tokens_per_second"] = result.tokens_per_second
        flat[f"{key}_iteration_ms"] = result.iteration_ms
        for phase, collectives in (("forward", result.forward), ("backward", result.backward)):
            for name, calls in collectives.calls.items():
                flat[f"{key}_{phase}_{name}_calls_per_layer"] = calls
            flat[f"{key}_{phase}_mib_per_layer"] = collectives.mib
        flat[f"{key}_parameters"] = result.parameters
        flat[f"{key}_peak_memory_mib"] = result.peak_memory_mib
    return flat
