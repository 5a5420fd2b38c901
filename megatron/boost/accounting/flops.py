"""Floating-point operations: what the model takes, and what a rank computes with recompute.

Counted are the matrix products: projections, LaX's gates, core attention and the head; a product of
`[m, k]` and `[k, n]` is 2·m·k·n, and a backward is twice its forward. Elementwise work, norms and
the folding of γ into A are left out.

Core attention is counted as Megatron's `num_floating_point_operations` does: a causal mask needs
half of Q·Kᵀ and of P·V, so a forward is 2·s²·q for a sequence of length s, although kernels without
a causal path compute (and `torch.utils.flop_counter` counts) 4·s²·q. What a fused attention
computes again in its backward (one of five products) is part of that kernel and not counted.
"""

from __future__ import annotations

from dataclasses import dataclass

from boost_layers.initialization import balanced_factors
from megatron.boost.accounting.sizes import Layout, Model

_BACKWARD = 2
"""A backward, in forwards: one product for the input's gradient, one for the weight's."""


@dataclass(frozen=True)
class Work:
    """Tokens to compute, and how much they attend to each other."""

    tokens: float
    seqlen_squared_sum: float
    """Σ s² over the sequences."""

    @classmethod
    def of_sequences(cls, number: float, length: int) -> Work:
        """`number` sequences of `length` tokens, each with its own causal mask."""
        return cls(number * length, number * length**2)


def gate_flops_per_token(rank: int, gate: str) -> int:
    """One projection's LaX gate, forward: identity 0, linear 2r², tensor 2r(p + q)."""
    if gate == "linear":
        return 2 * rank * rank
    return 2 * rank * sum(balanced_factors(rank)) if gate == "tensor" else 0


def layer_gate_flops_per_token(model: Model, layer: int) -> int:
    """The LaX gates of a layer's seven projections, forward; replicated over tensor parallelism."""
    if not model.place(layer).crosses:
        return 0
    gate = model.settings(layer).lax_gate
    return sum(gate_flops_per_token(p.rank or 0, gate) for p in model.projections(layer))


def layer_gate_again_flops_per_token(model: Model, layer: int) -> int:
    """What the backward of tensor gates computes once more, Z·E₂: 2rq for each projection."""
    if not model.place(layer).crosses or model.settings(layer).lax_gate != "tensor":
        return 0
    ranks = [projection.rank or 0 for projection in model.projections(layer)]
    return sum(2 * rank * balanced_factors(rank)[1] for rank in ranks)


def layer_projection_flops_per_token(model: Model, layer: int) -> int:
    """The seven projections of a layer, forward: two for each weight."""
    return sum(2 * projection.weights for projection in model.projections(layer))


def attention_flops(model: Model, seqlen_squared_sum: float) -> float:
    """Q·Kᵀ and P·V of one layer under causal masks, forward: 2·q·Σs²."""
    return 2 * model.query_width * seqlen_squared_sum


def layer_forward_flops(model: Model, layer: int, work: Work) -> float:
    """One layer, forward."""
    per_token = layer_projection_flops_per_token(model, layer)
    per_token += layer_gate_flops_per_token(model, layer)
    return per_token * work.tokens + attention_flops(model, work.seqlen_squared_sum)


def head_forward_flops(model: Model, tokens: float) -> float:
    """The logits, forward: 2·n·d·V, padded rows included, which are computed too."""
    return 2 * tokens * model.hidden_size * model.padded_vocab_size


def model_flops(model: Model, work: Work) -> float:
    """Forward and backward of the whole model, without what is computed again: three forwards.
    The embedding is a look-up and takes none. The measure of model FLOP/s utilisation."""
    layers = sum(layer_forward_flops(model, layer, work) for layer in range(model.num_layers))
    return (1 + _BACKWARD) * (layers + head_forward_flops(model, work.tokens))


def dense_equivalent_flops(model: Model, work: Work) -> float:
    """`model_flops` of the full-rank model of the same sizes."""
    return model_flops(model.dense_equivalent(), work)


def rank_layer_forward_flops(model: Model, layout: Layout, layer: int, work: Work) -> float:
    """What one rank computes in one layer's forward: 1/T of the projections, 1/T of the attention
    unless vanilla tensor parallelism replicates it, and all of the gates."""
    tp = layout.tensor_parallel
    per_token = layer_projection_flops_per_token(model, layer) / tp
    per_token += layer_gate_flops_per_token(model, layer)
    return per_token * work.tokens + rank_attention_flops(model, layout, layer, work)


def rank_layer_recompute_flops(
    model: Model, layout: Layout, layer: int, work: Work, *, checkpointed: bool
) -> float:
    """What one rank computes again in the backward of one layer.

    Full recompute: the layer's forward, if it is `checkpointed`. Recompute of the core attention:
    that. Checkpointing at the latents: the up-projections of q, k, v, gate and up and the
    attention, but no down-projection and neither closing up-projection; with the second residual
    input rebuilt, o's up-projection too. Tensor gates compute one of their two products again
    whatever is checkpointed.
    """
    gates = layer_gate_again_flops_per_token(model, layer) * work.tokens
    if layout.recompute == "full" and checkpointed:
        return gates + rank_layer_forward_flops(model, layout, layer, work)
    settings = model.settings(layer)
    if settings.recompute:
        (q, k, v), (o,), (gate, up), _ = model.groups(layer)
        again = [q, k, v, gate, up, *([o] if settings.recompute_residual else [])]
        ups = sum(2 * p.out_features * (p.rank or 0) for p in again) / layout.tensor_parallel
        attention = rank_attention_flops(model, layout, layer, work)
        return gates + ups * work.tokens + attention
    if layout.recompute == "core_attention":
        return gates + rank_attention_flops(model, layout, layer, work)
    return gates


def rank_attention_flops(model: Model, layout: Layout, layer: int, work: Work) -> float:
    """Q·Kᵀ and P·V of one layer on one rank, forward: all heads where vanilla tensor parallelism
    replicates them, else 1/T."""
    replicated = (
        model.strategy(layer) == "vanilla"
        and model.settings(layer).vanilla_attention == "replicated"
    )
    share = 1 if replicated else layout.tensor_parallel
    return attention_flops(model, work.seqlen_squared_sum) / share


def checkpointed_layers(model: Model, layout: Layout, pp_rank: int) -> set[int]:
    """The layers of a pipeline rank that full recompute computes again."""
    if layout.recompute != "full":
        return set()
    chunks = layout.chunks(model, pp_rank)
    if layout.recompute_method == "block":
        chunks = tuple(chunk[: layout.recompute_layers] for chunk in chunks)
    return {layer for chunk in chunks for layer in chunk}


def rank_hardware_flops(
    model: Model, layout: Layout, pp_rank: int, work: Work | None = None
) -> float:
    """What one rank of a pipeline stage computes for one micro-batch: forward, backward, and the
    forwards that are computed again; the head on the last stage. `work` is by default the layout's
    sequences; with twice their Σs² the attention is that of a kernel without a causal path."""
    work = work or Work.of_sequences(layout.micro_batch_size, layout.sequence_length)
    checkpointed = checkpointed_layers(model, layout, pp_rank)
    total = 0.0
    for layer in layout.layers(model, pp_rank):
        total += (1 + _BACKWARD) * rank_layer_forward_flops(model, layout, layer, work)
        total += rank_layer_recompute_flops(
            model, layout, layer, work, checkpointed=layer in checkpointed
        )
    if layout.has_head(pp_rank):
        head = head_forward_flops(model, work.tokens) / layout.tensor_parallel
        total += (1 + _BACKWARD) * head
    return total


def hardware_flops(model: Model, layout: Layout) -> float:
    """What all ranks of one model replica compute for one micro-batch."""
    stages = range(layout.pipeline_parallel)
    return layout.tensor_parallel * sum(
        rank_hardware_flops(model, layout, pp_rank) for pp_rank in stages
    )
