"""Bottleneck-aware tensor parallelism: the boundary lies at the latent.

The residual stream is `[s, b, d/T]`, sharded along hidden. A down-projection is row-parallel and
ends in one all-reduce of the r-wide latent; an up-projection is column-parallel and starts from it.

Legend: n = s·b tokens, k local input width, w = Σ r width of a grouped latent, o local output
width, T the tensor-parallel size.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from boost_layers import communication, ops
from boost_layers.mappings import sequence_to_hidden
from boost_layers.norm import NormWeight
from boost_layers.parameters import Factors, ProjectionShape

if TYPE_CHECKING:
    from collections.abc import Sequence

    from megatron.core.transformer.transformer_config import TransformerConfig

    from boost_layers.config import LowRankConfig


def _tokens(x: Tensor) -> Tensor:
    """`[s, b, k]` → `[n, k]`, a view where x is contiguous."""
    return x.reshape(-1, x.shape[-1])


def _reduced_latent(
    x: Tensor,
    folded: Tensor,
    s_local: Tensor,
    hidden_size: int,
    eps: float,
    group: dist.ProcessGroup,
) -> tuple[Tensor, Tensor]:
    """u `[n, w]` and ρ `[n, 1]` of the online norm: the GEMM's partial sums and the statistics in
    one message of two contiguous blocks, `[n, w]` and `[n, columns]`; one all-reduce."""
    n, width = x.shape[0], folded.shape[0]
    if group.size() == 1:
        return ops.normalise_latent(torch.mm(x, folded.t()), s_local, hidden_size, eps)
    columns = ops.statistics_columns(x.dtype, group.size())
    message = x.new_empty(n * (width + columns))
    h = message[: n * width].view(n, width)
    statistics = message[n * width :].view(n, columns)
    torch.mm(x, folded.t(), out=h)
    ops.write_statistics(s_local, statistics, group.rank())
    communication.all_reduce(message, group, communication.current_phase())
    return ops.normalise_latent(h, ops.read_statistics(statistics), hidden_size, eps)


class _NormDown(torch.autograd.Function):
    """RMSNorm and the grouped, row-parallel down-projections that follow it."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        gamma: Tensor,
        groups: Sequence[int],
        hidden_size: int,
        eps: float,
        online: bool,
        group: dist.ProcessGroup,
        *weights: Tensor,
    ) -> tuple[Tensor, ...]:
        tokens = _tokens(x)
        s = ops.sum_of_squares(tokens)
        rho = None
        normed = tokens
        if not online:
            s = communication.all_reduce(s, group, communication.current_phase())
            rho = torch.sqrt(s / hidden_size + eps)
            normed = (tokens / rho).to(tokens.dtype)
        latents = []
        for members in _split(weights, groups):
            folded = ops.fold_gamma(gamma, members)
            if rho is None:
                u, rho = _reduced_latent(tokens, folded, s, hidden_size, eps, group)
            else:
                u = torch.mm(normed, folded.t())
                communication.all_reduce(u, group, communication.current_phase())
                if online:
                    u = u.div_(rho) if u.dtype == rho.dtype else u.copy_(u / rho)
            latents.append(u)
        ctx.groups, ctx.hidden_size = groups, hidden_size
        ctx.save_for_backward(x, gamma, rho, *latents, *weights)
        return x.view_as(x), *(u.view(*x.shape[:-1], -1) for u in latents)

    @staticmethod
    def backward(ctx: Any, dresidual: Tensor, *dlatents: Tensor) -> tuple[Any, ...]:
        x, gamma, rho, *saved = ctx.saved_tensors
        latents, weights = saved[: len(ctx.groups)], saved[len(ctx.groups) :]
        tokens = _tokens(x)
        scaled = [
            ops.normalise_latent_backward(_tokens(du), u, rho, ctx.hidden_size)
            for du, u in zip(dlatents, latents, strict=True)
        ]
        c = scaled[0][1]
        for _, share in scaled[1:]:
            c = c + share
        dx = torch.addcmul(_tokens(dresidual).to(c.dtype), tokens, c).to(x.dtype)
        dgamma = torch.zeros_like(gamma, dtype=rho.dtype)
        dweights: list[Tensor] = []
        for members, (dh, _) in zip(_split(weights, ctx.groups), scaled, strict=True):
            dx.addmm_(dh, ops.fold_gamma(gamma, members))
            m = torch.mm(dh.t(), tokens)
            for a, rows in zip(members, m.split([a.shape[0] for a in members]), strict=True):
                dgamma += torch.sum(rows * a, dim=0, dtype=dgamma.dtype)
                dweights.append(rows.mul_(gamma))
        return dx.view(x.shape), dgamma.to(gamma.dtype), None, None, None, None, None, *dweights


def norm_down(
    x: Tensor,
    gamma: Tensor,
    weights: Sequence[Tensor],
    groups: Sequence[int],
    hidden_size: int,
    eps: float,
    group: dist.ProcessGroup,
    *,
    online: bool = True,
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """RMSNorm and grouped down-projections: u = (x·(γ∘A)ᵀ)/ρ, ρ = sqrt(Σx²/d + ε) (online norm).

    Args:
        x: the residual stream, `[s, b, d/T]` of the global `[s, b, d]`.
        gamma: the norm's weight, `[d/T]`.
        weights: A_i, `[r_i, d/T]` of the global `[r_i, d]`.
        groups: how many consecutive weights share a GEMM and an all-reduce.
        hidden_size: d.
        eps: ε of the norm.
        group: the tensor-parallel group.
        online: the statistics ride in the first group's all-reduce; otherwise they have one of
            their own (`[n, 1]` in fp32) before the GEMM, and the GEMM's input is x/ρ.

    Returns:
        x itself for the residual branch, and one pre-activation latent `[s, b, w]` per group,
        replicated.

    Forward: one all-reduce per group of `[n, w]` elements, plus the statistics' columns (T = 1:
    none). Input gradient: dx = dresidual + c∘x + dH·(γ∘A), dH = du/ρ, c = −(du·u)/(ρ²·d), no
    collective. Weight gradients: M = dHᵀ·x, dA = M∘γ, dγ = Σ_r M∘A, no collective.
    """
    x_residual, *latents = _NormDown.apply(
        x, gamma, tuple(groups), hidden_size, eps, online, group, *weights
    )
    return x_residual, tuple(latents)


class _Down(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: Tensor, weight: Tensor, group: dist.ProcessGroup) -> Tensor:
        u = torch.mm(_tokens(y), weight.t())
        communication.all_reduce(u, group, communication.current_phase())
        ctx.save_for_backward(y, weight)
        return u.view(*y.shape[:-1], -1)

    @staticmethod
    def backward(ctx: Any, du: Tensor) -> tuple[Tensor, Tensor, None]:
        y, weight = ctx.saved_tensors
        du = _tokens(du)
        return torch.mm(du, weight).view(y.shape), torch.mm(du.t(), _tokens(y)), None


def down(y: Tensor, weight: Tensor, group: dist.ProcessGroup) -> Tensor:
    """A row-parallel down-projection: y `[s, b, k/T]` of the global `[s, b, k]`, A `[r, k/T]` →
    the pre-activation latent `[s, b, r]`, replicated.

    Forward: one all-reduce of `[n, r]`. Input gradient dy = du·A and weight gradient dA = duᵀ·y:
    no collective.
    """
    return _Down.apply(y, weight, group)


class _Up(torch.autograd.Function):
    """Latent → φ → column-parallel up-projections, with a residual added in the GEMM if given."""

    @staticmethod
    def forward(
        ctx: Any,
        u: Tensor,
        residual: Tensor | None,
        activation: str,
        batched: bool,
        group: dist.ProcessGroup,
        *weights: Tensor,
    ) -> tuple[Tensor, ...]:
        z = ops.apply_activation(_tokens(u), activation)
        if residual is None:
            ys = ops.project_up(z, weights, batched=batched)
        else:
            ys = (torch.addmm(_tokens(residual), z, weights[0].t()),)
        ctx.activation, ctx.group, ctx.has_residual = activation, group, residual is not None
        ctx.save_for_backward(u, *weights)
        return tuple(y.view(*u.shape[:-1], -1) for y in ys)

    @staticmethod
    def backward(ctx: Any, *dys: Tensor) -> tuple[Any, ...]:
        u, *weights = ctx.saved_tensors
        tokens = _tokens(u)
        grads = [_tokens(dy) for dy in dys]
        widths = [b.shape[1] for b in weights]
        dz = torch.empty_like(tokens)
        for part, dy, b in zip(dz.split(widths, dim=1), grads, weights, strict=True):
            torch.mm(dy, b, out=part)
        pending = communication.start_all_reduce(dz, ctx.group, "backward")
        z = ops.apply_activation(tokens, ctx.activation)
        dweights = [
            torch.mm(dy.t(), part) for part, dy in zip(z.split(widths, dim=1), grads, strict=True)
        ]
        du = ops.apply_activation_backward(pending.wait(), tokens, ctx.activation)
        dresidual = dys[0] if ctx.has_residual else None
        return du.view(u.shape), dresidual, None, None, None, *dweights


def up(
    u: Tensor,
    weights: Sequence[Tensor],
    activation: str,
    group: dist.ProcessGroup,
    *,
    batched: bool = True,
    residual: Tensor | None = None,
) -> tuple[Tensor, ...]:
    """Column-parallel up-projections of a reduced latent: y_i = φ(u_i)·B_iᵀ (+ residual).

    Args:
        u: the pre-activation latents side by side, `[s, b, Σ r_i]`, replicated; its only consumer
            must be this function.
        weights: B_i, `[o_i/T, r_i]` of the global `[o_i, r_i]`.
        activation: φ: "silu", "gelu" or "identity".
        group: the tensor-parallel group.
        batched: weights of equal shape as one batched GEMM.
        residual: `[s, b, o/T]`, added in the GEMM; with a single weight only.

    Returns:
        y_i, `[s, b, o_i/T]` each.

    Forward: no collective. Input gradient: dz = Σ dy_i·B_i is partial on each rank, one all-reduce
    of `[n, Σ r_i]`, started before and waited for after the weight gradients dB_i = dy_iᵀ·φ(u_i);
    then du = dz∘φ′(u). Only u is kept; φ(u) is computed again.
    """
    assert residual is None or len(weights) == 1
    return _Up.apply(u, residual, activation, batched, group, *weights)


def _split(weights: Sequence[Tensor], groups: Sequence[int]) -> list[Sequence[Tensor]]:
    """Consecutive runs of `weights` of the given lengths."""
    runs, start = [], 0
    for length in groups:
        runs.append(weights[start : start + length])
        start += length
    return runs


class BtpProjections(nn.Module):
    """How a layer's projections are laid out and computed under BTP; holds no parameters."""

    hidden_sharded = True
    attention_sharded = True

    def __init__(
        self, config: TransformerConfig, low_rank: LowRankConfig, tp_group: dist.ProcessGroup
    ):
        super().__init__()
        self.config = config
        self.low_rank = low_rank
        self.tp_group = tp_group

    def weights(self, shape: ProjectionShape) -> Factors:
        """A sharded on its input, B on its output axis."""
        seed = self.low_rank.seed
        return Factors(self.config, shape, self.tp_group, seed, a_axis=1, b_axis=0)

    def norm(self) -> NormWeight:
        """γ `[d/T]`."""
        return NormWeight(self.config, self.config.hidden_size, self.tp_group, sharded=True)

    def enter(self, x: Tensor, *, first: bool) -> Tensor:
        """`[s/T, b, d]` → `[s, b, d/T]`: one all-to-all in the model's first layer, elsewhere a
        view, since that is what the tensor already holds."""
        if first:
            return sequence_to_hidden(x, self.tp_group)
        tp_size = self.tp_group.size()
        return x.view(x.shape[0] * tp_size, x.shape[1], x.shape[2] // tp_size)

    def leave(self, x: Tensor) -> Tensor:
        """`[s, b, d/T]` viewed as `[s/T, b, d]`, the shape Megatron passes between layers and
        pipeline stages."""
        tp_size = self.tp_group.size()
        return x.view(x.shape[0] // tp_size, x.shape[1], x.shape[2] * tp_size)

    def project_in(
        self, x: Tensor, norm: NormWeight, projections: Sequence[Factors]
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Norm and the projections that read the residual stream: x `[s, b, d/T]` → x and one
        `[s, b, o/T]` per projection. One all-reduce forward and one backward (one each per
        projection without grouping)."""
        grouped = self.low_rank.grouping
        groups = [len(projections)] if grouped else [1] * len(projections)
        a_weights, b_weights = zip(*(projection() for projection in projections), strict=True)
        x, latents = norm_down(
            x,
            norm(),
            a_weights,
            groups,
            self.config.hidden_size,
            self.config.layernorm_epsilon,
            self.tp_group,
            online=self.low_rank.norm == "online",
        )
        outputs: list[Tensor] = []
        for latent, members in zip(latents, _split(b_weights, groups), strict=True):
            outputs += up(latent, members, self.low_rank.activation, self.tp_group, batched=grouped)
        return x, tuple(outputs)

    def project_out(self, y: Tensor, projection: Factors, residual: Tensor) -> Tensor:
        """The projection that closes a residual: y `[s, b, k/T]`, residual `[s, b, d/T]` →
        `[s, b, d/T]`. One all-reduce forward and one backward."""
        a, b = projection()
        u = down(y, a, self.tp_group)
        (x,) = up(u, [b], self.low_rank.activation, self.tp_group, residual=residual)
        return x
