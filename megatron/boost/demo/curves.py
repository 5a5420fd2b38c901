"""The loss curves, over steps and over time, as SVG for the report and as a picture."""

import io
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from megatron.boost.demo.recipe import COLA_BTP, COLA_VANILLA, FULL_RANK
from megatron.boost.demo.results import Result

# Told apart by all common kinds of colour vision (Okabe and Ito).
_COLORS = {COLA_BTP.key: "#0072b2", FULL_RANK.key: "#d55e00", COLA_VANILLA.key: "#009e73"}
# Vanilla low-rank is the same model as BTP: over steps its curve lies on the other's.
_DASHES = {COLA_VANILLA.key: (0, (3, 2))}


def loss_figure(results: Sequence[Result]) -> Figure:
    """Training losses over steps and over seconds: every iteration faint, smoothed in colour."""
    figure = Figure(figsize=(10, 4), layout="constrained")
    over_steps, over_time = figure.subplots(1, 2, sharey=True)
    for result in results:
        seconds = [total / 1000 for total in accumulate(result.milliseconds)]
        _draw(over_steps, list(range(1, len(result.losses) + 1)), result)
        _draw(over_time, seconds, result)
    over_steps.set(xlabel="step", ylabel="training loss")
    over_time.set(xlabel="seconds of training")
    over_steps.xaxis.get_major_locator().set_params(integer=True)
    over_steps.legend(frameon=False)
    for axes in (over_steps, over_time):
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    return figure


def smoothed(losses: Sequence[float]) -> list[float]:
    """Each loss averaged with up to nine before it, so that no point knows the future."""
    means = []
    for end in range(1, len(losses) + 1):
        window = losses[max(0, end - 10) : end]
        means.append(sum(window) / len(window))
    return means


def svg(figure: Figure) -> str:
    """The figure as an `<svg>` element that stands inside a page."""
    text = io.StringIO()
    # Letters as text: smaller, and readable by search and by screen readers.
    with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": "boost"}):
        figure.savefig(text, format="svg", metadata={"Creator": None, "Date": None})
    return text.getvalue()[text.getvalue().index("<svg") :]


def save_png(figure: Figure, path: Path) -> None:
    """Write the figure to `path`."""
    figure.savefig(path, format="png", dpi=150)


def _draw(axes: Axes, x: Sequence[float], result: Result) -> None:
    key = result.strategy.key
    axes.plot(x, result.losses, color=_COLORS[key], alpha=0.2, linewidth=0.8)
    axes.plot(
        x,
        smoothed(result.losses),
        color=_COLORS[key],
        linestyle=_DASHES.get(key, "solid"),
        linewidth=1.8,
        label=result.strategy.title,
    )
