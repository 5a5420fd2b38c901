"""The message that carries a latent and RMSNorm's statistics through one all-reduce."""

from __future__ import annotations

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from boost_layers.ops import statistics_columns
from docs.figures.style import BTP, FAINT, INK

RANKS = 4
BLOCKS = (("q", 3.0), ("k", 3.0), ("v", 3.0))
SLOT = 0.9


def figure() -> Figure:
    """What each rank puts in, and what each gets out."""
    drawn = Figure(figsize=(10, 4.6), layout="constrained")
    axes = drawn.subplots()
    for rank in range(RANKS):
        _row(axes, RANKS - rank, f"rank {rank} sends", own=(rank,), of="partial ", index=rank)
    _row(axes, -0.3, "all receive", own=tuple(range(RANKS)), of="Σ ", index=None)
    axes.annotate("", xy=(4.5, 0.1), xytext=(4.5, 0.62), arrowprops={"arrowstyle": "-|>"})
    axes.text(4.7, 0.36, "one all-reduce", va="center", fontsize=9, color=INK)
    latents = sum(width for _, width in BLOCKS)
    columns = statistics_columns(torch.bfloat16, RANKS)
    axes.text(latents / 2, RANKS + 0.75, "H = x·(γ∘A)ᵀ, [n, 3r]", ha="center", color=INK)
    axes.text(
        latents + 0.3 + SLOT * RANKS / 2,
        RANKS + 0.75,
        f"S = Σx², [n, {columns // RANKS}T]",
        ha="center",
        color=INK,
    )
    axes.text(
        *(latents + 0.3, -1.0),
        "then S = Σ S_i, and u = H / √(S/d + ε)",
        ha="left",
        fontsize=9,
        color=INK,
    )
    axes.set(xlim=(-2.0, latents + 0.8 + SLOT * RANKS), ylim=(-1.2, RANKS + 1.1))
    axes.axis("off")
    return drawn


def _row(
    axes: Axes, y: float, title: str, own: tuple[int, ...], of: str, index: int | None
) -> None:
    """One rank's message: the latents' blocks, then a slot of three columns for each rank."""
    axes.text(-0.15, y, title, ha="right", va="center", fontsize=9, color=INK)
    place = 0.0
    for name, width in BLOCKS:
        axes.add_patch(
            Rectangle((place, y - 0.32), width, 0.64, facecolor=BTP, alpha=0.3, edgecolor=INK)
        )
        axes.text(place + width / 2, y, f"{of}H_{name}", ha="center", va="center", fontsize=9)
        place += width
    place += 0.3
    for slot in range(RANKS):
        filled = slot in own
        axes.add_patch(
            Rectangle(
                *((place, y - 0.32), SLOT, 0.64),
                facecolor=BTP if filled else "none",
                alpha=0.75 if filled else 1,
                edgecolor=INK if filled else FAINT,
            )
        )
        text = "hi mid lo" if filled else "0 0 0"
        axes.text(place + SLOT / 2, y + 0.09, text, ha="center", va="center", fontsize=6.5)
        if filled:
            axes.text(place + SLOT / 2, y - 0.15, f"S_{slot}", ha="center", va="center", fontsize=8)
        place += SLOT
