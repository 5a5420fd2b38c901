"""LaX's crossing of latents from layer to layer.

With u = A·x reduced, LaX (arXiv 2505.21732) joins the same projection of consecutive layers,
w_l = u_l + G_l(z_{l−1}), and takes a norm over each latent, z_l = φ(Norm(w_l)). Under BTP all of
this is replicated, so it needs no communication: the gradient of z that comes from the
up-projection is all-reduced there, the one that comes from the next layer's gate is complete as it
is, and both meet in w.

What is kept for backward is w alone: z is computed again by each of its two consumers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from boost_layers import ops
from boost_layers.kept import KeptTokens, restored, to_save
from boost_layers.latent import Latent, LatentKind, divided_backward
from boost_layers.mappings import as_tokens


class _Cross(torch.autograd.Function):
    """LaX's crossing, w = v/ρ + G(z) of each member. z is computed from the former layer's w, here
    and again in backward."""

    @staticmethod
    def forward(
        ctx: Any,
        kind: LatentKind,
        kept: KeptTokens | None,
        former: LatentKind,
        kept_former: KeptTokens | None,
        gate: str,
        v: Tensor,
        s: Tensor | None,
        before: Tensor,
        norm_weight: Tensor | None,
        norm_bias: Tensor | None,
        *gate_weights: Tensor,
    ) -> Tensor:
        ctx.kind, ctx.former, ctx.gate, ctx.shape = kind, former, gate, before.shape
        # Without statistics v is not needed in backward: dv = dw.
        saved_v, ctx.kept = (None, None) if s is None else to_save(v, kept)
        saved, ctx.kept_former = to_save(before, kept_former)
        ctx.save_for_backward(saved_v, s, saved, norm_weight, norm_bias, *gate_weights)
        tokens = as_tokens(before)
        z = former.members(former.open(tokens, None, norm_weight, norm_bias), tokens.shape[0])
        gated = torch.cat(
            [
                ops.apply_gate(part, gate, weights)
                for part, weights in zip(z, _by_member(gate_weights, former), strict=True)
            ],
            dim=1,
        )
        _, w = ops.latent_epilogue(
            as_tokens(v),
            kind.ranks,
            "identity",
            statistics=s,
            hidden_size=kind.hidden_size,
            eps=kind.eps,
            gated=gated,
            dtype=before.dtype,
        )
        assert w is not None
        return w.view(v.shape)

    @staticmethod
    def backward(ctx: Any, dw: Tensor) -> tuple[Any, ...]:
        saved_v, s, before, norm_weight, norm_bias, *gate_weights = ctx.saved_tensors
        tokens, former = restored(before, ctx.kept_former), ctx.former
        dv, ds = dw, None
        if s is not None:
            dv, ds = divided_backward(ctx.kind, dw, restored(saved_v, ctx.kept), s)
        norm = (None, norm_weight, norm_bias)
        z = former.members(former.open(tokens, *norm), tokens.shape[0])
        dparts: list[Tensor] = []
        dgates: list[Tensor] = []
        grads = as_tokens(dw).split(list(former.ranks), dim=1)
        for dg, part, weights in zip(grads, z, _by_member(gate_weights, former), strict=True):
            dpart, of_weights = ops.apply_gate_backward(dg.contiguous(), part, ctx.gate, weights)
            dparts.append(dpart)
            dgates += of_weights
        dbefore, _, *dnorm = former.open_backward(former.together(dparts), tokens, *norm)
        return *[None] * 5, dv, ds, dbefore.view(ctx.shape), *dnorm, *dgates


def cross(latent: Latent, previous: Latent, gate: str, gate_weights: Sequence[Tensor]) -> Tensor:
    """LaX's w = u + G(z₋₁), u = v/ρ: a layer's latent and the former layer's of the same
    projections → `[s, b, Σ r_i]`.

    Args:
        latent: A·x, reduced.
        previous: of the former layer, divided by its own ρ; z₋₁ is computed from it.
        gate: "identity", "linear" or "tensor".
        gate_weights: those of the first member, then those of the next.

    No collective. Backward: du = dw; dz₋₁ and the gate's gradients from dw and z₋₁, which is
    computed again. All of them are whole on every rank.
    """
    value, _, *norm = previous.tensors
    return _Cross.apply(
        latent.kind,
        latent.kept,
        previous.kind,
        previous.kept,
        gate,
        latent.value,
        latent.statistics,
        value,
        *norm,
        *gate_weights,
    )


def _by_member(gate_weights: Sequence[Tensor], kind: LatentKind) -> list[Sequence[Tensor]]:
    """Each member's gate's weights."""
    each = len(gate_weights) // len(kind.ranks)
    return [gate_weights[i * each : (i + 1) * each] for i in range(len(kind.ranks))]
