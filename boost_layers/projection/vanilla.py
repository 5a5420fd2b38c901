"""Vanilla tensor parallelism of low-rank pairs, the baseline: the boundary lies inside each pair.

The residual stream is whole, `[s, b, d]`. A is column-parallel over the rank, B row-parallel, so
each pair ends in an all-reduce of its full-width output. Attention runs on each rank's own heads
(sliced), or on all heads everywhere (replicated, the paper's form).

Legend: n = s·b tokens, k input width, o output width, r rank, T the tensor-parallel size.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from boost_layers import communication, ops
from boost_layers.initialization import shard_of
from boost_layers.latent import Latent, LatentKind, LayerLatents, Reduced, activated
from boost_layers.mappings import (
    as_sequence,
    as_tokens,
    gather_partial_gradient,
    gather_replicated,
    split_replicated,
)
from boost_layers.norm import NormWeight, residual_rms_norm
from boost_layers.parameters import Factors, FactorTensors, ProjectionShape

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from megatron.core.transformer.transformer_config import TransformerConfig

    from boost_layers.config import LowRankConfig


class _ColumnDown(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, reduce_gradient: bool, group: dist.ProcessGroup, *weights: Tensor
    ) -> Tensor:
        folded = _grouped(weights)
        ctx.reduce_gradient, ctx.group = reduce_gradient, group
        ctx.save_for_backward(x, *weights)
        return torch.mm(as_tokens(x), folded.t()).view(*x.shape[:-1], -1)

    @staticmethod
    def backward(ctx: Any, du: Tensor) -> tuple[Any, ...]:
        x, *weights = ctx.saved_tensors
        du = as_tokens(du)
        dx = torch.mm(du, _grouped(weights))
        pending = None
        if ctx.reduce_gradient:
            pending = communication.start_all_reduce(dx, ctx.group, "backward")
        dweight = torch.mm(du.t(), as_tokens(x))
        if pending is not None:
            pending.wait()
        return dx.view(x.shape), None, None, *dweight.split([a.shape[0] for a in weights])


def _grouped(weights: Sequence[Tensor]) -> Tensor:
    """A_i `[r_i, k]`, one below the other."""
    return weights[0] if len(weights) == 1 else torch.cat(list(weights))


def column_down(
    x: Tensor, weights: Sequence[Tensor], group: dist.ProcessGroup, *, reduce_gradient: bool
) -> Tensor:
    """Grouped column-parallel down-projections: x `[s, b, k]`, A_i `[r_i/T, k]` of the global
    `[r_i, k]` → this rank's latents side by side, `[s, b, Σ r_i/T]`.

    Forward: no collective. Input gradient dx = du·A is partial: one all-reduce of `[n, k]` behind
    the weight gradient dA = duᵀ·x if `reduce_gradient`, else x's producer reduces it.
    """
    return _ColumnDown.apply(x, reduce_gradient, group, *weights)


class _RowUp(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        u: Tensor,
        residual: Tensor | None,
        kind: LatentKind,
        sliced: bool,
        group: dist.ProcessGroup,
        *weights: Tensor,
    ) -> tuple[Tensor, ...]:
        z = kind.open(as_tokens(u), None, None, None)
        ctx.kind, ctx.sliced, ctx.group = kind, sliced, group
        ctx.has_residual = residual is not None
        ctx.save_for_backward(u, *weights)
        outputs = []
        for y in ops.up_projection(z, weights):
            communication.all_reduce(y, group, communication.current_phase())
            y = as_sequence(y, u)
            if sliced and group.size() > 1:
                y = shard_of(y, -1, group.rank(), group.size()).contiguous()
            outputs.append(y)
        if residual is not None:
            outputs[0].add_(residual)
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *dys: Tensor) -> tuple[Any, ...]:
        u, *weights = ctx.saved_tensors
        tokens = as_tokens(u)
        grads = [as_tokens(dy) for dy in dys]
        if ctx.sliced and ctx.group.size() > 1:
            grads = _gather_heads(grads, ctx.group)
        dz = ops.up_projection_dgrad(grads, weights)
        z = ctx.kind.open(tokens, None, None, None)
        dweights = ops.up_projection_wgrad(grads, z, ctx.kind.ranks)
        du, *_ = ctx.kind.open_backward(dz, tokens, None, None, None)
        return du.view(u.shape), dys[0] if ctx.has_residual else None, None, None, None, *dweights


def _gather_heads(grads: Sequence[Tensor], group: dist.ProcessGroup) -> list[Tensor]:
    """The whole `[n, o_i]` gradients from each rank's heads `[n, o_i/T]`: one all-gather."""
    widths = [dy.shape[1] for dy in grads]
    gathered = communication.all_gather(torch.cat(list(grads), dim=1), group, "backward")
    return [
        part.movedim(0, 1).reshape(part.shape[1], -1) for part in gathered.split(widths, dim=-1)
    ]


def row_up(
    u: Tensor,
    weights: Sequence[Tensor],
    activation: str,
    group: dist.ProcessGroup,
    *,
    amount: float = 1.0,
    sliced: bool = False,
    residual: Tensor | None = None,
) -> tuple[Tensor, ...]:
    """Row-parallel up-projections: y_i = Σ_ranks φ_a(u_i)·B_iᵀ (+ residual), a = `amount`.

    u `[s, b, Σ r_i/T]`, B_i `[o_i, r_i/T]` of the global `[o_i, r_i]` → y_i `[s, b, o_i]` whole, or
    this rank's heads `[s, b, o_i/T]` if `sliced`.

    Forward: one all-reduce of `[n, o_i]` per projection. Backward: du_i = (dy_i·B_i)∘φ′(u_i) and
    dB_i = dy_iᵀ·φ(u_i) are local; if `sliced`, one all-gather of all dy_i `[n, o_i/T]` first.
    """
    kind = LatentKind(tuple(b.shape[1] for b in weights), activation, amount=amount)
    return _RowUp.apply(u, residual, kind, sliced, group, *weights)


class VanillaProjections(nn.Module):
    """How a layer's projections are laid out and computed under vanilla TP; no parameters."""

    def __init__(
        self, config: TransformerConfig, low_rank: LowRankConfig, tp_group: dist.ProcessGroup
    ):
        super().__init__()
        self.config = config
        self.low_rank = low_rank
        self.tp_group = tp_group

    def weights(self, shape: ProjectionShape) -> Factors:
        """A and B both sharded along the rank."""
        return Factors(self.config, shape, self.tp_group, self.low_rank, a_axis=0, b_axis=1)

    def norm(self) -> NormWeight:
        """γ `[d]`, replicated with equal and complete gradients."""
        return NormWeight(self.config, self.config.hidden_size, self.tp_group, sharded=False)

    def enter(self, x: Tensor, *, convert: bool) -> Tensor:
        """`[s, b, d]`, as it comes."""
        return x

    def leave(self, x: Tensor, delta: Tensor | None, *, convert: bool) -> Tensor:
        """`[s, b, d]`, as it is."""
        return x

    def sublayer(
        self,
        x: Tensor,
        delta: Tensor | None,
        norm: NormWeight,
        inputs: Sequence[Factors],
        between: Callable[..., Tensor],
        output: Factors,
        latents: LayerLatents,
    ) -> tuple[Tensor, None]:
        """x + output(between(inputs(norm(x)))), attention or MLP: `[s, b, d]` → the same, and
        nothing to be added later."""
        x, outputs = self._project_in(x, norm, inputs, latents)
        return self._project_out(between(*outputs), output, x, latents), None

    def _project_in(
        self, x: Tensor, norm: NormWeight, inputs: Sequence[Factors], latents: LayerLatents
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Norm and the projections that read the residual stream: x `[s, b, d]` → x and q, k, v
        (of this rank's heads if attention is sliced) or gate and up `[s, b, f]`. One all-reduce of
        each output forward; backward one of `[n, d]` (one per projection without grouping)."""
        x, normed = residual_rms_norm(x, norm(), self.config.layernorm_epsilon)
        sliced = not self.low_rank.replicated_attention and len(inputs) == 3
        factors = [projection() for projection in inputs]
        runs = [factors] if self.low_rank.grouping else [[each] for each in factors]
        outputs: list[Tensor] = []
        for run in runs:
            u = column_down(normed, [each.A for each in run], self.tp_group, reduce_gradient=True)
            outputs += self._up(u, run, latents, sliced=sliced)
        return x, tuple(outputs)

    def _project_out(
        self, y: Tensor, output: Factors, residual: Tensor, latents: LayerLatents
    ) -> Tensor:
        """The projection that closes a residual: y `[s, b, k]` (or this rank's heads
        `[s, b, k/T]`, gathered first) → `[s, b, d]`. One all-reduce of `[n, d]` forward; backward
        one of `[n, k]`, or a reduce-scatter of it for gathered heads."""
        factors = output()
        gathered = y.shape[-1] != factors.A.shape[1]
        if gathered:
            y = gather_partial_gradient(y, self.tp_group)
        u = column_down(y, [factors.A], self.tp_group, reduce_gradient=not gathered)
        (x,) = self._up(u, [factors], latents, residual=residual)
        return x

    def _up(
        self,
        u: Tensor,
        factors: Sequence[FactorTensors],
        latents: LayerLatents,
        *,
        sliced: bool = False,
        residual: Tensor | None = None,
    ) -> tuple[Tensor, ...]:
        """From this rank's shares of latents `[s, b, Σ r_i/T]` to the outputs.

        LaX's gate and norm need whole latents: one all-gather of the shares forward, and backward
        one of the gradients of z.
        """
        activation = self.low_rank.activation
        if self.low_rank.crossing:
            ranks = [each.rank for each in factors]
            u = whole_latents(u, ranks, self.tp_group)
            u = latent_shares(activated(latents.next(Reduced(u), factors)), ranks, self.tp_group)
            activation = "identity"
        else:
            shares = tuple(each.B.shape[1] for each in factors)
            latents.current.append(Latent(u, LatentKind(shares, activation), sharded=True))
        weights = [each.B for each in factors]
        return row_up(
            u,
            weights,
            activation,
            self.tp_group,
            amount=latents.amount,
            sliced=sliced,
            residual=residual,
        )


def whole_latents(u: Tensor, ranks: Sequence[int], group: dist.ProcessGroup) -> Tensor:
    """Each member's share `[s, b, r_i/T]`, side by side, → the whole members side by side
    `[s, b, Σ r_i]`: one all-gather forward; backward takes this rank's shares, no collective."""
    by_rank = gather_replicated(u, -1, group).unflatten(-1, (group.size(), -1))
    shares = by_rank.split([rank // group.size() for rank in ranks], dim=-1)
    return torch.cat([share.flatten(-2) for share in shares], dim=-1)


def latent_shares(z: Tensor, ranks: Sequence[int], group: dist.ProcessGroup) -> Tensor:
    """The inverse of `whole_latents`: no collective forward; backward one all-gather."""
    shares = [member.unflatten(-1, (group.size(), -1)) for member in z.split(list(ranks), dim=-1)]
    return split_replicated(torch.cat(shares, dim=-1).flatten(-2), -1, group)
