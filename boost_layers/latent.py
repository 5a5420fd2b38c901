"""The latents between two factors: z = φ_a(Norm(v/ρ)), before φ.

Under BTP they are replicated, so that what is computed of them needs no communication: the gradient
of z that comes from the up-projection is all-reduced there.

φ_a(y) = (1 − a)·y + a·φ(y) with the activation's amount a, which is 1 but for a model whose φ is
annealed.

What is kept for backward is v alone: z is computed again by each of its consumers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from boost_layers import communication, ops
from boost_layers.kept import KeptTokens, restored, to_save
from boost_layers.main_grads import main_grads, stand_ins
from boost_layers.mappings import as_tokens

if TYPE_CHECKING:
    import torch.distributed as dist


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
    def widths(self) -> tuple[int, ...]:
        """The columns of v that each projection has."""
        return self.ranks

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
        dv, ds = divided_backward(ctx.kind, du, restored(saved, ctx.kept), s)
        assert ds is not None
        # The op takes its last argument for v = u·ρ.
        rho = torch.sqrt(s / ctx.kind.hidden_size + ctx.kind.eps)
        return None, None, None, dv.to(ctx.dtype), ds * rho


def divided_backward(
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


def divided(latent: Latent, dtype: torch.dtype, kept: KeptTokens | None) -> Tensor:
    """u = v/ρ of a latent that has statistics, `[s, b, Σ r_i]` in `dtype`; its share is put into
    `kept`. No collective."""
    return _Divide.apply(latent.kind, kept, dtype, latent.value, latent.statistics)


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


def reduced_latent(y: Tensor, weights: Sequence[Tensor], group: dist.ProcessGroup) -> Tensor:
    """Σ_ranks y·Aᵀ `[s, b, Σ r]` of y `[s, b, k/T]`, in any layout with whole rows, and every
    down-projection A `[r, k/T]`: one all-reduce."""
    a = one_below_the_other(weights)
    u = y.new_empty(*y.shape[:-1], a.shape[0])
    ops.down_projection(y, a, u)
    return communication.all_reduce(u, group, communication.current_phase())


def down_weight_gradients(du: Tensor, y: Tensor, weights: Sequence[Tensor]) -> list[Tensor]:
    """dA = duᵀ·y `[r, k/T]` of each weight of `reduced_latent`, or stand-ins where they are in the
    main gradients."""
    into = main_grads(weights)
    if into is not None and len(weights) == 1:
        ops.down_projection_accumulate(du, y, into[0])
        return stand_ins(weights)
    parts = ops.down_projection_wgrad(du, y).split([a.shape[0] for a in weights])
    if into is None:
        return [part.to(a.dtype) for part, a in zip(parts, weights, strict=True)]
    for grad, part in zip(into, parts, strict=True):
        grad.add_(part)
    return stand_ins(weights)


def one_below_the_other(weights: Sequence[Tensor]) -> Tensor:
    """`[Σ r_i, k]` of A_i `[r_i, k]`, the weight itself if it is one."""
    return weights[0] if len(weights) == 1 else torch.cat(list(weights))
