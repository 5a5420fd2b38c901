"""`tools/plan.py --analyse`: one block's products and collectives, and what fits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from megatron.boost.accounting.sizes import Layout
from megatron.boost.planner.analysis import (
    PAPER_VANILLA_OVER_BTP,
    Variant,
    divisible_variants,
    largest_micro_batch,
    layout_of,
    product_figures,
    volume,
)
from megatron.boost.planner.cluster import Cluster
from megatron.boost.planner.layouts import Workload
from megatron.boost.planner.microbenchmarks import ATTENTION, MLP
from megatron.boost.planner.published import PUBLISHED_UTILISATION
from megatron.boost.planner.reports.report import Report

_MIB = 1024**2


def analysis_report(
    workload: Workload, cluster: Cluster, tensor_parallel: int, micro_batch: int
) -> Report:
    """Tables of products, of collectives and of micro-batches that fit, by strategy.

    Raises:
        ValueError: for a model that the tensor-parallel size does not divide.
    """
    report = Report()
    layout = layout_of(workload, tensor_parallel, micro_batch)
    found, refusals = divisible_variants(workload, cluster, tensor_parallel)
    for refusal in refusals:
        report.say(refusal)
    for variant in found:
        figures = product_figures(variant.model, layout, cluster)
        report.table(
            f"{variant.title}: forward products of one layer on one rank, TP {tensor_parallel}, "
            f"micro-batch {micro_batch}",
            ["product", "M", "N", "K", "batch", "GFLOP", "MiB", "FLOP/byte", "ms", "of peak %"],
            [
                [
                    figure.product.name,
                    f"{figure.product.m:,}",
                    f"{figure.product.n:,}",
                    f"{figure.product.k:,}",
                    str(figure.product.number),
                    f"{figure.product.flops / 1e9:,.1f}",
                    f"{figure.bytes / _MIB:,.1f}",
                    f"{figure.intensity:,.0f}",
                    f"{1e3 * figure.seconds:.3f}",
                    f"{100 * figure.utilisation:.0f}",
                ]
                for figure in figures
            ],
        )
        flops = sum(figure.product.flops for figure in figures)
        seconds = sum(figure.seconds for figure in figures)
        key = _key(variant.title)
        report.flat[f"{key}_gemm_gflop"] = flops / 1e9
        report.flat[f"{key}_gemm_ms"] = 1e3 * seconds
    _collectives(report, found, layout, cluster)
    _utilisation(report, found, workload, cluster, tensor_parallel)
    return report


def _collectives(
    report: Report, found: Sequence[Variant], layout: Layout, cluster: Cluster
) -> None:
    rows, forward_bytes = [], {}
    for variant in found:
        forward, backward = (volume(variant.model, layout, p) for p in ("forward", "backward"))
        most = largest_micro_batch(variant.model, layout, cluster)
        recomputed = replace(layout, recompute="full")
        model = variant.model
        again = largest_micro_batch(model, recomputed, cluster)
        if variant.title == "BTP":
            model = replace(model, low_rank=replace(model.low_rank, recompute=True))
            again = largest_micro_batch(model, layout, cluster)
        rows.append(
            [
                variant.title,
                f"{forward.calls} + {backward.calls}",
                f"{forward.bytes / _MIB:,.1f}",
                f"{backward.bytes / _MIB:,.1f}",
                f"{forward.wire_units:.2f} + {backward.wire_units:.2f}",
                str(most),
                str(again),
            ]
        )
        key = _key(variant.title)
        forward_bytes[variant.title] = forward.bytes
        report.flat[f"{key}_forward_mib"] = forward.bytes / _MIB
        report.flat[f"{key}_backward_mib"] = backward.bytes / _MIB
        report.flat[f"{key}_wire_units"] = forward.wire_units + backward.wire_units
        report.flat[f"{key}_largest_micro_batch"] = most
    report.table(
        "Collectives of one layer and micro-batch, and the largest micro-batch of the whole model "
        "that fits without and with recompute (BTP: at the latents)",
        [
            "strategy",
            "calls forward + backward",
            "MiB forward",
            "MiB backward",
            "wire, in [n, d]",
            "micro-batch",
            "recomputed",
        ],
        rows,
    )
    vanilla = forward_bytes.get("vanilla, replicated attention")
    if layout.tensor_parallel > 1 and vanilla is not None:
        quotient = vanilla / forward_bytes["BTP"]
        report.flat["vanilla_over_btp_forward_volume"] = quotient
        report.say(
            f"The tensors that vanilla with replicated attention hands over in a forward have "
            f"{quotient:.1f} times the bytes of BTP's; the paper says about "
            f"{PAPER_VANILLA_OVER_BTP}."
        )


def _utilisation(
    report: Report,
    found: Sequence[Variant],
    workload: Workload,
    cluster: Cluster,
    tensor_parallel: int,
) -> None:
    """The published utilisations of the 7B at TP 4 on an A100 beside what the model says of this
    model on this cluster."""
    rows = []
    titles = {"BTP": "BTP", "vanilla": "vanilla, replicated attention"}
    models = {variant.title: variant.model for variant in found}
    for (strategy, block), published in PUBLISHED_UTILISATION.items():
        if titles[strategy] not in models:
            continue
        here = []
        for micro_batch in published:
            layout = layout_of(workload, tensor_parallel, micro_batch)
            members = ATTENTION if block == "attention" else MLP
            figures = [
                figure
                for figure in product_figures(models[titles[strategy]], layout, cluster)
                if set(figure.product.members) <= members
            ]
            flops = sum(figure.product.flops for figure in figures)
            peak = figures[0].peak_flops_per_second
            here.append(100 * flops / sum(figure.seconds for figure in figures) / peak)
        rows.append(
            [
                f"{strategy}, {block}",
                *(f"{p:.0f} / {h:.0f}" for p, h in zip(published.values(), here, strict=True)),
            ]
        )
    report.table(
        "Utilisation of the peak by the products, %: published for 7B at TP 4 on A100 / this model",
        ["", *(f"micro-batch {number}" for number in (1, 2, 4, 8))],
        rows,
    )


def _key(title: str) -> str:
    return title.replace(",", "").replace(" ", "_").replace("-", "_").lower()
