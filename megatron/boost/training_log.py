"""Reading the lines that Megatron's training loop logs."""

import re
from dataclasses import dataclass

# A NaN loss is left out of the line, so the loss is looked for apart.
_ITERATION = re.compile(
    r"iteration\s+(\d+)/\s*(\d+) \|.*elapsed time per iteration \(ms\): ([\d.]+) \|"
)
_LOSS = re.compile(r" lm loss: (\S+) \|")
_VALIDATION = re.compile(r"validation loss at (.+?) \| lm loss value: (\S+) \|")


@dataclass(frozen=True)
class Iteration:
    """One logged line: means over the iterations since the line before it."""

    number: int
    total: int
    """The last iteration of the run."""
    loss: float
    milliseconds: float
    """Time of one iteration."""


@dataclass(frozen=True)
class Validation:
    """The result of one evaluation."""

    place: str
    """Megatron's words for when and on what, e.g. `iteration 250 on validation set`."""
    loss: float


def parse_iteration(line: str) -> Iteration | None:
    """The iteration that `line` logs, its numbers as printed, or None for any other line."""
    found = _ITERATION.search(line)
    if found is None:
        return None
    loss = _LOSS.search(line)
    return Iteration(
        number=int(found[1]),
        total=int(found[2]),
        loss=float(loss[1]) if loss else float("nan"),
        milliseconds=float(found[3]),
    )


def parse_validation(line: str) -> Validation | None:
    """The evaluation that `line` reports, or None for any other line."""
    found = _VALIDATION.search(line)
    return Validation(found[1], float(found[2])) if found else None


class TrainingLog:
    """Collects what a process logs, line by line, with each iteration's own numbers.

    Megatron logs the first iteration of a process without starting its means anew, so the second
    line's loss and time average over the first iteration once more. That is undone here.
    """

    def __init__(self) -> None:
        self.iterations: list[Iteration] = []
        self.validations: list[Validation] = []

    def feed(self, line: str) -> Iteration | None:
        """Take one line of output; returns the iteration it logs, if it does."""
        validation = parse_validation(line)
        if validation is not None:
            self.validations.append(validation)
        iteration = parse_iteration(line)
        if iteration is None:
            return None
        if len(self.iterations) == 1:
            iteration = _without_first(iteration, self.iterations[0])
        self.iterations.append(iteration)
        return iteration


def _without_first(second: Iteration, first: Iteration) -> Iteration:
    count = second.number - first.number

    def own(mean: float, of_first: float) -> float:
        return (mean * (count + 1) - of_first) / count

    return Iteration(
        second.number,
        second.total,
        own(second.loss, first.loss),
        own(second.milliseconds, first.milliseconds),
    )
