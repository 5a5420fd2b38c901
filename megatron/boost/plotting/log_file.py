"""A run from what Megatron printed: the standard output of any of its training programs."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from megatron.boost.plotting.history import Point, Run
from megatron.boost.training_log import (
    Iteration,
    Validation,
    begun_iteration,
    parse_iteration,
    parse_validation,
    without_first,
)

_PROCESS_BEGINS = "[before the start of training step]"
_SEQUENCE_LENGTH = re.compile(r"\bseq_length \.{3,} (\d+)")


@dataclass
class _Process:
    """What one process logged, from its start or a resumption to its end."""

    entries: list[Iteration | Validation] = field(default_factory=list)
    numbers: list[int] = field(default_factory=list)
    """Of the iterations that it logged, those included whose lines are damaged."""

    @property
    def interval(self) -> int | None:
        """From one logged iteration to the next; None where there is but one."""
        numbers = self.numbers[:3]
        return numbers[-1] - numbers[-2] if len(numbers) > 1 else None


def read_log(path: Path, label: str) -> Run:
    """The run that a log file tells of.

    A line that is cut off or torn apart by another rank's output is left out and counted. A log
    that several processes wrote to, one after the other, is one run.

    Raises:
        ValueError: for a file without a training loss.
    """
    run = Run(label)
    with path.open(encoding="utf-8", errors="replace") as file:
        processes = _processes(file, run)
    for process in processes:
        _add(process, run)
    if not run.points:
        raise ValueError(
            f"{path}: has no training loss: no complete line 'iteration N/ TOTAL | … | lm loss: … "
            "|' as Megatron prints it"
        )
    if run.nan_points == len(run.points):
        raise ValueError(
            f"{path}: none of its {len(run.points)} iterations has an 'lm loss' that is a number"
        )
    return run


def _processes(lines: Iterable[str], run: Run) -> list[_Process]:
    """What each process logged; notes in `run` what else the lines tell."""
    processes = [_Process()]
    for line in lines:
        length = _SEQUENCE_LENGTH.search(line)
        if length is not None:
            run.sequence_length = int(length[1])
        begun = begun_iteration(line)
        numbers = processes[-1].numbers
        if _PROCESS_BEGINS in line or (begun is not None and numbers and begun <= numbers[-1]):
            processes.append(_Process())
        process = processes[-1]
        if begun is not None:
            process.numbers.append(begun)
            iteration = parse_iteration(line)
            if iteration is None:
                run.incomplete += 1
            else:
                process.entries.append(iteration)
        validation = parse_validation(line)
        if validation is not None and not validation.on_test_set:
            process.entries.append(validation)
    return processes


def _add(process: _Process, run: Run) -> None:
    """Add to the run what a process logged."""
    interval = process.interval
    before: Iteration | None = None
    for entry in process.entries:
        if isinstance(entry, Validation):
            run.add_validation(entry.name, entry.iteration, entry.loss)
            continue
        iteration, covered = entry, 1
        if before is not None:
            covered = iteration.number - before.number
            second = [before.number, iteration.number] == process.numbers[:2]
            if second and interval and before.number % interval:
                # Megatron logs a process's first iteration beside every N-th, and takes it into the
                # next mean too. With a line for every iteration that cannot be told, since older
                # releases begin anew after each line: those stay as printed.
                iteration = without_first(iteration, before)
        elif interval is None or iteration.number % interval == 0:
            covered = interval or iteration.number - run.last_step_before(iteration.number)
        seconds = covered * iteration.milliseconds / 1000
        run.add(Point(iteration.number, iteration.loss, seconds, iteration.samples))
        before = entry
