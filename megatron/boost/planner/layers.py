"""The time of the layers of one pipeline stage for one micro-batch: products, attention, what lies
between them, and the collectives that nothing hides."""

from __future__ import annotations

from collections.abc import Hashable

from boost_layers.communication import Phase as LedgerPhase
from megatron.boost.accounting.collectives import Message, border_collectives
from megatron.boost.accounting.flops import checkpointed_layers
from megatron.boost.accounting.parameters import layer_parameters
from megatron.boost.accounting.products import Product, layer_products, recomputed_products
from megatron.boost.accounting.sizes import Layout, Model
from megatron.boost.planner.attention import attention_seconds
from megatron.boost.planner.cluster import Cluster
from megatron.boost.planner.collectives import collective_seconds
from megatron.boost.planner.gemm import product_seconds, products_seconds
from megatron.boost.planner.implementation import HIDING_ROLE, Implementation
from megatron.boost.planner.optimiser import accumulation_bytes_per_parameter
from megatron.boost.planner.phase import Phase


def stage_layer_phases(
    model: Model,
    layout: Layout,
    pp_rank: int,
    cluster: Cluster,
    dtype: str,
    implementation: Implementation,
) -> tuple[Phase, Phase]:
    """Forward and backward of all layers of a stage and of the borders around them; what is
    computed again belongs to the backward."""
    forward, backward = Phase(), Phase()
    checkpointed = checkpointed_layers(model, layout, pp_rank)
    alike: dict[Hashable, list[int]] = {}
    for layer in layout.layers(model, pp_rank):
        kind = (model.settings(layer), model.place(layer).crosses, layer in checkpointed)
        alike.setdefault(kind, []).append(layer)
    for layers in alike.values():
        again = layers[0] in checkpointed
        phases = layer_phases(
            model, layout, layers[0], cluster, dtype, implementation, checkpointed=again
        )
        forward += phases[0] * len(layers)
        backward += phases[1] * len(layers)
    for (phase, operation), traffic in border_collectives(model, layout, pp_rank).items():
        each = traffic.bytes / traffic.calls
        taken = collective_seconds(operation, each, layout.tensor_parallel, cluster)
        border = Phase(collectives=taken * traffic.calls, operations=traffic.calls)
        if phase == "forward":
            forward += border
        else:
            backward += border
    return forward, backward


def layer_phases(
    model: Model,
    layout: Layout,
    layer: int,
    cluster: Cluster,
    dtype: str,
    implementation: Implementation,
    *,
    checkpointed: bool,
) -> tuple[Phase, Phase]:
    """Forward and backward (with what it computes again) of one layer."""
    number = layout.dtype.itemsize
    products = layer_products(model, layout, layer)
    sweeps = implementation.sweeps(model, layout, layer)
    attention = attention_seconds(model, layout, layer, cluster, dtype)
    messages = implementation.messages(model, layout, layer)
    per_byte = 1 / cluster.elementwise_bytes_per_s

    def exchange(phase: LedgerPhase) -> Phase:
        taken = [
            _exposed_seconds(model, layout, layer, m, products, cluster, dtype, implementation)
            for m in messages
            if m.phase == phase
        ]
        return Phase(collectives=sum(taken), operations=len(taken))

    forward = exchange("forward") + Phase(
        gemm=products_seconds(products, cluster, dtype, number),
        attention=attention.forward,
        elementwise=sum(sweep.forward_bytes for sweep in sweeps) * per_byte,
        operations=len(products) + 1 + sum(sweep.forward_kernels for sweep in sweeps),
    )
    gradients = [gradient for p in products for gradient in (p.input_gradient, p.weight_gradient)]
    weights = layer_parameters(model, layer) / layout.tensor_parallel
    accumulated = 0.0
    if implementation.gradient_buffers:
        accumulated = weights * accumulation_bytes_per_parameter(
            layout, fused=implementation.fused_accumulation
        )
    backward = exchange("backward") + Phase(
        gemm=products_seconds(gradients, cluster, dtype, number),
        attention=attention.backward,
        elementwise=sum(sweep.backward_bytes for sweep in sweeps) * per_byte,
        accumulation=accumulated * per_byte,
        operations=len(gradients) + 1 + sum(sweep.backward_kernels for sweep in sweeps),
    )
    if checkpointed:
        return forward, backward + forward
    settings = model.settings(layer)
    if settings.recompute or layout.recompute == "core_attention":
        backward += Phase(attention=attention.forward, operations=1)
    if settings.recompute:
        again = recomputed_products(model, layout, layer)
        repeated = [sweep for sweep in sweeps if sweep.again]
        backward += exchange("recompute") + Phase(
            gemm=products_seconds(again, cluster, dtype, number),
            elementwise=sum(sweep.forward_bytes for sweep in repeated) * per_byte,
            operations=len(again) + sum(sweep.forward_kernels for sweep in repeated),
        )
        if implementation.latent_recompute_communicates:
            backward += exchange("forward")
    return forward, backward


def _exposed_seconds(
    model: Model,
    layout: Layout,
    layer: int,
    message: Message,
    products: tuple[Product, ...],
    cluster: Cluster,
    dtype: str,
    implementation: Implementation,
) -> float:
    """The time of a collective, less what the weight gradient beside it hides."""
    taken = collective_seconds(message.operation, message.bytes, layout.tensor_parallel, cluster)
    strategy = model.strategy(layer)
    hidden = strategy in implementation.hidden_strategies
    if message.phase != "backward" or message.operation != "all_reduce" or not hidden:
        return taken
    beside = sum(
        product_seconds(product.weight_gradient, cluster, dtype, layout.dtype.itemsize)
        for product in products
        if product.role == HIDING_ROLE[strategy] and set(product.members) <= set(message.members)
    )
    return max(0.0, taken - cluster.collective_overlap * beside)
