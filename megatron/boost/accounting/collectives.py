"""Collectives of the layers and at their borders, of one micro-batch, as the ledger counts them.

Bytes are those of the tensor handed over on one rank: the whole tensor for an all-reduce, a
reduce-scatter and an all-to-all, the local shard for an all-gather. Nothing is communicated in a
group of one. Embedding, head and loss are Megatron's and not counted.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from boost_layers.carry import width_between_stages
from boost_layers.communication import Operation, Phase
from boost_layers.ops import message_dtype, statistics_columns
from megatron.boost.accounting.flops import checkpointed_layers
from megatron.boost.accounting.sizes import Layout, Model

_FP32_BYTES = 4


@dataclass(frozen=True)
class Traffic:
    """Collectives of one kind."""

    calls: int = 0
    bytes: int = 0

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic(self.calls + other.calls, self.bytes + other.bytes)


Collectives = dict[tuple[Phase, Operation], Traffic]


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
    if layout.tensor_parallel > 1:
        count = {"dense": _dense, "vanilla": _vanilla, "btp": _btp}[model.strategy(layer)]
        for phase, operation, size in count(model, layout, layer):
            _add(collectives, phase, operation, size)
    if checkpointed:
        for (phase, operation), traffic in list(collectives.items()):
            if phase == "forward":
                collectives["recompute", operation] = traffic
    return collectives


Collective = tuple[Phase, Operation, float]


def _btp(model: Model, layout: Layout, layer: int) -> Iterator[Collective]:
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
            yield "forward", "all_reduce", n * _FP32_BYTES
        messages = [group] if settings.grouping else [(projection,) for projection in group]
        for position, message in enumerate(messages):
            width = sum(projection.latent_width for projection in message)
            more = columns if online and position == 0 else 0
            size = online_dtype.itemsize if online else number
            yield "forward", "all_reduce", n * (width + more) * size
            z_width = sum(projection.rank or 0 for projection in message)
            yield "backward", "all_reduce", n * z_width * number
            if settings.recompute_shard:
                yield "recompute", "all_gather", n * width * number / tp
                if model.place(layer).crosses and after_norm:
                    # u, for the norm's backward, beside w.
                    yield "recompute", "all_gather", n * width * number / tp


def _vanilla(model: Model, layout: Layout, layer: int) -> Iterator[Collective]:
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
            if settings.crossing:
                width = sum(projection.latent_width for projection in run)
                share = width / layout.tensor_parallel
                yield "forward", "all_gather", per_column * share
                yield "backward", "all_gather", per_column * share
            for projection in run:
                yield "forward", "all_reduce", per_column * projection.out_features
            if sliced and position == 0:
                heads = sum(projection.out_features for projection in run)
                yield "backward", "all_gather", per_column * heads / layout.tensor_parallel
            gathered = sliced and position == 1
            if not gathered:
                yield "backward", "all_reduce", per_column * run[0].in_features
                continue
            yield "forward", "all_gather", per_column * run[0].in_features / layout.tensor_parallel
            yield "backward", "reduce_scatter", per_column * run[0].in_features


def _dense(model: Model, layout: Layout, layer: int) -> Iterator[Collective]:
    """For attention and MLP: an all-reduce of the output forward and of the input's gradient
    backward. With sequence parallelism an all-gather of the input and a reduce-scatter of the
    output, and backward the gathered gradient of the output, the input gathered again, and the
    scattered gradient of the input."""
    whole = layout.tokens * model.hidden_size * layout.dtype.itemsize
    shard = whole / layout.tensor_parallel
    for _ in ("attention", "mlp"):
        if not layout.sequence_parallel and layout.split_tokens(model) == 1:
            yield "forward", "all_reduce", whole
            yield "backward", "all_reduce", whole
            continue
        yield "forward", "all_gather", shard
        yield "forward", "reduce_scatter", whole
        yield "backward", "all_gather", shard
        yield "backward", "all_gather", shard
        yield "backward", "reduce_scatter", whole


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
    """Bytes that one rank sends for these collectives with ring algorithms: an all-reduce
    2·(T−1)/T of its tensor, a reduce-scatter and an all-to-all (T−1)/T, and an all-gather T−1
    times its shard."""
    share = (tensor_parallel - 1) / tensor_parallel
    factors: dict[Operation, float] = {
        "all_reduce": 2 * share,
        "reduce_scatter": share,
        "all_to_all": share,
        "all_gather": tensor_parallel - 1,
    }
    return sum(factors[operation] * t.bytes for (_, operation), t in collectives.items())
