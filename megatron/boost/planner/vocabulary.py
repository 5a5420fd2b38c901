"""The time of embedding, head and loss, which are Megatron's own and full-rank.

The logits are one product each way and two backward. The loss works on fp32 logits `[n, V/T]` in
several passes (Megatron's `VocabParallelCrossEntropy`): forward the cast, the maximum, the
difference, exp and its sum and the division, 38 bytes a logit; backward the softmax less the
label's one, the product with the loss's gradient and the cast back, 22 bytes. The embedding is a
look-up: `[n, d]` written, and backward added to its gradient.
"""

from __future__ import annotations

from megatron.boost.accounting.collectives import vocabulary_messages
from megatron.boost.accounting.products import head_product
from megatron.boost.accounting.sizes import Layout, Model
from megatron.boost.planner.cluster import Cluster
from megatron.boost.planner.collectives import collective_seconds
from megatron.boost.planner.gemm import product_seconds
from megatron.boost.planner.phase import Phase

_LOSS_BYTES = {"forward": 38, "backward": 22}


def vocabulary_phases(
    model: Model, layout: Layout, pp_rank: int, cluster: Cluster, dtype: str
) -> tuple[Phase, Phase]:
    """Forward and backward of one micro-batch on one rank of a pipeline stage."""
    n, number, tp = layout.tokens, layout.dtype.itemsize, layout.tensor_parallel
    seconds_per_byte = 1 / cluster.elementwise_bytes_per_s
    phases = {"forward": Phase(), "backward": Phase()}
    if layout.has_embedding(pp_rank):
        row = n * model.hidden_size * number
        phases["forward"] += Phase(elementwise=row * 2 * seconds_per_byte, operations=2)
        phases["backward"] += Phase(elementwise=row * 3 * seconds_per_byte, operations=1)
    if layout.has_head(pp_rank):
        product = head_product(model, layout)
        gradients = (product.input_gradient, product.weight_gradient)
        logits = n * model.padded_vocab_size // tp
        for name, products in (("forward", (product,)), ("backward", gradients)):
            phases[name] += Phase(
                gemm=sum(product_seconds(p, cluster, dtype, number) for p in products),
                elementwise=logits * _LOSS_BYTES[name] * seconds_per_byte,
                operations=len(products) + 8,
            )
    for message in vocabulary_messages(model, layout, pp_rank):
        taken = collective_seconds(message.operation, message.bytes, tp, cluster)
        phases[message.phase] += Phase(collectives=taken, operations=1)
    return phases["forward"], phases["backward"]
