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
from boost_layers.latent import LatentKind, ResidualSource
from boost_layers.mappings import as_tokens


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


def _reduced_latent(
    x: Tensor,
    folded: Tensor,
    s_local: Tensor,
    hidden_size: int,
    eps: float,
    group: dist.ProcessGroup,
) -> tuple[Tensor, Tensor]:
    """u `[n, w]` and ρ `[n, 1]` of the online norm: the GEMM's partial sums and the statistics in
    one message of two contiguous blocks, `[n, w]` and `[n, columns]`; one all-reduce.

    The message is in the dtype of x, but in fp32 for fp16: H is not normalised yet, and it as well
    as the statistics may be beyond fp16's 65504.
    """
    n, width = x.shape[0], folded.shape[0]
    dtype = ops.message_dtype(x.dtype)
    if group.size() == 1:
        h = x.new_empty(n, width, dtype=dtype)
        ops.project_down(x, folded, h)
        return ops.normalise_latent(h, s_local, hidden_size, eps, x.dtype)
    columns = ops.statistics_columns(dtype, group.size())
    message = x.new_empty(n * (width + columns), dtype=dtype)
    h = message[: n * width].view(n, width)
    statistics = message[n * width :].view(n, columns)
    ops.project_down(x, folded, h)
    ops.write_statistics(s_local, statistics, group.rank())
    communication.all_reduce(message, group, communication.current_phase())
    return ops.normalise_latent(h, ops.read_statistics(statistics), hidden_size, eps, x.dtype)


_Source = tuple[LatentKind, KeptTokens | None]
"""What is no tensor of a `ResidualSource`."""


def _saved_input(
    x: Tensor, source: ResidualSource | None
) -> tuple[_Source | None, tuple[Tensor | None, ...]]:
    """What `norm_down` saves of its input: x, or what x can be made of again."""
    if source is None:
        return None, (x,)
    value, kept = to_save(source.latent.value, source.latent.kept)
    _, *norm = source.latent.tensors
    tensors = (source.residual, value, *norm, source.weight)
    return (source.latent.kind, kept), tuple(t if t is None else t.detach() for t in tensors)


def _restored_input(source: _Source | None, saved: Sequence[Tensor]) -> Tensor:
    """x as `[n, d/T]` from what `_saved_input` gave."""
    if source is None:
        return as_tokens(saved[0])
    kind, kept = source
    residual, value, norm_weight, norm_bias, weight = saved
    z = kind.activate(restored(value, kept), norm_weight, norm_bias)
    return torch.addmm(as_tokens(residual), z, weight.t())


class _NormDown(torch.autograd.Function):
    """RMSNorm and the grouped, row-parallel down-projections that follow it."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        gamma: Tensor,
        groups: Sequence[int],
        norm: NormSettings,
        kept: Sequence[KeptTokens],
        source: ResidualSource | None,
        *weights: Tensor,
    ) -> tuple[Tensor, ...]:
        tokens = as_tokens(x)
        s = ops.sum_of_squares(tokens)
        rho = None
        normed = tokens
        if not norm.online:
            s = communication.all_reduce(s, norm.group, communication.current_phase())
            rho = torch.sqrt(s / norm.hidden_size + norm.eps)
            normed = (tokens / rho).to(tokens.dtype)
        latents = []
        for members in split_runs(weights, groups):
            folded = ops.fold_gamma(gamma, members)
            if rho is None:
                u, rho = _reduced_latent(tokens, folded, s, norm.hidden_size, norm.eps, norm.group)
            elif norm.online:
                u = x.new_empty(tokens.shape[0], folded.shape[0], dtype=ops.message_dtype(x.dtype))
                ops.project_down(tokens, folded, u)
                communication.all_reduce(u, norm.group, communication.current_phase())
                u = ops.divide_latent(u, rho, x.dtype)
            else:
                u = torch.mm(normed, folded.t())
                communication.all_reduce(u, norm.group, communication.current_phase())
            latents.append(u)
        ctx.groups, ctx.norm, ctx.shape = groups, norm, x.shape
        ctx.kept = [share.add_consumer() for share in kept]
        if kept:
            for share, u in zip(kept, latents, strict=True):
                share.keep(u)
        ctx.source, made_of = _saved_input(x, source)
        ctx.made_of = len(made_of)
        ctx.save_for_backward(*made_of, gamma, rho, *([] if kept else latents), *weights)
        return x.view_as(x), *(u.view(*x.shape[:-1], -1) for u in latents)

    @staticmethod
    def backward(ctx: Any, dresidual: Tensor, *dlatents: Tensor) -> tuple[Any, ...]:
        tokens = _restored_input(ctx.source, ctx.saved_tensors[: ctx.made_of])
        gamma, rho, *saved = ctx.saved_tensors[ctx.made_of :]
        count = len(ctx.groups)
        latents = [share.whole() for share in ctx.kept] or saved[:count]
        weights = saved if ctx.kept else saved[count:]
        hidden_size = ctx.norm.hidden_size
        scaled = [
            ops.normalise_latent_backward(as_tokens(du), u, rho, hidden_size)
            for du, u in zip(dlatents, latents, strict=True)
        ]
        c = scaled[0][1]
        for _, share in scaled[1:]:
            c = c + share
        dx = torch.addcmul(as_tokens(dresidual).to(c.dtype), tokens, c).to(tokens.dtype)
        dgamma = torch.zeros_like(gamma, dtype=rho.dtype)
        dweights: list[Tensor] = []
        for members, (dh, _) in zip(split_runs(weights, ctx.groups), scaled, strict=True):
            dx.addmm_(dh, ops.fold_gamma(gamma, members))
            m = torch.mm(dh.t(), tokens)
            for a, rows in zip(members, m.split([a.shape[0] for a in members]), strict=True):
                dgamma += torch.sum(rows * a, dim=0, dtype=dgamma.dtype)
                dweights.append(rows.mul_(gamma))
        return dx.view(ctx.shape), dgamma.to(gamma.dtype), None, None, None, None, *dweights


def norm_down(
    x: Tensor,
    gamma: Tensor,
    weights: Sequence[Tensor],
    groups: Sequence[int],
    norm: NormSettings,
    *,
    kept: Sequence[KeptTokens] = (),
    source: ResidualSource | None = None,
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """RMSNorm and grouped down-projections: u = (x·(γ∘A)ᵀ)/ρ, ρ = sqrt(Σx²/d + ε) (online norm).

    Args:
        x: the residual stream, `[s, b, d/T]` of the global `[s, b, d]`.
        gamma: the norm's weight, `[d/T]`.
        weights: A_i, `[r_i, d/T]` of the global `[r_i, d]`.
        groups: how many consecutive weights share a GEMM and an all-reduce.
        norm: with `online` the statistics ride in the first group's all-reduce; otherwise they have
            one of their own (`[n, 1]` in fp32) before the GEMM, and the GEMM's input is x/ρ.
        kept: one for each group: keeps this rank's share of u in place of the whole.
        source: x is not kept but made again from this in backward.

    Returns:
        x itself for the residual branch, and one pre-activation latent `[s, b, w]` per group,
        replicated.

    Forward: one all-reduce per group of `[n, w]` elements, plus the statistics' columns (T = 1:
    none); in the dtype of x, fp32 for fp16. Input gradient: dx = dresidual + c∘x + dH·(γ∘A),
    dH = du/ρ, c = −(du·u)/(ρ²·d), no collective. Weight gradients: M = dHᵀ·x, dA = M∘γ,
    dγ = Σ_r M∘A, no collective. Beside the weights only x, u and ρ are kept.
    """
    x_residual, *latents = _NormDown.apply(
        x, gamma, tuple(groups), norm, tuple(kept), source, *weights
    )
    return x_residual, tuple(latents)


class _Down(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: Tensor, weight: Tensor, group: dist.ProcessGroup) -> Tensor:
        u = torch.mm(as_tokens(y), weight.t())
        communication.all_reduce(u, group, communication.current_phase())
        ctx.save_for_backward(y, weight)
        return u.view(*y.shape[:-1], -1)

    @staticmethod
    def backward(ctx: Any, du: Tensor) -> tuple[Tensor, Tensor, None]:
        y, weight = ctx.saved_tensors
        du = as_tokens(du)
        return torch.mm(du, weight).view(y.shape), torch.mm(du.t(), as_tokens(y)), None


def down(y: Tensor, weight: Tensor, group: dist.ProcessGroup) -> Tensor:
    """A row-parallel down-projection: y `[s, b, k/T]` of the global `[s, b, k]`, A `[r, k/T]` →
    the pre-activation latent `[s, b, r]`, replicated.

    Forward: one all-reduce of `[n, r]`. Input gradient dy = du·A and weight gradient dA = duᵀ·y:
    no collective.
    """
    return _Down.apply(y, weight, group)


def split_runs[Item](items: Sequence[Item], groups: Sequence[int]) -> list[Sequence[Item]]:
    """Consecutive runs of `items` of the given lengths."""
    runs, start = [], 0
    for length in groups:
        runs.append(items[start : start + length])
        start += length
    return runs
