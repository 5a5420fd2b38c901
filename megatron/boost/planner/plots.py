"""Time against rank, tensor-parallel size and link rate, and memory against micro-batch, by
strategy: one figure, as PNG and as a page that needs no other file."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from html import escape
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from megatron.boost.accounting.sizes import Layout, Model, validate_layout
from megatron.boost.command_line import write_text
from megatron.boost.planner.analysis import (
    Variant,
    divisible_variants,
    layout_of,
    variants,
)
from megatron.boost.planner.break_even import with_ratio
from megatron.boost.planner.cluster import Cluster
from megatron.boost.planner.iteration import estimate
from megatron.boost.planner.layouts import Workload
from megatron.boost.planner.memory import GIB, memory_need
from megatron.boost.plotting.figure import finish_axes, save_png, svg
from megatron.boost.plotting.page import page

# Told apart by all common kinds of colour vision (Okabe and Ito).
_COLORS = ("#d55e00", "#009e73", "#e69f00", "#0072b2", "#56b4e9")
_RATIOS = tuple(step / 20 for step in range(1, 21))
_LINK_FACTORS = tuple(2.0**step for step in range(-5, 3))
_MICRO_BATCHES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)


def planner_figure(
    workload: Workload, cluster: Cluster, tensor_parallel: int, micro_batch: int
) -> Figure:
    """Four panels of one micro-batch of the whole model under tensor parallelism alone, with the
    optimiser's step.

    Raises:
        ValueError: for a model that the tensor-parallel size does not divide.
    """
    layout = layout_of(workload, tensor_parallel, micro_batch)
    found, _ = divisible_variants(workload, cluster, tensor_parallel)
    figure = Figure(figsize=(12, 8), layout="constrained")
    panels = figure.subplots(2, 2)
    _against_ratio(panels[0][0], found, layout, cluster)
    _against_tensor_parallel(panels[0][1], workload, cluster, micro_batch)
    _against_link_rate(panels[1][0], found, layout, cluster)
    _memory(panels[1][1], found, layout, cluster)
    figure.suptitle(
        f"{workload.model.low_rank.arch}, d {workload.model.hidden_size}, "
        f"{workload.model.num_layers} layers, TP {tensor_parallel}, micro-batch {micro_batch}, "
        f"{cluster.name}"
    )
    titles = ("Rank", "Tensor-parallel size", "Link rate", "Memory")
    for axes, title in zip(panels.flat, titles, strict=True):
        axes.set_title(title)
        finish_axes(axes)
        axes.set_ylim(bottom=0)
    panels[0][0].legend(frameon=False)
    panels[1][1].legend(frameon=False)
    return figure


def save_figure(figure: Figure, prefix: Path, title: str) -> tuple[Path, Path]:
    """Write PREFIX.png and PREFIX.html, each under a temporary name first; returns both paths."""
    picture, document = Path(f"{prefix}.png"), Path(f"{prefix}.html")
    save_png(figure, picture)
    write_text(document, page(title, [f"<h1>{escape(title)}</h1>", svg(figure)]))
    return picture, document


def _draw(
    axes: Axes, x: Sequence[float], found: Sequence[Variant], y: Callable[[Model, float], float]
) -> None:
    for color, variant in zip(_COLORS, found, strict=False):
        axes.plot(
            x, [y(variant.model, at) for at in x], color=color, marker=".", label=variant.title
        )


def _against_ratio(axes: Axes, found: Sequence[Variant], layout: Layout, cluster: Cluster) -> None:
    def seconds(model: Model, ratio: float) -> float:
        model = with_ratio(model, ratio) if model.low_rank.low_rank else model
        return estimate(model, layout, cluster).seconds

    _draw(axes, _RATIOS, found, seconds)
    axes.set(xlabel="rank / hidden", ylabel="s / iteration of one micro-batch")


def _against_tensor_parallel(
    axes: Axes, workload: Workload, cluster: Cluster, micro_batch: int
) -> None:
    sizes = [t for t in (1, 2, 4, 8, 16) if t <= cluster.gpus_per_node]
    for position, color in enumerate(_COLORS[: len(variants(workload.model, 1))]):
        points = []
        for size in sizes:
            layout = layout_of(workload, size, micro_batch)
            variant = variants(workload.model, size)[position]
            try:
                validate_layout(variant.model, layout)
            except ValueError:
                continue
            points.append((size, estimate(variant.model, layout, cluster).seconds))
        axes.plot(*zip(*points, strict=True), color=color, marker=".", label=variant.title)
    axes.set(xlabel="tensor-parallel size", ylabel="s / iteration of one micro-batch")
    axes.set_xscale("log", base=2)
    axes.set_xticks(sizes, [str(size) for size in sizes])


def _against_link_rate(
    axes: Axes, found: Sequence[Variant], layout: Layout, cluster: Cluster
) -> None:
    def seconds(model: Model, factor: float) -> float:
        rates = {ranks: rate * factor for ranks, rate in cluster.node.bus_gb_per_s.items()}
        node = replace(cluster.node, bus_gb_per_s=rates)
        return estimate(model, layout, replace(cluster, node=node)).seconds

    _draw(axes, _LINK_FACTORS, found, seconds)
    axes.set(xlabel="link rate within a node, times the cluster's")
    axes.set(ylabel="s / iteration of one micro-batch")
    axes.set_xscale("log", base=2)


def _memory(axes: Axes, found: Sequence[Variant], layout: Layout, cluster: Cluster) -> None:
    def gib(model: Model, micro_batch: float) -> float:
        here = replace(layout, micro_batch_size=int(micro_batch))
        return memory_need(model, here, cluster).total / GIB

    btp = found[-1].model
    kept = Variant(
        "BTP, checkpointing at the latents",
        replace(btp, low_rank=replace(btp.low_rank, recompute=True)),
    )
    _draw(axes, _MICRO_BATCHES, [*found, kept], gib)
    axes.axhline(cluster.memory.capacity_gib, color="black", linewidth=1, linestyle=(0, (3, 2)))
    axes.set(xlabel="micro-batch", ylabel="GiB on one GPU (dashed: what it has)")
