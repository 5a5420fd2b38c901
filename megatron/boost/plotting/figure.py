"""Loss curves as a figure, a picture or an SVG."""

from __future__ import annotations

import io
import os
from collections.abc import Sequence
from pathlib import Path

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
"""Told apart by all common kinds of colour vision (Okabe and Ito), on light and dark ground."""
DASHES: tuple[object, ...] = ("solid", (0, (3, 2)), (0, (1, 1.5)), (0, (6, 2, 1, 2)))
"""One for each round of the colours."""
_MANY_POINTS = 5000
_INK = "#000000"
# The time to draw a ragged line grows with the square of its length, unless it is cut.
_IN_PIECES = {"agg.path.chunksize": 1000}


def smoothed(losses: Sequence[float], window: int) -> list[float]:
    """Each loss averaged with up to `window` − 1 before it, so that no point knows the future.
    What is no number (NaN) stays so and does not count in the others' means."""
    values = np.asarray(losses, dtype=np.float64)
    finite = np.isfinite(values)
    sums = np.cumsum(np.concatenate([[0.0], np.where(finite, values, 0.0)]))
    counts = np.cumsum(np.concatenate([[0], finite]))
    ends = np.arange(1, len(values) + 1)
    begins = np.maximum(0, ends - window)
    means = (sums[ends] - sums[begins]) / np.maximum(1, counts[ends] - counts[begins])
    return list(np.where(finite, means, values))


def draw_losses(
    axes: Axes,
    x: Sequence[float],
    losses: Sequence[float],
    *,
    label: str,
    color: str,
    dashes: object = "solid",
    window: int = 1,
) -> None:
    """Training losses at `x`: smoothed over `window` of them in colour, and each of them faint."""
    if window > 1:
        (faint,) = axes.plot(x, losses, color=color, alpha=0.2, linewidth=0.8)
        # As lines of an SVG they would make it large, and nobody can tell them apart.
        faint.set_rasterized(len(x) > _MANY_POINTS)
    (strong,) = axes.plot(
        x,
        smoothed(losses, window),
        color=color,
        linestyle=dashes,
        linewidth=1.8,
        label=label,
        marker="." if len(x) == 1 else None,
    )
    strong.set_rasterized(len(x) > _MANY_POINTS)


def finish_axes(axes: Axes) -> None:
    """A light grid and no frame."""
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)


def svg(figure: Figure) -> str:
    """The figure as an `<svg>` element that stands inside a page and takes its colour of text."""
    text = io.StringIO()
    # Letters as text: smaller, and readable by search and by screen readers.
    with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": "boost", **_IN_PIECES}):
        figure.savefig(
            text,
            format="svg",
            transparent=True,
            dpi=150,
            metadata={"Creator": None, "Date": None},
        )
    element = text.getvalue()[text.getvalue().index("<svg") :]
    return element.replace(_INK, "currentColor")


def save_png(figure: Figure, path: Path) -> None:
    """Write the figure to `path`, under a temporary name first, making its folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
    with mpl.rc_context(_IN_PIECES):
        figure.savefig(partial, format="png", dpi=150)
    partial.replace(path)
