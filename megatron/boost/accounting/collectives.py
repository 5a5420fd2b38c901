"""Collectives of the layers and at their borders, of one micro-batch, as the ledger counts them.

Bytes are those of the tensor handed over on one rank: the whole tensor for an all-reduce, a
reduce-scatter and an all-to-all, the local shard for an all-gather. Nothing is communicated in a
group of one. Embedding, head and loss are Megatron's and not counted.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from boost_layers.carry import width_between_stages
from boost_layers.communication import Operation, Phase
from boost_layers.ops import message_dtype, statistics_columns
from megatron.boost.accounting.flops import checkpointed_layers
from megatron.boost.accounting.sizes import Layout, Model, Projection

_FP32_BYTES = 4


@dataclass(frozen=True)
class Traffic:
    """Collectives of one kind."""

    calls: int = 0
    bytes: int = 0

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic(self.calls + other.calls, self.bytes + other.bytes)


Collectives = dict[tuple[Phase, Operation], Traffic]


@dataclass(frozen=True)
class Message:
    """One collective of a layer."""

    phase: Phase
    operation: Operation
    bytes: float
    members: tuple[str, ...] = ()
    """The projections whose latent, output or input gradient it carries."""


def _add(collectives: Collectives, phase: Phase, operation: Operation, size: float) -> None:
    """Count one collective of `size` bytes."""
    key = phase, operation
    collectives[key] = collectives.get(key, Traffic()) + Traffic(1, round(size))


def layer_collectives(
    model: Model, layout: Layout, layer: int, *, checkpointed: bool = False
) -> Collectives:
    """The collectives of one layer and micro-batch; `checkpointed` by full recompute, the forward's
    happen once more in backward ("recompute")."""
    collectives: Collectives = {}
    for message in layer_messages(model, layout, layer):
        _add(collectives, message.phase, message.operation, message.bytes)
    if checkpointed:
        for (phase, operation), traffic in list(collectives.items()):
            if phase == "forward":
                collectives["recompute", operation] = traffic
    return collectives


def layer_messages(model: Model, layout: Layout, layer: int) -> tuple[Message, ...]:
    """The collectives of one layer and micro-batch one by one, without full recompute's."""
    if layout.tensor_parallel == 1:
        return ()
    count = {"dense": _dense, "vanilla": _vanilla, "btp": _btp}[model.strategy(layer)]
    return tuple(count(model, layout, layer))


def _names(projections: Sequence[Projection]) -> tuple[str, ...]:
    return tuple(projection.short_name for projection in projections)


def _btp(model: Model, layout: Layout, layer: int) -> Iterator[Message]:
    """An all-reduce of every (grouped) latent, forward with the statistics of the norm before it,
    and of the gradient of z, which is made of it; an all-gather of every latent that is kept by
    shares."""
    settings = model.settings(layer)
    n, number, tp = layout.tokens, layout.dtype.itemsize, layout.tensor_parallel
    # Before the norm is applied a latent may be too large for fp16.
    online_dtype = message_dtype(layout.dtype)
    columns = statistics_columns(online_dtype, tp)
    for group in model.groups(layer):
        after_norm = len(group) > 1
        online = after_norm and settings.norm == "online"
        if after_norm and not online:
            yield Message("forward", "all_reduce", n * _FP32_BYTES)
        messages = [group] if settings.grouping else [(projection,) for projection in group]
        for position, message in enumerate(messages):
            width = sum(projection.latent_width for projection in message)
            more = columns if online and position == 0 else 0
            size = online_dtype.itemsize if online else number
            names = _names(message)
            yield Message("forward", "all_reduce", n * (width + more) * size, names)
            z_width = sum(projection.rank or 0 for projection in message)
            yield Message("backward", "all_reduce", n * z_width * number, names)
            if settings.recompute_shard:
                share = n * width * number / tp
                yield Message("recompute", "all_gather", share, names)
                if model.place(layer).crosses and after_norm:
                    # u, for the norm's backward, beside w.
                    yield Message("recompute", "all_gather", share, names)


def _vanilla(model: Model, layout: Layout, layer: int) -> Iterator[Message]:
    """An all-reduce of every projection's output forward; backward one of every (grouped) input's
    gradient. Sliced heads: o's input is gathered and its gradient scattered, and the gradients of
    q, k and v are gathered. LaX: the shares of every (grouped) latent are gathered, and those of
    its gradient."""
    settings = model.settings(layer)
    per_column = layout.tokens * layout.dtype.itemsize
    sliced = settings.vanilla_attention == "sliced"
    for position, group in enumerate(model.groups(layer)):
        runs = [group] if settings.grouping else [(projection,) for projection in group]
        for run in runs:
            names, size_in = _names(run), per_column * run[0].in_features
            if settings.crossing:
                width = sum(projection.latent_width for projection in run)
                share = per_column * width / layout.tensor_parallel
                yield Message("forward", "all_gather", share, names)
                yield Message("backward", "all_gather", share, names)
            for projection in run:
                size = per_column * projection.out_features
                yield Message("forward", "all_reduce", size, _names([projection]))
            if sliced and position == 0:
                heads = sum(projection.out_features for projection in run)
                share = per_column * heads / layout.tensor_parallel
                yield Message("backward", "all_gather", share, names)
            gathered = sliced and position == 1
            if not gathered:
                yield Message("backward", "all_reduce", size_in, names)
                continue
            yield Message("forward", "all_gather", size_in / layout.tensor_parallel, names)
            yield Message("backward", "reduce_scatter", size_in, names)


def _dense(model: Model, layout: Layout, layer: int) -> Iterator[Message]:
    """For attention and MLP: an all-reduce of the output forward and of the input's gradient
    backward. With sequence parallelism an all-gather of the input and a reduce-scatter of the
    output, and backward the gathered gradient of the output, the input gathered again, and the
    scattered gradient of the input."""
    whole = layout.tokens * model.hidden_size * layout.dtype.itemsize
    shard = whole / layout.tensor_parallel
    attention_in, attention_out, mlp_in, mlp_out = map(_names, model.groups(layer))
    for opening, closing in ((attention_in, attention_out), (mlp_in, mlp_out)):
        if not layout.sequence_parallel and layout.split_tokens(model) == 1:
            yield Message("forward", "all_reduce", whole, closing)
            yield Message("backward", "all_reduce", whole, opening)
            continue
        yield Message("forward", "all_gather", shard, opening)
        yield Message("forward", "reduce_scatter", whole, closing)
        yield Message("backward", "all_gather", shard, closing)
        yield Message("backward", "all_gather", shard, opening)
        yield Message("backward", "reduce_scatter", whole, opening)


def border_collectives(
    model: Model, layout: Layout, pp_rank: int, *, fused_embedding: bool = True
) -> Collectives:
    """What is communicated around the layers of a pipeline stage.

    Where the residual stream turns from sequence- to hidden-sharded or back, beside full-rank
    layers and before the final norm, an all-to-all of `[n, d/T]` and its conjugate; after the
    embedding, if that border is fused, a reduce-scatter of `[n, d]`, and an all-gather of
    `[n, d/T]` backward. LaX between stages: an all-gather of the latents' shares on arrival, and
    of their gradients' on the sending side.
    """
    collectives: Collectives = {}
    tp = layout.tensor_parallel
    if tp == 1:
        return collectives
    shard = layout.tokens * model.hidden_size * layout.dtype.itemsize / tp
    again = checkpointed_layers(model, layout, pp_rank)

    def exchange(layer: int | None) -> None:
        _add(collectives, "forward", "all_to_all", shard)
        _add(collectives, "backward", "all_to_all", shard)
        if layer in again:
            _add(collectives, "recompute", "all_to_all", shard)

    for layer in layout.layers(model, pp_rank):
        if model.place(layer).enters_by_sequence:
            if layer == 0 and fused_embedding and layout.has_embedding(pp_rank):
                _add(collectives, "forward", "reduce_scatter", shard * tp)
                _add(collectives, "backward", "all_gather", shard)
            else:
                exchange(layer)
        if model.place(layer).leaves_by_sequence:
            exchange(layer)
        latents = layout.tokens * model.latent_width(layer) * layout.dtype.itemsize / tp
        if model.place(layer).crosses and layout.opens_stage(model, layer):
            _add(collectives, "forward", "all_gather", latents)
            if layer in again:
                _add(collectives, "recompute", "all_gather", latents)
        if model.place(layer).hands_on and layout.opens_stage(model, layer + 1):
            _add(collectives, "backward", "all_gather", latents)
    if layout.has_head(pp_rank) and model.settings(model.num_layers - 1).hidden_sharded:
        exchange(None)
    return collectives


def stage_message_bytes(model: Model, layout: Layout) -> int:
    """The tensor that one rank sends to the next pipeline stage, and gets back as a gradient:
    `[n, d]` (split over T with sequence parallelism and between BTP layers), with LaX's latents
    beside it."""
    rows = layout.tokens // layout.split_tokens(model)
    latents = width_between_stages(model.low_rank, model.hidden_size, layout.tensor_parallel)
    return rows * (model.hidden_size + latents) * layout.dtype.itemsize


def wire_bytes(collectives: Collectives, tensor_parallel: int) -> float:
    """Bytes that one rank sends for these collectives with ring algorithms."""
    return sum(
        operation_wire_bytes(operation, traffic.bytes, tensor_parallel)
        for (_, operation), traffic in collectives.items()
    )


def operation_wire_bytes(operation: Operation, size: float, ranks: int) -> float:
    """Bytes that one of `ranks` ranks sends for a collective of `size` bytes with a ring: an
    all-reduce 2·(T−1)/T of its tensor, a reduce-scatter and an all-to-all (T−1)/T, and an
    all-gather T−1 times its shard."""
    share = (ranks - 1) / ranks
    factors: dict[Operation, float] = {
        "all_reduce": 2 * share,
        "reduce_scatter": share,
        "all_to_all": share,
        "all_gather": ranks - 1,
    }
    return factors[operation] * size


def vocabulary_messages(model: Model, layout: Layout, pp_rank: int) -> tuple[Message, ...]:
    """What Megatron communicates for embedding, head and loss of one micro-batch.

    The embedding: an all-reduce of `[n, d]`, or with sequence parallelism a reduce-scatter and
    backward an all-gather (under BTP `border_collectives` counts it). The head: backward an
    all-reduce of its input's gradient, or an all-gather of its input in both phases and a
    reduce-scatter. The loss: all-reduces of the maximum, of the label's logit and of Σ exp, n fp32
    numbers each.
    """
    tp = layout.tensor_parallel
    if tp == 1:
        return ()
    messages: list[Message] = []
    whole = layout.tokens * model.hidden_size * layout.dtype.itemsize
    by_sequence = layout.split_tokens(model) > 1
    embedding, head = ("word_embeddings",), ("head",)
    if layout.has_embedding(pp_rank) and not model.settings(0).hidden_sharded:
        if by_sequence:
            messages.append(Message("forward", "reduce_scatter", whole, embedding))
            messages.append(Message("backward", "all_gather", whole / tp, embedding))
        else:
            messages.append(Message("forward", "all_reduce", whole, embedding))
    if layout.has_head(pp_rank):
        if by_sequence:
            messages.append(Message("forward", "all_gather", whole / tp, head))
            messages.append(Message("backward", "all_gather", whole / tp, head))
            messages.append(Message("backward", "reduce_scatter", whole, head))
        else:
            messages.append(Message("backward", "all_reduce", whole, head))
        loss = Message("forward", "all_reduce", layout.tokens * _FP32_BYTES, ("loss",))
        messages += [loss] * 3
    return tuple(messages)
