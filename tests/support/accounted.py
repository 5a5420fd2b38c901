"""The accounting's sizes of a test's model, and what that model really holds, keeps and computes.

Measured are the parameters that a rank holds, the memory that the graph of a forward keeps, the
operations that torch counts and the collectives that the ledger counts: nothing of it knows the
accounting.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from boost_layers.communication import LEDGER
from boost_layers.embedding import fuse_embedding_border
from megatron.boost.accounting.activations import kept_activation_bytes
from megatron.boost.accounting.collectives import border_collectives, layer_collectives
from megatron.boost.accounting.flops import Work, checkpointed_layers, rank_hardware_flops
from megatron.boost.accounting.parameters import stage_tensors
from megatron.boost.accounting.sizes import Layout, Model
from megatron.boost.recipes.kept_memory import KeptMemory
from tests.support.parallel_gpt import Case, parallel_gpt


def accounted_model(case: Case) -> Model:
    """The sizes of a case's model."""
    plain = case.plain
    return Model(
        hidden_size=plain.hidden,
        ffn_hidden_size=plain.ffn,
        num_attention_heads=plain.heads,
        num_query_groups=plain.kv_heads,
        kv_channels=plain.head_dim,
        num_layers=plain.layers,
        vocab_size=plain.vocab_size,
        padded_vocab_size=case.padded_vocab or plain.vocab_size,
        tied=plain.tied,
        low_rank=case.low_rank,
    )


def accounted_layout(case: Case, sequence: int, batch: int) -> Layout:
    """The layout of a case, with one micro-batch."""
    extra = case.transformer
    granularity = extra.get("recompute_granularity")
    return Layout(
        sequence_length=sequence,
        micro_batch_size=batch,
        tensor_parallel=case.tp,
        sequence_parallel=bool(case.sequence_parallel),
        dtype=case.dtype,
        recompute={"full": "full", "selective": "core_attention"}.get(granularity, "none"),
        recompute_method=extra.get("recompute_method", "uniform"),
        recompute_layers=extra.get("recompute_num_layers", 1),
    )


@dataclass(frozen=True)
class Measured:
    """One rank's forward and backward of one micro-batch."""

    shapes: dict[str, tuple[int, ...]]
    """Of the parameters it holds."""
    kept_bytes: int
    flops: int
    collectives: dict[tuple[str, str, str], tuple[int, int]]
    """(scope, phase, operation) → calls, bytes."""


def accounted(case: Case, sequence: int, batch: int, *, fused_embedding: bool = False) -> Measured:
    """What the accounting says that `measure` will find."""
    model, layout = accounted_model(case), accounted_layout(case, sequence, batch)
    uncausal = Work(batch * sequence, 2 * batch * sequence**2)
    tensors = stage_tensors(model, layout, 0)
    return Measured(
        shapes={name: tensor.on_rank(case.tp) for name, tensor in tensors.items()},
        kept_bytes=kept_activation_bytes(model, layout, 0),
        flops=rank_hardware_flops(model, layout, 0, uncausal),
        collectives=_accounted_collectives(model, layout, fused_embedding=fused_embedding),
    )


def _accounted_collectives(
    model: Model, layout: Layout, *, fused_embedding: bool
) -> dict[tuple[str, str, str], Any]:
    again = checkpointed_layers(model, layout, 0)
    total: dict[tuple[str, str, str], Any] = {}
    parts = [
        ("layer", layer_collectives(model, layout, layer, checkpointed=layer in again))
        for layer in range(model.num_layers)
    ]
    borders = border_collectives(model, layout, 0, fused_embedding=fused_embedding)
    for scope, collectives in [*parts, ("border", borders)]:
        for (phase, operation), traffic in collectives.items():
            calls, size = total.get((scope, phase, operation), (0, 0))
            total[scope, phase, operation] = (calls + traffic.calls, size + traffic.bytes)
    return total


def _product_flops(_: Any, a: tuple[int, int], b: tuple[int, int], **__: Any) -> int:
    """Of `[m, k]` times `[k, n]`."""
    return 2 * a[0] * a[1] * b[1]


ADDED_IN_PLACE = {torch.ops.aten.addmm_: _product_flops}
"""Not in torch's list: the product that is added in place."""


def counted_flops(loss: Any) -> int:
    """The operations of `loss()` and of its backward, as torch counts them: attention as the
    matrix products of a kernel that computes all of Q·Kᵀ."""
    with FlopCounterMode(display=False, custom_mapping=ADDED_IN_PLACE) as counter:
        with sdpa_kernel(SDPBackend.MATH):
            loss().backward()
    return counter.get_total_flops()


def measure(case: Case, sequence: int, batch: int, *, fused_embedding: bool = False) -> Measured:
    """On a rank: build the case's model and run it three times, for memory, operations and
    collectives."""
    with parallel_gpt(case) as model:
        if fused_embedding:
            fuse_embedding_border(model)
        vocabulary = case.plain.vocab_size
        generator = torch.Generator().manual_seed(1)
        tokens = torch.randint(vocabulary, (batch, sequence), generator=generator)
        positions = torch.arange(sequence).expand_as(tokens)

        def loss() -> Tensor:
            return model(tokens, positions, None, labels=tokens).sum()

        kept = KeptMemory(model)
        with kept.hooks():
            loss()
        flops = counted_flops(loss)
        LEDGER.clear()
        loss().backward()
        collectives = {
            key: (count.calls, count.bytes) for key, count in LEDGER.counts.items() if count.calls
        }
        shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
        return Measured(shapes, kept.bytes, flops, collectives)
