"""A training run's losses, put together from what was written while it trained."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Literal

Unit = Literal["steps", "tokens", "time"]
"""What losses are drawn over."""


@dataclass(frozen=True)
class Point:
    """A logged training loss."""

    step: int
    loss: float
    """NaN where it was none."""
    seconds: float
    """Of training since the point before."""
    samples: int | None
    """Consumed since the beginning of the training; None where that is not known."""


@dataclass
class Run:
    """One training run, resumed or not. What is added is what was written, in that order."""

    label: str
    sequence_length: int | None = None
    """Tokens of a sample; None where the source does not say."""
    points: list[Point] = field(default_factory=list)
    """With growing steps."""
    validations: dict[str, dict[int, float]] = field(default_factory=dict)
    """Validation losses by growing step, by the name of the validation set ("" where there is but
    one)."""
    incomplete: int = 0
    """Lines or records that were cut off or torn apart, and left out."""

    def add(self, point: Point) -> None:
        """Add a training loss. Where it repeats a step, the training was resumed from before it,
        and what was known from there on is forgotten."""
        while self.points and self.points[-1].step >= point.step:
            self.points.pop()
        for losses in self.validations.values():
            while losses and next(reversed(losses)) >= point.step:
                losses.popitem()
        self.points.append(point)

    def add_validation(self, name: str, step: int | None, loss: float) -> None:
        """Add a validation loss, of the last step where `step` is None. The first of a step counts:
        Megatron writes that of the test set to TensorBoard under the same name after it."""
        if step is None:
            step = self.points[-1].step if self.points else 0
        self.validations.setdefault(name, {}).setdefault(step, loss)

    def last_step_before(self, step: int) -> int:
        """The last known step before `step`; 0 where there is none."""
        return max((point.step for point in self.points if point.step < step), default=0)

    @property
    def losses(self) -> list[float]:
        """The training losses, point by point."""
        return [point.loss for point in self.points]

    @property
    def nan_points(self) -> int:
        """How many training losses were no numbers."""
        return sum(math.isnan(loss) for loss in self.losses)

    def seconds(self) -> list[float]:
        """The time trained up to each point."""
        return list(accumulate(point.seconds for point in self.points))

    def x(self, unit: Unit, sequence_length: int | None = None) -> list[float]:
        """Where each point stands: its step, the tokens read, or the seconds trained up to it.

        Raises:
            ValueError: for tokens, where neither the source nor `sequence_length` says how many a
                sample has, or the source has no count of samples.
        """
        if unit == "time":
            return self.seconds()
        if unit == "steps":
            return [float(point.step) for point in self.points]
        length = sequence_length or self.sequence_length
        if length is None:
            raise ValueError(
                f"--x tokens: {self.label} does not say how long its sequences are; give "
                "--seq-length"
            )
        known = [point.samples for point in self.points if point.samples is not None]
        if len(known) < len(self.points):
            raise ValueError(
                f"--x tokens: {self.label} has no count of samples; nearest legal value: steps"
            )
        return [float(samples * length) for samples in known]

    def x_of_step(self, x: Sequence[float], step: int) -> float:
        """Where a step stands among the points, which stand at `x`; between two of them linearly,
        outside of them at the nearest."""
        import numpy as np

        return float(np.interp(step, [point.step for point in self.points], x))
