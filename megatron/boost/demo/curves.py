"""The demo's loss curves, over steps and over time."""

from collections.abc import Sequence
from itertools import accumulate

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from megatron.boost.demo.recipe import COLA_BTP, COLA_VANILLA, FULL_RANK
from megatron.boost.demo.results import Result
from megatron.boost.plotting.figure import COLORS, DASHES, draw_losses, finish_axes

_COLORS = dict(zip((COLA_BTP.key, FULL_RANK.key, COLA_VANILLA.key), COLORS, strict=False))
# Vanilla low-rank is the same model as BTP: over steps its curve lies on the other's.
_DASHES = {COLA_VANILLA.key: DASHES[1]}
_WINDOW = 10


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
        finish_axes(axes)
    return figure


def _draw(axes: Axes, x: Sequence[float], result: Result) -> None:
    key = result.strategy.key
    draw_losses(
        axes,
        x,
        result.losses,
        label=result.strategy.title,
        color=_COLORS[key],
        dashes=_DASHES.get(key, "solid"),
        window=_WINDOW,
    )
