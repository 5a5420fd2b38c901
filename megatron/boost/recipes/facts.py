"""What a rank is and does, as far as it can be told without running it, and what the accounting
says of it."""

from __future__ import annotations

from dataclasses import dataclass, fields

from megatron.boost.accounting.activations import (
    chunk_activation_bytes,
    embedding_activation_bytes,
    head_activation_bytes,
)
from megatron.boost.accounting.collectives import (
    border_collectives,
    layer_collectives,
    stage_message_bytes,
)
from megatron.boost.accounting.flops import checkpointed_layers
from megatron.boost.accounting.parameters import rank_parameters, stage_tensors
from megatron.boost.accounting.sizes import Layout, Model

CollectiveCounts = dict[tuple[str, str, str], tuple[int, int]]
"""(scope, phase, operation) → calls, bytes."""


@dataclass(frozen=True)
class RankFacts:
    """One rank: its parameters, and one micro-batch through all its (virtual) stages."""

    shapes: dict[str, tuple[int, ...]]
    """Of its parameters by canonical name."""
    parameter_bytes: int
    kept_bytes: int
    """What the forward keeps for the backward."""
    message_bytes: tuple[int, ...]
    """What each of its stages but the model's last sends on."""
    collectives: CollectiveCounts
    """Of forward and backward."""


def accounted_facts(model: Model, layout: Layout, pp_rank: int) -> RankFacts:
    """What the accounting says of a rank of a pipeline stage."""
    again = checkpointed_layers(model, layout, pp_rank)
    collectives: CollectiveCounts = {}
    parts = [
        ("layer", layer_collectives(model, layout, layer, checkpointed=layer in again))
        for layer in layout.layers(model, pp_rank)
    ]
    for scope, counted in [*parts, ("border", border_collectives(model, layout, pp_rank))]:
        for (phase, operation), traffic in counted.items():
            calls, size = collectives.get((scope, phase, operation), (0, 0))
            collectives[scope, phase, operation] = calls + traffic.calls, size + traffic.bytes
    chunks = layout.chunks(model, pp_rank)
    kept = sum(chunk_activation_bytes(model, layout, chunk) for chunk in chunks)
    if layout.has_embedding(pp_rank):
        kept += sum(embedding_activation_bytes(model, layout).values())
    if layout.has_head(pp_rank):
        kept += sum(head_activation_bytes(model, layout).values())
    tensors = stage_tensors(model, layout, pp_rank)
    senders = len(chunks) - (1 if layout.has_head(pp_rank) else 0)
    return RankFacts(
        shapes={name: tensor.on_rank(layout.tensor_parallel) for name, tensor in tensors.items()},
        parameter_bytes=rank_parameters(model, layout, pp_rank) * layout.dtype.itemsize,
        kept_bytes=kept,
        message_bytes=(stage_message_bytes(model, layout),) * senders,
        collectives=collectives,
    )


def differences(built: RankFacts, accounted: RankFacts) -> list[str]:
    """A line for each fact that is not as accounted."""
    lines = []
    for field in fields(RankFacts):
        found, expected = getattr(built, field.name), getattr(accounted, field.name)
        if not isinstance(found, dict):
            if found != expected:
                lines.append(f"{field.name}: {found}, accounted {expected}")
            continue
        for key in sorted(found.keys() | expected.keys()):
            if found.get(key) != expected.get(key):
                said = f"{found.get(key)}, accounted {expected.get(key)}"
                lines.append(f"{field.name} of {key}: {said}")
    return lines
