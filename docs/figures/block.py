"""One layer, tensor by tensor, under the three strategies: how wide each tensor is, how much of it
one rank holds, and where a collective stands."""

from __future__ import annotations

from dataclasses import dataclass

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from docs.figures.style import BTP, COLLECTIVE, FAINT, FULL_RANK, INK, VANILLA

D, F, R = 1.0, 2.6875, 0.25
"""Widths in hidden sizes: those of LLaMA-2 7B with r = d/4."""
RANKS = 4
ARROW = 1.15
"""The length of one, in hidden sizes."""


@dataclass(frozen=True)
class Tensor:
    """An activation between two operations."""

    label: str
    width: float
    """Of the whole tensor, in hidden sizes."""
    sharded: bool
    """Whether a rank holds 1/T of it."""


@dataclass(frozen=True)
class Step:
    """What leads to the next tensor."""

    label: str
    all_reduced: str = ""
    """The width of the all-reduces that it ends in, as a sum; empty: none."""
    gathered: str = ""
    """The same of all-gathers."""


X, X_LOCAL = Tensor("x: d", D, False), Tensor("x: d", D, True)
HEADS = Tensor("heads: d", D, True)
QKV = Tensor("q, k, v: 3d", 3 * D, True)
GATE_UP = Tensor("gate, up: 2f", 2 * F, True)
PRODUCT = Tensor("product: f", F, True)

FULL_RANK_LAYER = (
    *(X, Step("norm\nW_qkv"), QKV, Step("attention"), HEADS, Step("W_o", "d"), X),
    *(
        Step("norm\nW_gate, W_up"),
        GATE_UP,
        Step("SiLU(g)·u\nor g·u"),
        PRODUCT,
        Step("W_down", "d"),
        X,
    ),
)
VANILLA_LAYER = (
    *(X, Step("norm\nA_qkv"), Tensor("3r", 3 * R, True), Step("φ\nB_qkv", "d + d + d")),
    *(Tensor("q, k, v: 3d", 3 * D, False), Step("attention", gathered="d")),
    *(Tensor("heads: d", D, False), Step("A_o"), Tensor("r", R, True), Step("φ\nB_o", "d"), X),
    *(Step("norm\nA_gate, A_up"), Tensor("2r", 2 * R, True), Step("φ\nB_gate, B_up", "f + f")),
    *(
        Tensor("gate, up: 2f", 2 * F, False),
        Step("SiLU(g)·u\nor g·u"),
        Tensor("product: f", F, False),
    ),
    *(Step("A_down"), Tensor("r", R, True), Step("φ\nB_down", "d"), X),
)
BTP_LAYER = (
    *(X_LOCAL, Step("γ∘A_qkv", "3r"), Tensor("3r", 3 * R, False), Step("1/ρ, φ\nB_qkv"), QKV),
    *(Step("attention"), HEADS, Step("A_o", "r"), Tensor("r", R, False), Step("φ\nB_o")),
    *(X_LOCAL, Step("γ∘A_gate, A_up", "2r"), Tensor("2r", 2 * R, False)),
    *(
        Step("1/ρ, φ\nB_gate, B_up"),
        GATE_UP,
        Step("SiLU(g)·u\nor g·u"),
        PRODUCT,
        Step("A_down", "r"),
    ),
    *(Tensor("r", R, False), Step("φ\nB_down"), X_LOCAL),
)
LAYERS = (
    ("full-rank", FULL_RANK, FULL_RANK_LAYER),
    ("vanilla low-rank", VANILLA, VANILLA_LAYER),
    ("BTP", BTP, BTP_LAYER),
)


def communicated(layer: tuple[Tensor | Step, ...], kind: str) -> list[str]:
    """The widths of the collectives of a kind ("all_reduced", "gathered"), one by one."""
    steps = [part for part in layer if isinstance(part, Step)]
    return [width for step in steps for width in getattr(step, kind).split(" + ") if width]


def figure() -> Figure:
    """The three layers under each other."""
    drawn = Figure(figsize=(13, 9.6), layout="constrained")
    for axes, (title, colour, layer) in zip(drawn.subplots(3, 1), LAYERS, strict=True):
        _draw(axes, layer, colour)
        reduced = communicated(layer, "all_reduced")
        gathered = communicated(layer, "gathered")
        also = f" and {len(gathered)} all-gather ({' + '.join(gathered)})" if gathered else ""
        said = f"{title}: {len(reduced)} all-reduces forward ({' + '.join(reduced)}){also}"
        axes.set_title(said, loc="left", fontsize=12, color=INK)
    return drawn


def _draw(axes: Axes, layer: tuple[Tensor | Step, ...], colour: str) -> None:
    """A bar for each tensor, as high as it is wide, filled as far as one rank holds it."""
    tallest, place = 2 * F, 0.0
    for part in layer:
        if isinstance(part, Tensor):
            bottom = -part.width / 2
            held = part.width / RANKS if part.sharded else part.width
            axes.add_patch(
                Rectangle((place, bottom), 0.5, part.width, facecolor="none", edgecolor=FAINT)
            )
            axes.add_patch(Rectangle((place, bottom), 0.5, held, facecolor=colour, alpha=0.75))
            axes.text(place + 0.25, bottom - 0.15, part.label, ha="center", va="top", fontsize=8.5)
            place += 0.5
            continue
        collective = part.all_reduced or part.gathered
        axes.annotate(
            "",
            xy=(place + ARROW, 0),
            xytext=(place, 0),
            arrowprops={"arrowstyle": "-|>", "color": COLLECTIVE if collective else FAINT},
        )
        axes.text(
            place + ARROW / 2, 0.12, part.label, ha="center", fontsize=7, linespacing=1.1, color=INK
        )
        if collective:
            kind = "all-reduce" if part.all_reduced else "all-gather"
            axes.text(
                *(place + ARROW / 2, tallest / 2 + 0.25),
                f"{kind}\n{collective}",
                ha="center",
                fontsize=8.5,
                color=COLLECTIVE,
            )
            axes.plot([place + ARROW / 2] * 2, [0.85, tallest / 2 + 0.15], color=COLLECTIVE, lw=0.8)
        place += ARROW
    axes.set(xlim=(-0.4, place + 0.4), ylim=(-tallest / 2 - 0.7, tallest / 2 + 1.2))
    axes.axis("off")
