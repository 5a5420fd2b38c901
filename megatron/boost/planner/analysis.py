"""The paper's analysis of one block: its products by shape, its collectives by strategy, and the
largest micro-batch that fits. For any model and tensor-parallel size."""

from __future__ import annotations

from dataclasses import dataclass, replace

from boost_layers.config import LowRankConfig
from megatron.boost.accounting.collectives import layer_messages, operation_wire_bytes
from megatron.boost.accounting.products import Product, layer_products
from megatron.boost.accounting.sizes import Layout, Model, validate_layout
from megatron.boost.planner.cluster import Cluster
from megatron.boost.planner.gemm import product_seconds
from megatron.boost.planner.iteration import DTYPES, dtype_name
from megatron.boost.planner.layouts import Workload
from megatron.boost.planner.memory import memory_need
from megatron.boost.planner.models import padded

_LARGEST_MICRO_BATCH = 1024
PAPER_VANILLA_OVER_BTP = 5.7
"""Volume of a forward's collectives, by the paper (arXiv 2512.12131)."""


@dataclass(frozen=True)
class Variant:
    """A strategy with its model."""

    title: str
    model: Model


@dataclass(frozen=True)
class ProductFigures:
    """One product on one rank."""

    product: Product
    bytes: int
    seconds: float
    peak_flops_per_second: float

    @property
    def intensity(self) -> float:
        """Operations a byte."""
        return self.product.flops / self.bytes

    @property
    def utilisation(self) -> float:
        """Of the peak."""
        return self.product.flops / self.seconds / self.peak_flops_per_second


@dataclass(frozen=True)
class Volume:
    """The collectives of one layer and micro-batch in one phase, on one rank."""

    calls: int
    bytes: float
    """Of the tensors handed over."""
    wire_bytes: float
    """That the rank sends."""
    wire_units: float
    """In tensors `[n, d]`, 2 for an all-reduce and 1 for its halves, without the (T−1)/T that they
    have in common: the unit of the design's table."""


def variants(model: Model, tensor_parallel: int) -> list[Variant]:
    """Full-rank, vanilla in both forms and BTP of one model, whether or not the tensor-parallel
    size divides them."""
    model = padded(model, tensor_parallel)

    def low_rank(**settings: object) -> Model:
        return replace(model, low_rank=replace(model.low_rank, **settings))  # type: ignore[arg-type]

    return [
        Variant("full-rank", replace(model, low_rank=LowRankConfig(arch="dense"))),
        Variant("vanilla, sliced heads", low_rank(tp="vanilla")),
        Variant(
            "vanilla, replicated attention",
            low_rank(tp="vanilla", vanilla_attention="replicated"),
        ),
        Variant("BTP", low_rank(tp="btp")),
    ]


def divisible_variants(
    workload: Workload, cluster: Cluster, tensor_parallel: int
) -> tuple[list[Variant], list[str]]:
    """The variants that the tensor-parallel size divides, and why it does not divide the others.

    Raises:
        ValueError: for a size beyond a node, and where it divides none.
    """
    if tensor_parallel > cluster.gpus_per_node:
        raise ValueError(
            f"--gpus {tensor_parallel}: is the tensor-parallel size here, which stays within a "
            f"node of {cluster.gpus_per_node}; nearest legal value: {cluster.gpus_per_node}"
        )
    found, refusals = [], []
    for variant in variants(workload.model, tensor_parallel):
        try:
            validate_layout(variant.model, layout_of(workload, tensor_parallel, 1))
            found.append(variant)
        except ValueError as refusal:
            refusals.append(f"{variant.title} is left out: {refusal}")
    if not found:
        smaller = [t for t in range(1, tensor_parallel) if workload.model.num_query_groups % t == 0]
        raise ValueError(
            f"--gpus {tensor_parallel}: the tensor-parallel size divides no strategy; nearest "
            f"legal value: {smaller[-1]}"
        )
    return found, refusals


def layout_of(workload: Workload, tensor_parallel: int, micro_batch: int) -> Layout:
    """One micro-batch under tensor parallelism alone."""
    return Layout(
        sequence_length=workload.sequence_length,
        micro_batch_size=micro_batch,
        tensor_parallel=tensor_parallel,
        dtype=DTYPES[workload.dtype],
    )


def product_figures(model: Model, layout: Layout, cluster: Cluster) -> list[ProductFigures]:
    """Every product of the first layer's forward."""
    dtype, number = dtype_name(layout), layout.dtype.itemsize
    peak = cluster.products(dtype).peak_tflops * 1e12
    return [
        ProductFigures(
            product, product.bytes(number), product_seconds(product, cluster, dtype, number), peak
        )
        for product in layer_products(model, layout, 0)
    ]


def volume(model: Model, layout: Layout, phase: str) -> Volume:
    """Of the first layer's collectives in "forward" or "backward"."""
    tp = layout.tensor_parallel
    messages = [m for m in layer_messages(model, layout, 0) if m.phase == phase]
    sent = sum(operation_wire_bytes(m.operation, m.bytes, tp) for m in messages)
    stream = layout.tokens * model.hidden_size * layout.dtype.itemsize
    return Volume(
        calls=len(messages),
        bytes=sum(m.bytes for m in messages),
        wire_bytes=sent,
        wire_units=sent / stream * tp / (tp - 1) if tp > 1 else 0.0,
    )


def largest_micro_batch(model: Model, layout: Layout, cluster: Cluster) -> int:
    """The largest micro-batch whose state and activations fit in a GPU's memory; 0 for none."""

    def fits(micro_batch: int) -> bool:
        return memory_need(model, replace(layout, micro_batch_size=micro_batch), cluster).fits

    fitting = 0
    while fitting < _LARGEST_MICRO_BATCH and fits(fitting + 1):
        fitting += 1
    return fitting
