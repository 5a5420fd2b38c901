"""The latent between two factors: z = φ_a(Norm(w)), and LaX's crossing from layer to layer.

With u = A·x reduced, w = u for CoLA and SVD. LaX (arXiv 2505.21732) joins the same projection of
consecutive layers, w_l = u_l + G_l(z_{l−1}), and takes a norm over each latent. Under BTP all of
this is replicated, so it needs no communication: the gradient of z that comes from the
up-projection is all-reduced there, the one that comes from the next layer's gate is complete as it
is, and both meet in w.

φ_a(y) = (1 − a)·y + a·φ(y) with the activation's amount a, which is 1 but for a model whose φ is
annealed.

What is kept for backward is w alone: z is computed again by each of its two consumers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from boost_layers import communication, ops
from boost_layers.kept import KeptTokens, restored, to_save
from boost_layers.main_grads import main_grads, stand_ins
from boost_layers.mappings import as_tokens

if TYPE_CHECKING:
    import torch.distributed as dist

    from boost_layers.config import LowRankConfig
    from boost_layers.parameters import FactorTensors


@dataclass(frozen=True)
class LatentKind:
    """How z is made of a latent's value v: z = φ_a(Norm(v/ρ)), for latents of grouped projections
    side by side. ρ = sqrt(S/d + ε) is that of the norm before the down-projections, where v is not
    divided by it yet, else 1."""

    ranks: tuple[int, ...]
    activation: str
    norm: str = "none"
    hidden_size: int = 1
    eps: float = 0.0
    amount: float = 1.0
    """a of φ_a(y) = (1 − a)·y + a·φ(y)."""

    @property
    def is_plain(self) -> bool:
        """Whether z is v/ρ."""
        return self.norm == "none" and set(self._shares) == {"identity"}

    @property
    def _shares(self) -> dict[str, float]:
        """The activations that z is the sum of, and how much of each."""
        if self.activation == "identity" or self.amount == 0.0:
            return {"identity": 1.0}
        if self.amount == 1.0:
            return {self.activation: 1.0}
        return {"identity": 1.0 - self.amount, self.activation: self.amount}

    def open(
        self, v: Tensor, s: Tensor | None, weight: Tensor | None, bias: Tensor | None
    ) -> Tensor:
        """z, flat, its members one after the other, from v `[n, Σ r_i]` and S `[n, 1]`."""
        z, *more = (
            ops.latent_epilogue(
                v,
                self.ranks,
                activation,
                statistics=s,
                hidden_size=self.hidden_size,
                eps=self.eps,
                norm=self.norm,
                weight=weight,
                bias=bias,
            )[0]
            for activation in self._shares
        )
        return torch.lerp(z, more[0], self.amount) if more else z

    def open_backward(
        self,
        dz: Tensor,
        v: Tensor,
        s: Tensor | None,
        weight: Tensor | None,
        bias: Tensor | None,
    ) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
        """dv `[n, Σ r_i]`, dS, dγ and dβ of `open`, from dz as flat as z."""
        total: tuple[Tensor | None, ...] = (None,) * 4
        for activation, share in self._shares.items():
            dv, _, *others = ops.latent_epilogue_backward(
                dz if share == 1.0 else dz * share,
                self.ranks,
                activation,
                h=v,
                statistics=s,
                hidden_size=self.hidden_size,
                eps=self.eps,
                norm=self.norm,
                weight=weight,
                bias=bias,
            )
            total = tuple(
                new if sum_ is None or new is None else sum_ + new
                for sum_, new in zip(total, (dv, *others), strict=True)
            )
        dwhole, ds, dweight, dbias = total
        assert dwhole is not None
        return dwhole, ds, dweight, dbias

    def members(self, z: Tensor, n: int) -> list[Tensor]:
        """The members `[n, r_i]` of flat z, contiguous."""
        return ops.split_members(z, n, self.ranks)

    def together(self, members: Sequence[Tensor]) -> Tensor:
        """The inverse of `members`."""
        return torch.cat([member.reshape(-1) for member in members])


@dataclass(frozen=True)
class Latent:
    """A latent before φ. It stands for z wherever z is consumed, and its consumers compute z
    themselves."""

    value: Tensor
    """v, `[s, b, Σ r_i]`."""
    kind: LatentKind
    statistics: Tensor | None = None
    """S `[n, 1]`; None where v is divided by ρ already, or no norm came before."""
    norm_weight: Tensor | None = None
    """`[Σ r_i]`; None without a norm."""
    norm_bias: Tensor | None = None
    """`[Σ r_i]`; None unless the norm is a layernorm."""
    kept: KeptTokens | None = None
    """Where consumers find `value` in backward, if they shall not keep it themselves."""
    sharded: bool = False
    """Whether `value` holds this rank's share of each member, `[s, b, Σ r_i/T]`."""

    @property
    def tensors(self) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
        """What autograd must see."""
        return self.value, self.statistics, self.norm_weight, self.norm_bias


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
        *others: Tensor | None,
    ) -> Tensor:
        ctx.kind, ctx.shape = kind, value.shape
        saved, ctx.kept = to_save(value, kept)
        ctx.save_for_backward(saved, *others)
        tokens = as_tokens(value)
        z = kind.members(kind.open(tokens, *others), tokens.shape[0])
        return torch.cat(z, dim=1).view(value.shape)

    @staticmethod
    def backward(ctx: Any, dz: Tensor) -> tuple[Any, ...]:
        value, *others = ctx.saved_tensors
        dz = ctx.kind.together(as_tokens(dz).split(list(ctx.kind.ranks), dim=1))
        dv, *dothers = ctx.kind.open_backward(dz, restored(value, ctx.kept), *others)
        return None, None, dv.view(ctx.shape), *dothers


def activated(latent: Latent) -> Tensor:
    """z itself, `[s, b, Σ r_i]`. No collective."""
    if latent.kind.is_plain and latent.statistics is None:
        return latent.value
    return _Activate.apply(latent.kind, latent.kept, *latent.tensors)


class _Cross(torch.autograd.Function):
    """w = v/ρ + G(z) of each member, with z computed from the former layer's w, here and again in
    backward."""

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
        value: Tensor,
        norm_weight: Tensor | None,
        norm_bias: Tensor | None,
        *gate_weights: Tensor,
    ) -> Tensor:
        ctx.kind, ctx.former, ctx.gate, ctx.shape = kind, former, gate, value.shape
        # Without statistics v is not needed in backward: dv = dw.
        saved_v, ctx.kept = (None, None) if s is None else to_save(v, kept)
        saved, ctx.kept_former = to_save(value, kept_former)
        ctx.save_for_backward(saved_v, s, saved, norm_weight, norm_bias, *gate_weights)
        tokens = as_tokens(value)
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
            dtype=value.dtype,
        )
        assert w is not None
        return w.view(v.shape)

    @staticmethod
    def backward(ctx: Any, dw: Tensor) -> tuple[Any, ...]:
        saved_v, s, value, norm_weight, norm_bias, *gate_weights = ctx.saved_tensors
        tokens, former = restored(value, ctx.kept_former), ctx.former
        dv, ds = dw, None
        if s is not None:
            dv, ds = _divided_backward(ctx.kind, dw, restored(saved_v, ctx.kept), s)
        norm = (None, norm_weight, norm_bias)
        z = former.members(former.open(tokens, *norm), tokens.shape[0])
        dparts: list[Tensor] = []
        dgates: list[Tensor] = []
        grads = as_tokens(dw).split(list(former.ranks), dim=1)
        for dg, part, weights in zip(grads, z, _by_member(gate_weights, former), strict=True):
            dpart, of_weights = ops.apply_gate_backward(dg.contiguous(), part, ctx.gate, weights)
            dparts.append(dpart)
            dgates += of_weights
        dvalue, _, *dnorm = former.open_backward(former.together(dparts), tokens, *norm)
        return *[None] * 5, dv, ds, dvalue.view(ctx.shape), *dnorm, *dgates


class _Divide(torch.autograd.Function):
    """u = v/ρ, which is all that is kept of both."""

    @staticmethod
    def forward(
        ctx: Any,
        kind: LatentKind,
        kept: KeptTokens | None,
        dtype: torch.dtype,
        v: Tensor,
        s: Tensor,
    ) -> Tensor:
        flat, _ = ops.latent_epilogue(
            as_tokens(v),
            (v.shape[-1],),
            "identity",
            statistics=s,
            hidden_size=kind.hidden_size,
            eps=kind.eps,
            dtype=dtype,
        )
        u = flat.view(v.shape)
        if kept is not None:
            kept.keep(u)
        ctx.kind, ctx.dtype = kind, v.dtype
        saved, ctx.kept = to_save(u, kept)
        ctx.save_for_backward(saved, s)
        return u

    @staticmethod
    def backward(ctx: Any, du: Tensor) -> tuple[Any, ...]:
        saved, s = ctx.saved_tensors
        dv, ds = _divided_backward(ctx.kind, du, restored(saved, ctx.kept), s)
        assert ds is not None
        # The op takes its last argument for v = u·ρ.
        rho = torch.sqrt(s / ctx.kind.hidden_size + ctx.kind.eps)
        return None, None, None, dv.to(ctx.dtype), ds * rho


def _divided_backward(
    kind: LatentKind, du: Tensor, v: Tensor, s: Tensor
) -> tuple[Tensor, Tensor | None]:
    """dv and dS of u = v/ρ."""
    dv, _, ds, *_ = ops.latent_epilogue_backward(
        du.reshape(-1),
        (v.shape[1],),
        "identity",
        h=v,
        statistics=s,
        hidden_size=kind.hidden_size,
        eps=kind.eps,
    )
    return dv.view(du.shape), ds


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


def divided(latent: Latent, dtype: torch.dtype, kept: KeptTokens | None) -> Tensor:
    """u = v/ρ of a latent that has statistics, `[s, b, Σ r_i]` in `dtype`; its share is put into
    `kept`. No collective."""
    return _Divide.apply(latent.kind, kept, dtype, latent.value, latent.statistics)


def _by_member(gate_weights: Sequence[Tensor], kind: LatentKind) -> list[Sequence[Tensor]]:
    """Each member's gate's weights."""
    each = len(gate_weights) // len(kind.ranks)
    return [gate_weights[i * each : (i + 1) * each] for i in range(len(kind.ranks))]


@dataclass(frozen=True)
class Reduced:
    """What a group of down-projections gives: A·x, or with an RMSNorm in between A·(γ∘x) not yet
    divided by ρ, and what ρ is made of."""

    value: Tensor
    """`[s, b, Σ r_i]`."""
    statistics: Tensor | None = None
    """S `[n, 1]`."""
    hidden_size: int = 1
    eps: float = 0.0


def reduced_latent(y: Tensor, weight: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Σ_ranks y·Aᵀ `[s, b, r]` of y `[s, b, k/T]`, in any layout with whole rows, and A `[r, k/T]`:
    one all-reduce."""
    u = y.new_empty(*y.shape[:-1], weight.shape[0])
    ops.down_projection(y, weight, u)
    return communication.all_reduce(u, group, communication.current_phase())


def down_weight_gradient(du: Tensor, y: Tensor, weight: Tensor) -> Tensor:
    """dA = duᵀ·y `[r, k/T]` of `reduced_latent`, or a stand-in where it is in A's main gradient."""
    into = main_grads([weight])
    if into is None:
        return ops.down_projection_wgrad(du, y).to(weight.dtype)
    ops.down_projection_accumulate(du, y, into[0])
    return stand_ins([weight])[0]


class LayerLatents:
    """The latents of one pass through a layer, in the order in which they arise, each crossed with
    its counterpart in the layer before where there is one."""

    def __init__(
        self, low_rank: LowRankConfig, previous: Sequence[Latent] | None, amount: float = 1.0
    ):
        self.low_rank = low_rank
        self.previous = previous
        self.amount = amount
        """a of φ_a(y) = (1 − a)·y + a·φ(y)."""
        self.current: list[Latent] = []
        self.residual_source: ResidualSource | None = None
        """How the layer's second residual input can be made again, where it is not kept."""

    def next(
        self,
        reduced: Reduced,
        factors: Sequence[FactorTensors],
        kept: KeptTokens | None = None,
    ) -> Latent:
        """The latent of the next group of projections. In LaX's first layer and without a crossing
        it is u itself, and has no norm.

        Args:
            reduced: what the down-projections gave.
            factors: those projections' tensors.
            kept: takes this rank's share, for consumers that shall not keep the latent themselves.
        """
        ranks = tuple(each.rank for each in factors)
        activation, dtype = self.low_rank.activation, factors[0].B.dtype
        kind = LatentKind(ranks, activation, amount=self.amount)
        undivided = replace(kind, hidden_size=reduced.hidden_size, eps=reduced.eps)
        value, statistics = reduced.value, reduced.statistics
        latent = Latent(value, undivided, statistics, kept=kept)
        if self.previous is not None:
            if kept is not None and statistics is not None:
                kept.keep(value)
            before = self.previous[len(self.current)]
            gate_weights = [weight for each in factors for weight in each.gate]
            w = cross(latent, before, self.low_rank.lax_gate, gate_weights)
            norms = zip(*(each.norm for each in factors), strict=True)
            weight, bias, *_ = (*(torch.cat(members) for members in norms), None, None)
            kind = replace(kind, norm=self.low_rank.lax_norm)
            latent = Latent(w, kind, None, weight, bias, KeptTokens.of(w, kept))
        elif statistics is not None and (self.low_rank.crossing or value.dtype != dtype):
            # The next layer takes u, and a message wider than the activations is not kept.
            u = divided(latent, dtype, kept)
            latent = Latent(u, kind, kept=kept)
        elif kept is not None and not kept.holds:
            kept.keep(value)
        self.current.append(latent)
        return latent
