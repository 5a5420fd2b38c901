"""Several runs' losses in one figure, on one page, and as numbers."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape

import numpy as np
from matplotlib.figure import Figure
from rich.markup import escape as escape_markup
from rich.table import Table

from megatron.boost.plotting.figure import COLORS, DASHES, draw_losses, finish_axes, smoothed, svg
from megatron.boost.plotting.history import Run, Unit
from megatron.boost.plotting.page import page, table

_SHOWN_VALUES = 400
"""Of a run, on the page: closer ones cannot be pointed at."""
_HOUR = 3600.0
_IN_SECONDS = 2 * _HOUR
"""Longer times are given in hours."""
_POINTS_PER_INCH = 72.0


@dataclass(frozen=True, kw_only=True)
class LossPlot:
    """What is drawn: runs, over what, and how smooth."""

    runs: Sequence[Run]
    unit: Unit = "steps"
    window: int = 1
    """Losses that a point of a curve is the mean of."""
    sequence_length: int | None = None
    """Of runs whose source does not say."""

    def figure(self) -> Figure:
        """Training losses as lines, validation losses as circles of the same colour.

        Raises:
            ValueError: for a unit that a run cannot be drawn over.
        """
        figure = Figure(figsize=(10, 5.5), layout="constrained")
        axes = figure.subplots()
        for number, (run, x) in enumerate(zip(self.runs, self._places(), strict=True)):
            color = COLORS[number % len(COLORS)]
            dashes = DASHES[number // len(COLORS) % len(DASHES)]
            draw_losses(
                axes,
                x,
                run.losses,
                label=_in_legend(run.label),
                color=color,
                dashes=dashes,
                window=self.window,
            )
            for name, losses in run.validations.items():
                if not losses:
                    continue
                axes.plot(
                    [run.x_of_step(x, step) for step in losses],
                    list(losses.values()),
                    color=color,
                    linestyle="none",
                    marker="o",
                    markerfacecolor="none",
                    markersize=6,
                    label=_in_legend(_validation_label(run, name)),
                )
        axes.set(xlabel=self._x_label(), ylabel="loss")
        axes.legend(frameon=False)
        finish_axes(axes)
        return figure

    def html(self) -> str:
        """The page: the curves, whose values show where one points at them, and the table."""
        figure = self.figure()
        curves = svg(figure)
        values = "".join(self._pointed_at(figure))
        curves = curves.replace("</svg>", f'<g class="values">{values}</g></svg>')
        mean = f" (the mean of {self.window} logged ones)" if self.window > 1 else ""
        parts = [
            "<h1>Loss</h1>",
            curves,
            f'<p class="note">Lines: training losses{mean}. Circles: validation losses. Point at '
            "them for their values.</p>",
            table(_HEAD, self.rows()),
            *(f'<p class="note">{escape(note)}</p>' for note in self.notes()),
        ]
        return page("Loss", parts)

    def terminal_table(self) -> Table:
        """The same table for a terminal."""
        shown = Table()
        for column in _HEAD:
            shown.add_column(column, justify="left" if column == _HEAD[0] else "right")
        for row in self.rows():
            shown.add_row(*(escape_markup(cell) for cell in row))
        return shown

    def rows(self) -> list[list[str]]:
        """The table's cells, a row a run."""
        rows = []
        for run in self.runs:
            last = smoothed(run.losses, self.window)[-1]
            rows.append(
                [
                    run.label,
                    f"{run.points[-1].step:,}",
                    f"{last:.4f}",
                    f"{_lowest(run):.4f}",
                    ", ".join(f"{loss:.4f}" for _, _, loss in _last_validations(run)) or "–",
                    _duration(run.seconds()[-1]),
                ]
            )
        return rows

    def notes(self) -> list[str]:
        """What is to be said of single runs."""
        notes = []
        for run in self.runs:
            if run.nan_points:
                steps = [str(point.step) for point in run.points if math.isnan(point.loss)]
                shown = ", ".join(steps[:5]) + (", …" if len(steps) > 5 else "")
                notes.append(f"{run.label}: no number at step {shown}")
            if run.incomplete:
                notes.append(f"{run.label}: incomplete entries left out: {run.incomplete}")
        return notes

    def flat(self) -> dict[str, object]:
        """The numbers under flat keys, which begin with the run's label; None is what there is
        not, or is no number."""
        values: dict[str, object] = {"x": self.unit, "smooth": self.window}
        keys = _keys(run.label for run in self.runs)
        for key, run in zip(keys, self.runs, strict=True):
            samples = run.points[-1].samples
            length = self.sequence_length or run.sequence_length
            tokens = samples * length if samples is not None and length is not None else None
            values |= {
                f"{key}_points": len(run.points),
                f"{key}_nan_points": run.nan_points,
                f"{key}_incomplete_entries": run.incomplete,
                f"{key}_last_step": run.points[-1].step,
                f"{key}_last_loss": _or_none(smoothed(run.losses, self.window)[-1]),
                f"{key}_lowest_loss": _or_none(_lowest(run)),
                f"{key}_tokens": tokens,
                f"{key}_seconds": run.seconds()[-1],
                f"{key}_validation_loss": None,
            }
            for name, step, loss in _last_validations(run):
                ending = f"_{_key(name)}" if name else ""
                values[f"{key}_validation_loss{ending}"] = _or_none(loss)
                values[f"{key}_validation_step{ending}"] = step
        return values

    def _places(self) -> list[list[float]]:
        scale = 1 / _HOUR if self._in_hours else 1.0
        return [
            [scale * place for place in run.x(self.unit, self.sequence_length)] for run in self.runs
        ]

    @property
    def _in_hours(self) -> bool:
        longest = max(run.seconds()[-1] for run in self.runs)
        return self.unit == "time" and longest > _IN_SECONDS

    def _x_label(self) -> str:
        hours = "hours of training" if self._in_hours else "seconds of training"
        return {"steps": "step", "tokens": "tokens", "time": hours}[self.unit]

    def _pointed_at(self, figure: Figure) -> Iterable[str]:
        """An unseen circle with a title, which browsers show, at points of each curve."""
        for number, (run, x) in enumerate(zip(self.runs, self._places(), strict=True)):
            color = COLORS[number % len(COLORS)]
            losses = smoothed(run.losses, self.window)
            shown = np.unique(np.linspace(0, len(x) - 1, _SHOWN_VALUES).astype(int))
            for index in shown:
                if math.isfinite(losses[index]):
                    words = f"{run.label}: step {run.points[index].step:,}, {losses[index]:.4f}"
                    yield _circle(figure, x[index], losses[index], color, words)
            for name, of_set in run.validations.items():
                for step, loss in of_set.items():
                    if math.isfinite(loss):
                        words = f"{_validation_label(run, name)}: step {step:,}, {loss:.4f}"
                        yield _circle(figure, run.x_of_step(x, step), loss, color, words)


_HEAD = ("run", "steps", "training loss", "lowest", "validation loss", "time")


def _circle(figure: Figure, x: float, y: float, color: str, words: str) -> str:
    """At a place of the only axes of a figure that was drawn, in the units of its SVG."""
    (axes,) = figure.axes
    scale = _POINTS_PER_INCH / figure.dpi
    across, up = axes.transData.transform((x, y)) * scale
    down = figure.get_figheight() * _POINTS_PER_INCH - up
    return (
        f'<circle cx="{across:.2f}" cy="{down:.2f}" r="4" fill="{color}">'
        f"<title>{escape(words)}</title></circle>"
    )


def _duration(seconds: float) -> str:
    return f"{seconds / _HOUR:.2f} h" if seconds > _IN_SECONDS else f"{seconds:.0f} s"


def _validation_label(run: Run, name: str) -> str:
    return f"{run.label}, validation {name}".rstrip()


def _in_legend(label: str) -> str:
    """As matplotlib shows it: it leaves out what begins with an underscore, and sets formulas."""
    return ("\u200b" + label if label.startswith("_") else label).replace("$", r"\$")


def _last_validations(run: Run) -> list[tuple[str, int, float]]:
    """The name of each validation set, and the step and the loss of its last evaluation."""
    return [(name, *list(losses.items())[-1]) for name, losses in run.validations.items() if losses]


def _lowest(run: Run) -> float:
    return min((loss for loss in run.losses if not math.isnan(loss)), default=math.nan)


def _or_none(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _key(label: str) -> str:
    return re.sub(r"\W+", "_", label).strip("_").lower()


def _keys(labels: Iterable[str]) -> list[str]:
    """Labels as parts of keys, told apart by a number where they would be alike."""
    keys: list[str] = []
    for label in labels:
        key = _key(label) or "run"
        same = sum(other == key or other.startswith(f"{key}_again_") for other in keys)
        keys.append(f"{key}_again_{same}" if same else key)
    return keys
