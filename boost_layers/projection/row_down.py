"""BTP's row-parallel down-projections: local partial sums, then one all-reduce of the latent.

Legend: n = s·b tokens, k local input width, w = Σ r width of a grouped latent, o local output
width, T the tensor-parallel size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from boost_layers import communication, ops
from boost_layers.kept import KeptTokens, restored, to_save
from boost_layers.latent import (
    LatentKind,
    Reduced,
    ResidualSource,
    down_weight_gradients,
    one_below_the_other,
    reduced_latent,
)
from boost_layers.main_grads import main_grads, stand_ins
from boost_layers.mappings import as_sequence, as_tokens


@dataclass(frozen=True)
class NormSettings:
    """What `norm_down` is told beside its tensors."""

    hidden_size: int
    """d of the whole model."""
    eps: float
    online: bool
    """Whether the statistics ride in the first group's all-reduce."""
    group: dist.ProcessGroup
    """The tensor-parallel group."""


@dataclass(frozen=True)
class _Message:
    """What the online norm's all-reduce carries: the GEMM's partial sums and the statistics, in two
    contiguous blocks. It is in the dtype of x, but in fp32 for fp16: H is not normalised yet, and
    it as well as the statistics may be beyond fp16's 65504."""

    whole: Tensor
    h: Tensor
    """`[n, w]`."""
    slots: Tensor | None
    """`[n, columns]`; None at T = 1."""

    @classmethod
    def empty(cls, x: Tensor, width: int, group: dist.ProcessGroup) -> _Message:
        """A message for the tokens x `[n, k]`."""
        n, dtype = x.shape[0], ops.message_dtype(x.dtype)
        if group.size() == 1:
            h = x.new_empty(n, width, dtype=dtype)
            return cls(h, h, None)
        columns = ops.statistics_columns(dtype, group.size())
        whole = x.new_empty(n * (width + columns), dtype=dtype)
        h, slots = whole.split([n * width, n * columns])
        return cls(whole, h.view(n, width), slots.view(n, columns))


_Source = tuple[LatentKind, KeptTokens | None]
"""What is no tensor of a `ResidualSource`."""


def _saved_input(
    x: Tensor, source: ResidualSource | None
) -> tuple[_Source | None, tuple[Tensor | None, ...]]:
    """What `norm_down` saves of its input: x, or what x can be made of again."""
    if source is None:
        return None, (x,)
    value, kept = to_save(source.latent.value, source.latent.kept)
    _, *others = source.latent.tensors
    tensors = (source.residual, source.weight, value, *others)
    return (source.latent.kind, kept), tuple(t if t is None else t.detach() for t in tensors)


def _restored_input(source: _Source | None, saved: Sequence[Tensor]) -> Tensor:
    """x as `[n, d/T]` from what `_saved_input` gave."""
    if source is None:
        return as_tokens(saved[0])
    kind, kept = source
    residual, weight, value, *others = saved
    (x,) = ops.up_projection(kind.open(restored(value, kept), *others), [weight])
    return x.add_(as_tokens(residual))


class _NormDown(torch.autograd.Function):
    """The residual's sum, RMSNorm, and the grouped, row-parallel down-projections that follow."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        delta: Tensor | None,
        gamma: Tensor,
        groups: Sequence[int],
        norm: NormSettings,
        kept: Sequence[KeptTokens],
        source: ResidualSource | None,
        *weights: Tensor,
    ) -> tuple[Tensor | None, ...]:
        runs = split_runs(weights, groups)
        widths = [sum(a.shape[0] for a in members) for members in runs]
        messages = [_Message.empty(as_tokens(x), widths[0], norm.group)] if norm.online else []
        slots = messages[0].slots if messages else None
        if delta is None:
            s = ops.rms_stats(as_tokens(x), slots, norm.group.rank())
        else:
            # The sum takes delta's place; x is kept for the backward of the norm before.
            s = ops.residual_add_rms_stats(as_tokens(delta), as_tokens(x), slots, norm.group.rank())
            ctx.mark_dirty(delta)
            x = delta
        tokens = as_tokens(x)
        ctx.groups, ctx.norm, ctx.shape, ctx.summed = groups, norm, x.shape, delta is not None
        ctx.source, made_of = _saved_input(x, source)
        ctx.made_of = len(made_of)
        ctx.kept = [share.add_consumer() for share in kept]
        of_norm: list[Tensor] = []
        of_token = None
        if norm.online:
            of_token, latents = _online(tokens, gamma, runs, s, messages[0], norm)
        else:
            rho, latents = _synchronised(tokens, gamma, runs, s, norm)
            of_norm = [rho] if kept else [rho, *latents]
            for share, u in zip(kept, latents, strict=bool(kept)):
                share.keep(u)
        ctx.save_for_backward(*made_of, gamma, *weights, *of_norm)
        residual = x.view_as(x) if delta is None else x
        return residual, of_token, *(as_sequence(latent, x) for latent in latents)

    @staticmethod
    def backward(
        ctx: Any, dresidual: Tensor, ds: Tensor | None, *dlatents: Tensor
    ) -> tuple[Any, ...]:
        tokens = _restored_input(ctx.source, ctx.saved_tensors[: ctx.made_of])
        gamma, *others = ctx.saved_tensors[ctx.made_of :]
        weights, of_norm = others[: sum(ctx.groups)], others[sum(ctx.groups) :]
        grads = [as_tokens(dlatent) for dlatent in dlatents]
        if not ctx.norm.online:
            rho, *saved = of_norm
            latents = [share.whole() for share in ctx.kept] or saved
            grads, ds = _synchronised_backward(grads, latents, rho, ctx.norm.hidden_size)
        assert ds is not None
        dx = ops.residual_gradient(as_tokens(dresidual), tokens, ds)
        dgamma = torch.zeros_like(gamma, dtype=ds.dtype)
        dweights: list[Tensor] = []
        for members, dh in zip(split_runs(weights, ctx.groups), grads, strict=True):
            dh = dh.to(tokens.dtype)
            dx = ops.down_projection_dgrad(dh, ops.fold_gamma(gamma, members), dx)
            m = ops.down_projection_wgrad(dh, tokens)
            into = main_grads(members)
            if into is None:
                of_members, of_gamma = ops.fold_gamma_backward(m, gamma, members)
            else:
                of_gamma = ops.fold_gamma_accumulate(m, gamma, members, into)
                of_members = stand_ins(members)
            dgamma += of_gamma
            dweights += of_members
        dx = dx.view(ctx.shape)
        ddelta = dx if ctx.summed else None
        return dx, ddelta, dgamma.to(gamma.dtype), None, None, None, None, *dweights


def _online(
    tokens: Tensor,
    gamma: Tensor,
    runs: Sequence[Sequence[Tensor]],
    s: Tensor,
    message: _Message,
    norm: NormSettings,
) -> tuple[Tensor, list[Tensor]]:
    """S of the whole tokens `[n, 1]` and H of every group: one all-reduce each, the first of which
    carries the statistics."""
    latents = []
    for i, members in enumerate(runs):
        folded = ops.fold_gamma(gamma, members)
        if i > 0:
            h = tokens.new_empty(tokens.shape[0], folded.shape[0], dtype=message.h.dtype)
            message = _Message(h, h, None)
        ops.down_projection(tokens, folded, message.h)
        communication.all_reduce(message.whole, norm.group, communication.current_phase())
        if message.slots is not None:
            s = ops.read_statistics(message.slots)
        latents.append(message.h)
    return s, latents


def _synchronised(
    tokens: Tensor,
    gamma: Tensor,
    runs: Sequence[Sequence[Tensor]],
    s: Tensor,
    norm: NormSettings,
) -> tuple[Tensor, list[Tensor]]:
    """ρ `[n, 1]` and u of every group: an all-reduce of the statistics, the norm, and one
    all-reduce for each group."""
    s = communication.all_reduce(s, norm.group, communication.current_phase())
    rho = torch.sqrt(s / norm.hidden_size + norm.eps)
    normed = (tokens / rho).to(tokens.dtype)
    latents = []
    for members in runs:
        folded = ops.fold_gamma(gamma, members)
        u = tokens.new_empty(tokens.shape[0], folded.shape[0])
        ops.down_projection(normed, folded, u)
        communication.all_reduce(u, norm.group, communication.current_phase())
        latents.append(u)
    return rho, latents


def _synchronised_backward(
    dlatents: Sequence[Tensor], latents: Sequence[Tensor], rho: Tensor, hidden_size: int
) -> tuple[list[Tensor], Tensor]:
    """dH = du/ρ and dS = −(du·u)/(2·ρ²·d) from u, which is divided by ρ already."""
    dot = torch.zeros_like(rho)
    for du, u in zip(dlatents, latents, strict=True):
        dot += (du.to(rho.dtype) * u.to(rho.dtype)).sum(dim=-1, keepdim=True)
    grads = [(du / rho).to(du.dtype) for du in dlatents]
    return grads, dot.div_(rho.square().mul_(-2 * hidden_size))


def norm_down(
    x: Tensor,
    delta: Tensor | None,
    gamma: Tensor,
    weights: Sequence[Tensor],
    groups: Sequence[int],
    norm: NormSettings,
    *,
    kept: Sequence[KeptTokens] = (),
    source: ResidualSource | None = None,
) -> tuple[Tensor, tuple[Reduced, ...]]:
    """x += Δ, RMSNorm and grouped down-projections: H = x·(γ∘A)ᵀ, to be divided by
    ρ = sqrt(S/d + ε), S = Σx², by whoever takes it (online norm).

    Args:
        x: the residual stream, `[s, b, d/T]` of the global `[s, b, d]`.
        delta: what the sublayer before adds to it, of the same shape; the sum is written into it.
        gamma: the norm's weight, `[d/T]`.
        weights: A_i, `[r_i, d/T]` of the global `[r_i, d]`.
        groups: how many consecutive weights share a GEMM and an all-reduce.
        norm: with `online` the statistics ride in the first group's all-reduce; otherwise they have
            one of their own (`[n, 1]` in fp32) before the GEMM, whose input is x/ρ, and latents
            come out divided.
        kept: without `online`, one for each group: keeps this rank's share of u in place of the
            whole.
        source: x is not kept but made again from this in backward.

    Returns:
        x for the residual branch, and for each group its latents `[s, b, w]`, replicated.

    Forward: one all-reduce per group of `[n, w]` elements, plus the statistics' columns (T = 1:
    none); in the dtype of x, fp32 for fp16. Input gradient: dx = dresidual + 2·dS∘x + dH·(γ∘A), no
    collective (dS and dH come from the latents' consumers). Weight gradients: M = dHᵀ·x, dA = M∘γ,
    dγ = Σ_r M∘A, no collective. Beside the weights only x is kept (and ρ and u without `online`).
    """
    x, s, *latents = _NormDown.apply(
        x, delta, gamma, tuple(groups), norm, tuple(kept), source, *weights
    )
    return x, tuple(Reduced(latent, s, norm.hidden_size, norm.eps) for latent in latents)


class _Down(torch.autograd.Function):
    """The row-parallel down-projection of what attention or MLP gives."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, group: dist.ProcessGroup, *weights: Tensor) -> Tensor:
        ctx.save_for_backward(y, *weights)
        return reduced_latent(y, weights, group)

    @staticmethod
    def backward(ctx: Any, du: Tensor) -> tuple[Tensor | None, ...]:
        y, *weights = ctx.saved_tensors
        dy = ops.down_projection_dgrad(as_tokens(du), one_below_the_other(weights))
        return as_sequence(dy, y), None, *down_weight_gradients(du, y, weights)


def down(y: Tensor, weights: Sequence[Tensor], group: dist.ProcessGroup) -> Tensor:
    """A row-parallel down-projection: y `[s, b, k/T]` of the global `[s, b, k]`, A `[r, k/T]`, or
    several that share y → the pre-activation latent `[s, b, Σ r]`, replicated.

    Forward: one all-reduce of `[n, Σ r]`. Input gradient dy = du·A and weight gradient dA = duᵀ·y:
    no collective.
    """
    return _Down.apply(y, group, *weights)


def split_runs[Item](items: Sequence[Item], groups: Sequence[int]) -> list[Sequence[Item]]:
    """Consecutive runs of `items` of the given lengths."""
    runs, start = [], 0
    for length in groups:
        runs.append(items[start : start + length])
        start += length
    return runs
