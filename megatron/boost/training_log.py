"""Reading the lines that Megatron's training loop logs.

They are looked for anywhere in a line of output: launchers put a rank's name before them, and two
ranks that write at once leave two messages in one line.
"""

import re
from dataclasses import dataclass, replace

# From its number to what every release of Megatron prints last, and not into another one's.
_ITERATION = re.compile(
    r"iteration\s+(\d+)/\s*(\d+) \|((?:(?!iteration\s+\d+/).)*?)"
    r"number of nan iterations:\s+\d+ \|"
)
_BEGUN = re.compile(r"iteration\s+(\d+)/\s*\d+ \|")
_SAMPLES = re.compile(r" consumed samples:\s+(\d+) \|")
_MILLISECONDS = re.compile(r" elapsed time per iteration \(ms\): ([\d.]+) \|")
# A NaN loss is left out of the line.
_LOSS = re.compile(r" lm loss: (\S+) \|")
_VALIDATION = re.compile(r"validation(?:-(\S+))? loss at (.+?) \| lm loss value: (\S+) \|")
_PLACE = re.compile(r"iteration (\d+)")


@dataclass(frozen=True)
class Iteration:
    """One logged line: means over the iterations since the line before it."""

    number: int
    total: int
    """The last iteration of the run."""
    loss: float
    """NaN where the line has none."""
    milliseconds: float
    """Time of one iteration."""
    samples: int
    """Consumed since the beginning of the training."""


@dataclass(frozen=True)
class Validation:
    """The result of one evaluation."""

    place: str
    """Megatron's words for when and on what, e.g. `iteration 250 on validation set`."""
    loss: float
    name: str = ""
    """Of the validation set, where there are several."""

    @property
    def iteration(self) -> int | None:
        """After which it was, where `place` tells; older releases do not at a training's end."""
        found = _PLACE.match(self.place)
        return int(found[1]) if found else None

    @property
    def on_test_set(self) -> bool:
        """Whether it was the test set that was evaluated."""
        return self.place.endswith(("test set", "test data"))


def parse_iteration(line: str) -> Iteration | None:
    """The iteration that `line` logs, its numbers as printed, or None for any other line and for
    one that is cut off or torn apart."""
    found = _ITERATION.search(line)
    if found is None:
        return None
    milliseconds, samples = _MILLISECONDS.search(found[3]), _SAMPLES.search(found[3])
    if milliseconds is None or samples is None:
        return None
    loss = _LOSS.search(found[3])
    return Iteration(
        number=int(found[1]),
        total=int(found[2]),
        loss=float(loss[1]) if loss else float("nan"),
        milliseconds=float(milliseconds[1]),
        samples=int(samples[1]),
    )


def begun_iteration(line: str) -> int | None:
    """The number of the iteration whose line begins in `line`, complete or not."""
    found = _BEGUN.search(line)
    return int(found[1]) if found else None


def parse_validation(line: str) -> Validation | None:
    """The evaluation that `line` reports, or None for any other line."""
    found = _VALIDATION.search(line)
    return Validation(found[2], float(found[3]), found[1] or "") if found else None


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
            iteration = without_first(iteration, self.iterations[0])
        self.iterations.append(iteration)
        return iteration


def without_first(second: Iteration, first: Iteration) -> Iteration:
    """The second line of a process without its first iteration, which its means hold too."""
    count = second.number - first.number

    def own(mean: float, of_first: float) -> float:
        return (mean * (count + 1) - of_first) / count

    return replace(
        second,
        loss=own(second.loss, first.loss),
        milliseconds=own(second.milliseconds, first.milliseconds),
    )
