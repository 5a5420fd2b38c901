"""Results of demo runs that were never run."""

import json
from pathlib import Path

from megatron.boost.demo.recipe import Recipe, Strategy
from megatron.boost.demo.results import Result, read_result
from megatron.boost.training_log import TrainingLog
from tests.support.training_output import training_lines

STEPS = 40


def losses_of_run() -> list[float]:
    """A loss that falls from 8 by a tenth a step."""
    return [8 - step / 10 for step in range(STEPS)]


def collectives_report(**changes: float) -> dict[str, float]:
    """A report of collectives as a BTP run writes it, with `changes`."""
    report: dict[str, float] = {"parameters": 7_800_000, "peak_memory_mib": 900.5}
    for phase in ("forward", "backward"):
        for operation in ("all_reduce", "all_gather", "reduce_scatter"):
            report[f"{phase}_{operation}_calls_per_layer"] = 0
            report[f"{phase}_{operation}_mib_per_layer"] = 0.0
        report[f"{phase}_all_reduce_calls_per_layer"] = 4
        report[f"{phase}_all_reduce_mib_per_layer"] = 3.5
    report["recompute_collective_calls_per_layer"] = 0
    return report | changes


def made_up_result(
    folder: Path, strategy: Strategy, *, milliseconds: float, **changes: float
) -> Result:
    """The result of a run of `STEPS` steps at `milliseconds` each, after ten slow ones."""
    times = [1000.0] * 10 + [milliseconds] * (STEPS - 10)
    log = TrainingLog()
    for line in training_lines(losses_of_run(), times, 5.25):
        log.feed(line)
    path = folder / f"{strategy.key}.json"
    path.write_text(json.dumps(collectives_report(**changes)))
    return read_result(strategy, Recipe(steps=STEPS), log, path)
