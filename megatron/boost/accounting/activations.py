"""Bytes of activations that a rank keeps between a micro-batch's forward and its backward.

Each figure is a set of named parts, one for each piece of memory that the graph holds; parameters
and what is freed within the forward are not among them. The core attention is PyTorch's SDPA, or
another that keeps q, k, v, its output and the log-sum-exp; or Megatron's local one.
"""

from __future__ import annotations

from boost_layers.ops import message_dtype, statistics_columns
from megatron.boost.accounting.collectives import stage_message_bytes
from megatron.boost.accounting.flops import checkpointed_layers
from megatron.boost.accounting.sizes import Layout, Model

Parts = dict[str, int]
"""Bytes by what they hold."""

_INDEX_BYTES = 8


def _statistics_bytes(layout: Layout) -> int:
    """Of ρ, log-sum-exp and softmax, which are at least fp32."""
    return max(4, layout.dtype.itemsize)


def layer_activation_bytes(model: Model, layout: Layout, layer: int) -> Parts:
    """What one layer keeps of one micro-batch on one rank, without full recompute.

    Checkpointing at the latents keeps the latents, the residual inputs and ρ only; with
    `recompute_residual` one residual input, with `recompute_shard` 1/T of the latents.
    """
    settings = model.settings(layer)
    parts = _residual_and_norms(model, layout, layer)
    if settings.low_rank:
        parts |= _latents(model, layout, layer)
    if settings.recompute:
        return parts
    return {**parts, **_attention(model, layout, layer), **_mlp(model, layout, layer)}


def _latents(model: Model, layout: Layout, layer: int) -> Parts:
    """The latents before φ, which is computed again.

    With LaX, w = u + G(z₋₁) for every projection, and under BTP u too for those behind a norm,
    whose backward needs it; γ and β of grouped latent norms side by side; under vanilla both this
    rank's shares of z and the whole w. Where the layer before is on another stage, or latents go
    through full recompute, its z as it arrived.
    """
    settings, tp = model.settings(layer), layout.tensor_parallel
    btp = model.strategy(layer) == "btp"
    crossed = model.place(layer).crosses
    n, number = layout.tokens, layout.dtype.itemsize
    all_bytes = n * model.latent_width(layer) * number
    kept_share = tp if settings.recompute_shard else 1
    parts = {"latents": all_bytes // (kept_share if btp else tp)}
    if crossed:
        norms = {"none": 0, "rmsnorm": 1, "layernorm": 2}[settings.lax_norm]
        parts["latent norms, grouped"] = norms * model.latent_width(layer) * number
        if layout.recompute == "full" or layout.opens_stage(model, layer):
            parts["latents of the layer before"] = all_bytes
    if btp:
        behind_norm = sum(p.latent_width for group in model.groups(layer)[::2] for p in group)
        if crossed:
            parts["latents before the crossing"] = n * behind_norm * number // kept_share
        # Online statistics arrive in one message with latents that stay part of it.
        # LaX's first layer keeps latents divided by ρ instead.
        in_message = kept_share == 1 and message_dtype(layout.dtype) == layout.dtype
        in_message = in_message and (crossed or not settings.crossing)
        if settings.norm == "online" and tp > 1 and in_message:
            columns = statistics_columns(layout.dtype, tp)
            parts["statistics' columns"] = 2 * n * columns * number
    elif settings.crossing and _whole_latents_kept(model, layout, layer):
        parts["whole latents"] = all_bytes
    return parts


def _whole_latents_kept(model: Model, layout: Layout, layer: int) -> bool:
    """Whether vanilla LaX keeps w of a layer: for φ and its norm, or for the next layer's gate."""
    settings = model.settings(layer)
    normed = model.place(layer).crosses and settings.lax_norm != "none"
    directly = (
        model.place(layer).hands_on
        and layout.recompute != "full"
        and not layout.opens_stage(model, layer + 1)
    )
    return normed or directly or settings.activation != "identity"


def _residual_and_norms(model: Model, layout: Layout, layer: int) -> Parts:
    """The input and ρ of both norms, and where the norm is not folded into A its output."""
    strategy, settings = model.strategy(layer), model.settings(layer)
    n, number = layout.tokens, layout.dtype.itemsize
    # BTP splits the stream along hidden and knows every token's ρ; sequence parallelism splits
    # the tokens.
    split = layout.split_tokens(model)
    stream = n * model.hidden_size * number // split
    tokens_of_rho = n if strategy == "btp" else n // split
    parts = {
        "residual inputs": (1 if settings.recompute_residual else 2) * stream,
        "rho": 2 * tokens_of_rho * _statistics_bytes(layout),
    }
    if strategy != "btp":
        parts["normalised inputs"] = 2 * stream
    return parts


def _attention(model: Model, layout: Layout, layer: int) -> Parts:
    """RoPE's tables, q, k, v, and the attention's output, which the next projection reads where the
    kernel put it; vanilla's sliced heads are gathered for it."""
    settings, strategy = model.settings(layer), model.strategy(layer)
    n, number, tp = layout.tokens, layout.dtype.itemsize, layout.tensor_parallel
    replicated = strategy == "vanilla" and settings.vanilla_attention == "replicated"
    heads_share = 1 if replicated else tp
    q, kv = model.query_width // heads_share, model.key_width // heads_share
    parts = {"q, k, v": n * (q + 2 * kv) * number, "attention output": n * q * number}
    if strategy == "vanilla" and heads_share > 1:
        parts["attention output, gathered"] = n * model.query_width * number
    if model.rotated_channels:
        parts["cosine and sine"] = 2 * layout.sequence_length * model.rotated_channels * number
    if layout.recompute == "core_attention":
        if strategy == "vanilla" and heads_share > 1:
            del parts["attention output"]
        return parts
    heads = model.num_attention_heads // heads_share
    if settings.core_attention == "local":
        # It copies k and v for every query head where those are more, and keeps all of
        # softmax(Q·Kᵀ), in fp32 and in the dtype that P·V is computed in, and the mask.
        scores = n * layout.sequence_length * heads
        together = strategy == "btp" and settings.grouping
        parts["q, k, v"] = n * (q + 2 * kv) * number if together or q == kv else n * q * number
        parts["k and v, for every head"] = 2 * n * q * number if q != kv else 0
        parts["softmax"] = scores * _statistics_bytes(layout)
        parts["softmax, for v"] = scores * number if number < 4 else 0
        parts["mask"] = layout.sequence_length**2
        if strategy == "vanilla" and heads_share > 1:
            del parts["attention output"]
        return parts
    parts["log-sum-exp"] = n * heads * _statistics_bytes(layout)
    return parts


def _mlp(model: Model, layout: Layout, layer: int) -> Parts:
    """gate, up and their product; vanilla has all of f on every rank."""
    share = 1 if model.strategy(layer) == "vanilla" else layout.tensor_parallel
    width = model.ffn_hidden_size // share
    return {"gate, up, product": 3 * layout.tokens * width * layout.dtype.itemsize}


def checkpoint_bytes(model: Model, layout: Layout, layer: int) -> int:
    """What full recompute keeps in place of the inside of a unit of layers that begins with
    `layer`: its input `[n, d]`, split over T with sequence parallelism and between BTP layers, with
    LaX's latents beside it: all of them, or at a stage's beginning this rank's share."""
    n, number, split = layout.tokens, layout.dtype.itemsize, layout.split_tokens(model)
    stream = n * model.hidden_size // split * number
    if not model.low_rank.crossing or layer == 0:
        return stream
    if layout.opens_stage(model, layer):
        return stage_message_bytes(model, layout)
    return stream + (n * model.latent_width(layer) * number if model.place(layer).crosses else 0)


def chunk_activation_bytes(model: Model, layout: Layout, layers: tuple[int, ...]) -> int:
    """What the layers of one virtual stage keep of one micro-batch on one rank."""
    kept, checkpoints = layers, 0
    if layout.recompute == "full" and layers:
        unit = layout.recompute_layers
        if layout.recompute_method == "uniform":
            kept, begins = (), layers[::unit]
        else:
            kept, begins = layers[unit:], layers[:unit]
        # The angles of RoPE, in fp32, are an input of every unit and there once.
        checkpoints = layout.sequence_length * model.rotated_channels * 4
        checkpoints += sum(checkpoint_bytes(model, layout, layer) for layer in begins)
    return checkpoints + sum(
        sum(layer_activation_bytes(model, layout, layer).values()) for layer in kept
    )


def embedding_activation_bytes(model: Model, layout: Layout) -> Parts:
    """What the look-up of one micro-batch keeps: the tokens' indices, and where the vocabulary is
    split the mask of those that other ranks hold."""
    parts = {"token indices": layout.tokens * _INDEX_BYTES}
    if layout.tensor_parallel > 1:
        parts["mask of foreign tokens"] = layout.tokens
    return parts


def head_activation_bytes(model: Model, layout: Layout) -> Parts:
    """What final norm, head and cross-entropy of one micro-batch keep."""
    n, d, number = layout.tokens, model.hidden_size, layout.dtype.itemsize
    split = layout.split_tokens(model)
    rows = model.padded_vocab_size // layout.tensor_parallel
    return {
        "input of the final norm": n * d // split * number,
        "rho": n // split * _statistics_bytes(layout),
        "input of the head": n * d // split * number,
        "softmax": n * rows * _statistics_bytes(layout),
        "labels": n * _INDEX_BYTES,
        "mask of foreign labels": n,
    }


def micro_batches_in_flight(layout: Layout, pp_rank: int) -> tuple[int, ...]:
    """By virtual stage of a pipeline rank, the micro-batches whose activations are held when the
    most are: at the end of the warm-up of the 1F1B schedule, interleaved or not."""
    stages, chunks = layout.pipeline_parallel, layout.virtual_stages
    if chunks == 1:
        return (min(layout.micro_batches, stages - pp_rank),)
    order = [
        chunk
        for first in range(0, layout.micro_batches, stages)
        for chunk in range(chunks)
        for _ in range(min(stages, layout.micro_batches - first))
    ]
    passes = 2 * (stages - pp_rank - 1) + (chunks - 1) * stages + 1
    return tuple(order[:passes].count(chunk) for chunk in range(chunks))


def kept_activation_bytes(model: Model, layout: Layout, pp_rank: int) -> int:
    """What one rank of a pipeline stage keeps for backward when it keeps most: the layers' and the
    embedding's share of every micro-batch in flight, and the head's of one, whose backward follows
    at once."""
    held = micro_batches_in_flight(layout, pp_rank)
    chunks = layout.chunks(model, pp_rank)
    total = sum(
        number * chunk_activation_bytes(model, layout, chunk)
        for number, chunk in zip(held, chunks, strict=True)
    )
    if layout.has_embedding(pp_rank):
        total += held[0] * sum(embedding_activation_bytes(model, layout).values())
    if layout.has_head(pp_rank):
        total += sum(head_activation_bytes(model, layout).values())
    return total


def recomputed_activation_bytes(model: Model, layout: Layout, pp_rank: int) -> int:
    """What full recompute holds on top while the largest of its units is being computed again."""
    again = sorted(checkpointed_layers(model, layout, pp_rank))
    unit = layout.recompute_layers if layout.recompute_method == "uniform" else 1
    inside = [sum(layer_activation_bytes(model, layout, layer).values()) for layer in again]
    return max(
        (sum(inside[start : start + unit]) for start in range(0, len(inside), unit)), default=0
    )


def rank_activation_bytes(model: Model, layout: Layout, pp_rank: int) -> int:
    """The most activations that one rank of a pipeline stage holds at a time."""
    kept = kept_activation_bytes(model, layout, pp_rank)
    return kept + recomputed_activation_bytes(model, layout, pp_rank)
