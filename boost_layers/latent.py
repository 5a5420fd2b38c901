"""The latent between two factors: z = φ(Norm(w)), and LaX's crossing from layer to layer.

With u = A·x reduced, w = u for CoLA and SVD. LaX (arXiv 2505.21732) joins the same projection of
consecutive layers, w_l = u_l + G_l(z_{l−1}), and takes a norm over each latent. Under BTP all of
this is replicated, so it needs no communication: the gradient of z that comes from the
up-projection is all-reduced there, the one that comes from the next layer's gate is complete as it
is, and both meet in w.

What is kept for backward is w alone: z is computed again by each of its two consumers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from boost_layers import ops
from boost_layers.kept import KeptTokens, restored, to_save
from boost_layers.mappings import as_tokens

if TYPE_CHECKING:
    from boost_layers.config import LowRankConfig
    from boost_layers.parameters import FactorTensors


@dataclass(frozen=True)
class LatentKind:
    """How z is made of w: z = φ(Norm(w)), for latents of grouped projections side by side."""

    ranks: tuple[int, ...]
    activation: str
    norm: str = "none"

    def activate(self, w: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
        """z from w, `[n, Σ r_i]` → the same."""
        return ops.activate_latent(w, self.ranks, self.activation, self.norm, weight, bias)

    def activate_backward(
        self, dz: Tensor, w: Tensor, weight: Tensor | None, bias: Tensor | None
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """dw, dγ and dβ of `activate`."""
        return ops.activate_latent_backward(
            dz, w, self.ranks, self.activation, self.norm, weight, bias
        )


@dataclass(frozen=True)
class Latent:
    """A latent before φ. It stands for z wherever z is consumed, and its consumers compute z
    themselves."""

    value: Tensor
    """w, `[s, b, Σ r_i]`."""
    kind: LatentKind
    norm_weight: Tensor | None = None
    """`[Σ r_i]`; None without a norm."""
    norm_bias: Tensor | None = None
    """`[Σ r_i]`; None unless the norm is a layernorm."""
    kept: KeptTokens | None = None
    """Where consumers find `value` in backward, if they shall not keep it themselves."""

    @property
    def tensors(self) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """What autograd must see."""
        return self.value, self.norm_weight, self.norm_bias


@dataclass(frozen=True)
class ResidualSource:
    """How a residual input was made: residual + φ(u)·Bᵀ. It can be made again instead of being
    kept."""

    residual: Tensor
    """`[s, b, d/T]`."""
    latent: Latent
    """`[s, b, r]`."""
    weight: Tensor
    """B, `[d/T, r]`."""


class _Activate(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        kind: LatentKind,
        kept: KeptTokens | None,
        value: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
    ) -> Tensor:
        ctx.kind, ctx.shape = kind, value.shape
        saved, ctx.kept = to_save(value, kept)
        ctx.save_for_backward(saved, weight, bias)
        return kind.activate(as_tokens(value), weight, bias).view(value.shape)

    @staticmethod
    def backward(ctx: Any, dz: Tensor) -> tuple[Any, ...]:
        value, weight, bias = ctx.saved_tensors
        # Contiguous, so that the gradient has the same bits whether z went by itself or packed.
        dz = as_tokens(dz).contiguous()
        dw, *dnorm = ctx.kind.activate_backward(dz, restored(value, ctx.kept), weight, bias)
        return None, None, dw.view(ctx.shape), *dnorm


def activated(latent: Latent) -> Tensor:
    """z itself, `[s, b, Σ r_i]`. No collective."""
    if latent.kind.norm == "none" and latent.kind.activation == "identity":
        return latent.value
    return _Activate.apply(latent.kind, latent.kept, *latent.tensors)


class _Cross(torch.autograd.Function):
    """w = u + G(z) of each member, with z computed from the former layer's w, here and again in
    backward."""

    @staticmethod
    def forward(
        ctx: Any,
        u: Tensor,
        kind: LatentKind,
        kept: KeptTokens | None,
        gate: str,
        value: Tensor,
        norm_weight: Tensor | None,
        norm_bias: Tensor | None,
        *gate_weights: Tensor,
    ) -> Tensor:
        ctx.kind, ctx.gate, ctx.shape = kind, gate, value.shape
        saved, ctx.kept = to_save(value, kept)
        ctx.save_for_backward(saved, norm_weight, norm_bias, *gate_weights)
        z = kind.activate(as_tokens(value), norm_weight, norm_bias)
        gated = [
            ops.apply_gate(part, gate, weights)
            for part, weights in _by_member(z, kind.ranks, gate_weights)
        ]
        return (as_tokens(u) + torch.cat(gated, dim=1)).view(u.shape)

    @staticmethod
    def backward(ctx: Any, dw: Tensor) -> tuple[Any, ...]:
        value, norm_weight, norm_bias, *gate_weights = ctx.saved_tensors
        tokens, kind = restored(value, ctx.kept), ctx.kind
        z = kind.activate(tokens, norm_weight, norm_bias)
        dparts: list[Tensor] = []
        dgates: list[Tensor] = []
        grads = as_tokens(dw).split(list(kind.ranks), dim=1)
        members = _by_member(z, kind.ranks, gate_weights)
        for dg, (part, weights) in zip(grads, members, strict=True):
            dpart, of_weights = ops.apply_gate_backward(dg.contiguous(), part, ctx.gate, weights)
            dparts.append(dpart)
            dgates += of_weights
        dvalue, *dnorm = kind.activate_backward(
            torch.cat(dparts, dim=1), tokens, norm_weight, norm_bias
        )
        return dw, None, None, None, dvalue.view(ctx.shape), *dnorm, *dgates


def cross(u: Tensor, previous: Latent, gate: str, gate_weights: Sequence[Tensor]) -> Tensor:
    """LaX's w = u + G(z₋₁): u `[s, b, Σ r_i]` and the former layer's latent of the same projections
    → `[s, b, Σ r_i]`.

    Args:
        u: reduced, A·x.
        previous: of the former layer; z₋₁ is computed from it.
        gate: "identity", "linear" or "tensor".
        gate_weights: those of the first member, then those of the next.

    No collective. Backward: du = dw; dz₋₁ and the gate's gradients from dw and z₋₁, which is
    computed again. All of them are whole on every rank.
    """
    return _Cross.apply(u, previous.kind, previous.kept, gate, *previous.tensors, *gate_weights)


def _by_member(
    z: Tensor, ranks: Sequence[int], gate_weights: Sequence[Tensor]
) -> list[tuple[Tensor, Sequence[Tensor]]]:
    """Each member's latent `[n, r_i]`, contiguous, and its gate's weights."""
    each = len(gate_weights) // len(ranks)
    return [
        (part.contiguous(), gate_weights[i * each : (i + 1) * each])
        for i, part in enumerate(z.split(list(ranks), dim=1))
    ]


class LayerLatents:
    """The latents of one pass through a layer, in the order in which they arise, each crossed with
    its counterpart in the layer before where there is one."""

    def __init__(self, low_rank: LowRankConfig, previous: Sequence[Latent] | None):
        self.low_rank = low_rank
        self.previous = previous
        self.current: list[Latent] = []
        self.residual_source: ResidualSource | None = None
        """How the layer's second residual input can be made again, where it is not kept."""

    def next(
        self, u: Tensor, factors: Sequence[FactorTensors], kept: KeptTokens | None = None
    ) -> Latent:
        """The latent of the next group of projections, from its reduced u `[s, b, Σ r_i]`. In LaX's
        first layer and without a crossing: w = u, and no norm.

        Args:
            u: the reduced output of the down-projections.
            factors: those projections' tensors.
            kept: where u is kept, for consumers that shall not keep it themselves.
        """
        kind = LatentKind(tuple(each.rank for each in factors), self.low_rank.activation)
        latent = Latent(u, kind, kept=kept)
        if self.previous is not None:
            before = self.previous[len(self.current)]
            gate_weights = [weight for each in factors for weight in each.gate]
            w = cross(u, before, self.low_rank.lax_gate, gate_weights)
            norms = zip(*(each.norm for each in factors), strict=True)
            weight, bias, *_ = (*(torch.cat(members) for members in norms), None, None)
            kind = replace(kind, norm=self.low_rank.lax_norm)
            latent = Latent(w, kind, weight, bias, KeptTokens.of(w, kept))
        self.current.append(latent)
        return latent
