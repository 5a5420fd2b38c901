"""Activation checkpointing at the latents (paper section on communication-free recomputation).

What lies between two all-reduces, from a reduced latent to the next down-projection's partial sums,
is one Function. It keeps the latent alone; backward computes the up-projections and what follows
them again. The re-forward starts from what is reduced already and ends before the next all-reduce,
so it communicates nothing, and it stops before the down-projection, whose result nobody needs.

(`torch.utils.checkpoint` would compute that down-projection again: its early stop does not see into
a custom Function.)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from boost_layers import ops
from boost_layers.communication import LEDGER
from boost_layers.kept import KeptTokens, restored, to_save
from boost_layers.latent import (
    Latent,
    LatentKind,
    down_weight_gradients,
    one_below_the_other,
    reduced_latent,
)
from boost_layers.main_grads import leaf_for
from boost_layers.mappings import as_sequence, as_tokens

Between = Callable[[Sequence[Latent], Sequence[Tensor]], Tensor]
"""Latents and the up-projections' weights → this rank's input of the down-projection."""


_EACH = 4
"""`Latent.tensors` of each latent."""


class _Segment(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        between: Between,
        kinds: Sequence[LatentKind],
        kept: Sequence[KeptTokens | None],
        opens_layer: bool,
        group: dist.ProcessGroup,
        number_of_downs: int,
        *tensors: Tensor | None,
    ) -> Tensor:
        downs: Any = tensors[:number_of_downs]
        tensors = tensors[number_of_downs:]
        latents, weights = _latents_and_weights(kinds, tensors)
        y = between(latents, weights)
        u = reduced_latent(y, downs, group)
        ctx.between, ctx.kinds, ctx.opens_layer = between, kinds, opens_layer
        ctx.number_of_downs = number_of_downs
        ctx.shape = y.shape[:-1]
        saved, ctx.kept = list(tensors), []
        for latent, each in zip(latents, kept, strict=True):
            value, consumed = to_save(latent.value, each)
            saved[_EACH * len(ctx.kept)] = value
            ctx.kept.append(consumed)
        ctx.save_for_backward(*downs, *saved)
        return u

    @staticmethod
    def backward(ctx: Any, du: Tensor) -> tuple[Any, ...]:
        if ctx.opens_layer:
            LEDGER.layer_passes["recompute"] += 1
        downs = ctx.saved_tensors[: ctx.number_of_downs]
        saved = list(ctx.saved_tensors[ctx.number_of_downs :])
        for i, each in enumerate(ctx.kept):
            saved[_EACH * i] = restored(saved[_EACH * i], each).view(*ctx.shape, -1)
        needed = ctx.needs_input_grad[-len(saved) :]
        leaves = [
            t if t is None else leaf_for(t, wanted) for t, wanted in zip(saved, needed, strict=True)
        ]
        # Nothing may be wanted of what is frozen.
        with torch.set_grad_enabled(any(needed)):
            y = ctx.between(*_latents_and_weights(ctx.kinds, leaves))
        a = one_below_the_other(downs)
        dy = as_sequence(ops.down_projection_dgrad(as_tokens(du), a), y)
        ddowns = down_weight_gradients(du, y.detach(), downs)
        wanted_leaves: list[Any] = [t for t, w in zip(leaves, needed, strict=True) if w]
        found = iter(torch.autograd.grad(y, wanted_leaves, dy) if wanted_leaves else ())
        grads = [next(found) if wanted else None for wanted in needed]
        return *[None] * 6, *ddowns, *grads


def _latents_and_weights(
    kinds: Sequence[LatentKind], tensors: Sequence[Tensor | None]
) -> tuple[list[Latent], Sequence[Any]]:
    """The tensors of each latent, then the weights."""
    latents = []
    for i, kind in enumerate(kinds):
        value, s, weight, bias = tensors[_EACH * i : _EACH * (i + 1)]
        assert value is not None
        latents.append(Latent(value, kind, s, weight, bias))
    return latents, tensors[_EACH * len(kinds) :]


def segment(
    between: Between,
    latents: Sequence[Latent],
    weights: Sequence[Tensor],
    downs: Sequence[Tensor],
    group: dist.ProcessGroup,
    *,
    opens_layer: bool,
) -> Tensor:
    """From latents to the next latent, keeping the former only: u = Σ_ranks y·Aᵀ with
    y = between(latents, weights).

    Args:
        between: must be a function of its arguments alone, without randomness and collectives in
            its forward; autograd differentiates it.
        latents: reduced, `[s, b, Σ r_i]` each.
        weights: of the up-projections in `between`.
        downs: A of the down-projection, `[r, k/T]`, or of each where there are several.
        group: the tensor-parallel group.
        opens_layer: whether this is a layer's first segment, for the ledger's count of passes.

    Returns:
        u, `[s, b, Σ r]`, replicated.

    Forward: one all-reduce of `[n, Σ r]`. Backward: `between` again, without a collective;
    dy = du·A and dA = duᵀ·y, no collective; then the backward of `between` with its own
    collectives.
    """
    tensors = [tensor for latent in latents for tensor in latent.tensors]
    kinds = [latent.kind for latent in latents]
    kept = [latent.kept for latent in latents]
    return _Segment.apply(
        between, kinds, kept, opens_layer, group, len(downs), *downs, *tensors, *weights
    )
