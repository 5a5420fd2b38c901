"""BTP's column-parallel up-projections: from a reduced latent, through φ, to this rank's outputs.

Legend: n = s·b tokens, k local input width, w = Σ r width of a grouped latent, o local output
width, T the tensor-parallel size.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from boost_layers import communication, ops
from boost_layers.kept import KeptTokens, restored, to_save
from boost_layers.latent import Latent, LatentKind
from boost_layers.main_grads import main_grads, stand_ins
from boost_layers.mappings import as_sequence, as_tokens


class _Up(torch.autograd.Function):
    """Latent → φ → column-parallel up-projections."""

    @staticmethod
    def forward(
        ctx: Any,
        kind: LatentKind,
        kept: KeptTokens | None,
        group: dist.ProcessGroup,
        latents: Tensor,
        statistics: Tensor | None,
        norm_weight: Tensor | None,
        norm_bias: Tensor | None,
        *weights: Tensor,
    ) -> tuple[Tensor, ...]:
        others = statistics, norm_weight, norm_bias
        ys = ops.up_projection(kind.open(as_tokens(latents), *others), weights)
        ctx.kind, ctx.group, ctx.shape = kind, group, latents.shape
        saved, ctx.kept = to_save(latents, kept)
        ctx.save_for_backward(saved, *others, *weights)
        return tuple(as_sequence(y, latents) for y in ys)

    @staticmethod
    def backward(ctx: Any, *dys: Tensor) -> tuple[Any, ...]:
        (
            value,
            *others,
        ) = ctx.saved_tensors[:4]
        weights = ctx.saved_tensors[4:]
        grads = [as_tokens(dy) for dy in dys]
        dz = ops.up_projection_dgrad(grads, weights)
        pending = communication.start_all_reduce(dz, ctx.group, "backward")
        tokens = restored(value, ctx.kept)
        z = ctx.kind.open(tokens, *others)
        into = main_grads(weights)
        if into is None:
            dweights = ops.up_projection_wgrad(grads, z, ctx.kind.ranks)
        else:
            ops.up_projection_accumulate(grads, z, into)
            dweights = stand_ins(weights)
        # Waited for here, not by a later consumer: with LaX the gradient that comes from the next
        # layer's gate is added to this one, and it is whole already.
        dvalue, *dothers = ctx.kind.open_backward(pending.wait(), tokens, *others)
        return None, None, None, dvalue.view(ctx.shape), *dothers, *dweights


def up(latent: Latent, weights: Sequence[Tensor], group: dist.ProcessGroup) -> tuple[Tensor, ...]:
    """Column-parallel up-projections of reduced latents: y_i = z_i·B_iᵀ, z = φ(v/ρ), or φ(Norm(w))
    with LaX.

    Args:
        latent: the latents side by side, `[s, b, Σ r_i]`, replicated.
        weights: B_i, `[o_i/T, r_i]` of the global `[o_i, r_i]`; of one shape they are one batched
            GEMM where that is faster.
        group: the tensor-parallel group.

    Returns:
        y_i, `[s, b, o_i/T]` each. The next operation may write into them.

    Forward: no collective. Input gradient: dz_i = dy_i·B_i is partial on each rank, one all-reduce
    of `[n, Σ r_i]`, started before and waited for after the weight gradients dB_i = dy_iᵀ·z_i;
    then through φ, Norm and 1/ρ, which gives dS too. Only the latent's value is kept; z is computed
    again.
    """
    return _Up.apply(latent.kind, latent.kept, group, *latent.tensors, *weights)
