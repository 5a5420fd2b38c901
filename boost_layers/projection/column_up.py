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
from boost_layers.mappings import as_tokens


class _Up(torch.autograd.Function):
    """Latent → φ → column-parallel up-projections, with a residual added in the GEMM if given."""

    @staticmethod
    def forward(
        ctx: Any,
        kind: LatentKind,
        kept: KeptTokens | None,
        residual: Tensor | None,
        batched: bool,
        group: dist.ProcessGroup,
        value: Tensor,
        norm_weight: Tensor | None,
        norm_bias: Tensor | None,
        *weights: Tensor,
    ) -> tuple[Tensor, ...]:
        z = kind.activate(as_tokens(value), norm_weight, norm_bias)
        if residual is None:
            ys = ops.project_up(z, weights, batched=batched)
        else:
            ys = (torch.addmm(as_tokens(residual), z, weights[0].t()),)
        ctx.kind, ctx.group, ctx.shape = kind, group, value.shape
        ctx.has_residual = residual is not None
        saved, ctx.kept = to_save(value, kept)
        ctx.save_for_backward(saved, norm_weight, norm_bias, *weights)
        return tuple(y.view(*value.shape[:-1], -1) for y in ys)

    @staticmethod
    def backward(ctx: Any, *dys: Tensor) -> tuple[Any, ...]:
        value, norm_weight, norm_bias, *weights = ctx.saved_tensors
        tokens = restored(value, ctx.kept)
        grads = [as_tokens(dy) for dy in dys]
        widths = [b.shape[1] for b in weights]
        dz = torch.empty_like(tokens)
        for part, dy, b in zip(dz.split(widths, dim=1), grads, weights, strict=True):
            torch.mm(dy, b, out=part)
        pending = communication.start_all_reduce(dz, ctx.group, "backward")
        z = ctx.kind.activate(tokens, norm_weight, norm_bias)
        dweights = [
            torch.mm(dy.t(), part) for part, dy in zip(z.split(widths, dim=1), grads, strict=True)
        ]
        # Waited for here, not by a later consumer: with LaX the gradient that comes from the next
        # layer's gate is added to this one, and it is whole already.
        dw, *dnorm = ctx.kind.activate_backward(pending.wait(), tokens, norm_weight, norm_bias)
        dresidual = dys[0] if ctx.has_residual else None
        return None, None, dresidual, None, None, dw.view(ctx.shape), *dnorm, *dweights


def up(
    latent: Latent,
    weights: Sequence[Tensor],
    group: dist.ProcessGroup,
    *,
    batched: bool = True,
    residual: Tensor | None = None,
) -> tuple[Tensor, ...]:
    """Column-parallel up-projections of reduced latents: y_i = z_i·B_iᵀ (+ residual), z = φ(u), or
    φ(Norm(w)) with LaX.

    Args:
        latent: the latents side by side, `[s, b, Σ r_i]`, replicated.
        weights: B_i, `[o_i/T, r_i]` of the global `[o_i, r_i]`.
        group: the tensor-parallel group.
        batched: weights of equal shape as one batched GEMM.
        residual: `[s, b, o/T]`, added in the GEMM; with a single weight only.

    Returns:
        y_i, `[s, b, o_i/T]` each.

    Forward: no collective. Input gradient: dz = Σ dy_i·B_i is partial on each rank, one all-reduce
    of `[n, Σ r_i]`, started before and waited for after the weight gradients dB_i = dy_iᵀ·z_i;
    then through Norm and φ. Only the latent's value is kept; z is computed again.
    """
    assert residual is None or len(weights) == 1
    return _Up.apply(latent.kind, latent.kept, residual, batched, group, *latent.tensors, *weights)
