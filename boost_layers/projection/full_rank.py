"""Full-rank (Megatron-style) tensor parallelism of unfactorised projections, the other baseline.

q, k, v and gate, up are column-parallel and share one collective each way; o and down are
row-parallel. Without sequence parallelism the residual stream is whole, `[s, b, d]`, and the
collectives are all-reduces; with it, `[s/T, b, d]`, all-gathers and reduce-scatters.

Legend: n = s·b tokens, d hidden, o local output width, T the tensor-parallel size.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from boost_layers import communication
from boost_layers.mappings import as_sequence, as_tokens
from boost_layers.norm import NormWeight, residual_rms_norm
from boost_layers.parameters import FullRankWeight, ProjectionShape

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from megatron.core.transformer.transformer_config import TransformerConfig

    from boost_layers.config import LowRankConfig
    from boost_layers.layer_latents import LayerLatents


def _gather_sequence(x: Tensor, group: dist.ProcessGroup, phase: communication.Phase) -> Tensor:
    """`[s/T, b, k]` → `[s, b, k]`: one all-gather."""
    return communication.all_gather(x, group, phase).flatten(0, 1)


def _scatter_sequence(x: Tensor, group: dist.ProcessGroup, phase: communication.Phase) -> Tensor:
    """Partial `[s, b, k]` → summed `[s/T, b, k]`: one reduce-scatter."""
    by_rank = x.view(group.size(), -1, *x.shape[1:])
    return communication.reduce_scatter(by_rank, group, phase)


class _ColumnLinear(torch.autograd.Function):
    """Column-parallel projections of one input."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, sequence_parallel: bool, group: dist.ProcessGroup, *weights: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.sequence_parallel, ctx.group = sequence_parallel, group
        ctx.save_for_backward(x, *weights)
        if sequence_parallel:
            x = _gather_sequence(x, group, communication.current_phase())
        tokens = as_tokens(x)
        return tuple(as_sequence(torch.mm(tokens, w.t()), x) for w in weights)

    @staticmethod
    def backward(ctx: Any, *dys: Tensor) -> tuple[Any, ...]:
        x, *weights = ctx.saved_tensors
        grads = [as_tokens(dy) for dy in dys]
        dx = torch.mm(grads[0], weights[0])
        for dy, w in zip(grads[1:], weights[1:], strict=True):
            dx.addmm_(dy, w)
        if ctx.sequence_parallel:
            whole_x = _gather_sequence(x, ctx.group, "backward")
            dx = _scatter_sequence(dx.view(whole_x.shape), ctx.group, "backward")
            pending = None
        else:
            whole_x = x
            pending = communication.start_all_reduce(dx, ctx.group, "backward")
        tokens = as_tokens(whole_x)
        dweights = [torch.mm(dy.t(), tokens) for dy in grads]
        if pending is not None:
            pending.wait()
        return dx.view(x.shape), None, None, *dweights


def column_linear(
    x: Tensor, weights: Sequence[Tensor], group: dist.ProcessGroup, *, sequence_parallel: bool
) -> tuple[Tensor, ...]:
    """Column-parallel projections of one input: y_i = x·W_iᵀ, W_i `[o_i/T, d]` of the global
    `[o_i, d]`; x `[s, b, d]` (or `[s/T, b, d]`) → `[s, b, o_i/T]`.

    Forward: no collective (one all-gather of x). Input gradient dx = Σ dy_i·W_i: one all-reduce of
    `[n, d]` behind the weight gradients dW_i = dy_iᵀ·x (one all-gather of x and one reduce-scatter
    of dx).
    """
    return _ColumnLinear.apply(x, sequence_parallel, group, *weights)


class _RowLinear(torch.autograd.Function):
    """A row-parallel projection and the residual's sum."""

    @staticmethod
    def forward(
        ctx: Any,
        y: Tensor,
        weight: Tensor,
        residual: Tensor,
        sequence_parallel: bool,
        group: dist.ProcessGroup,
    ) -> Tensor:
        ctx.sequence_parallel, ctx.group = sequence_parallel, group
        ctx.save_for_backward(y, weight)
        tokens = as_tokens(y)
        if group.size() == 1:
            flat = as_tokens(residual)
            return torch.addmm(flat, tokens, weight.t()).view(residual.shape)
        x = torch.mm(tokens, weight.t()).view(*y.shape[:-1], -1)
        if sequence_parallel:
            x = _scatter_sequence(x, group, communication.current_phase())
        else:
            communication.all_reduce(x, group, communication.current_phase())
        return x.add_(residual)

    @staticmethod
    def backward(ctx: Any, dx: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:
        y, weight = ctx.saved_tensors
        dout = _gather_sequence(dx, ctx.group, "backward") if ctx.sequence_parallel else dx
        dout = as_tokens(dout)
        dy = torch.mm(dout, weight).view(y.shape)
        dweight = torch.mm(dout.t(), as_tokens(y))
        return dy, dweight, dx, None, None


def row_linear(
    y: Tensor,
    weight: Tensor,
    residual: Tensor,
    group: dist.ProcessGroup,
    *,
    sequence_parallel: bool,
) -> Tensor:
    """A row-parallel projection and its residual: x = residual + Σ_ranks y·Wᵀ; y `[s, b, k/T]`, W
    `[d, k/T]` of the global `[d, k]` → `[s, b, d]` (or `[s/T, b, d]`).

    Forward: one all-reduce of `[n, d]` (one reduce-scatter). Input gradient dy = dx·W and weight
    gradient dW = dxᵀ·y: no collective (one all-gather of dx).
    """
    return _RowLinear.apply(y, weight, residual, sequence_parallel, group)


class FullRankProjections(nn.Module):
    """How a full-rank layer's projections are laid out and computed; holds no parameters."""

    def __init__(
        self, config: TransformerConfig, low_rank: LowRankConfig, tp_group: dist.ProcessGroup
    ):
        super().__init__()
        self.config = config
        self.seed = low_rank.seed
        self.tp_group = tp_group
        self.sequence_parallel = config.sequence_parallel and tp_group.size() > 1

    def weights(self, shape: ProjectionShape) -> FullRankWeight:
        """Column-parallel where the residual stream is read, row-parallel where it is closed."""
        axis = 1 if shape.closes_residual else 0
        return FullRankWeight(self.config, shape, self.tp_group, self.seed, axis=axis)

    def norm(self) -> NormWeight:
        """γ `[d]`; its gradient is partial under sequence parallelism, and flagged so."""
        return NormWeight(
            self.config,
            self.config.hidden_size,
            self.tp_group,
            sharded=False,
            sequence_parallel=self.sequence_parallel,
        )

    def enter(self, x: Tensor, *, convert: bool) -> Tensor:
        """`[s, b, d]` or `[s/T, b, d]`, as it comes."""
        return x

    def leave(self, x: Tensor, delta: Tensor | None, *, convert: bool) -> Tensor:
        """`[s, b, d]` or `[s/T, b, d]`, as it is."""
        return x

    def sublayer(
        self,
        x: Tensor,
        delta: Tensor | None,
        norm: NormWeight,
        inputs: Sequence[FullRankWeight],
        between: Callable[..., Tensor],
        output: FullRankWeight,
        latents: LayerLatents,
    ) -> tuple[Tensor, None]:
        """x + output(between(inputs(norm(x)))), attention or MLP, in the layout of x, and nothing
        to be added later. `between` takes one `[s, b, o/T]` per input and gives `[s, b, k/T]`;
        there are no latents."""
        x, normed = residual_rms_norm(x, norm(), self.config.layernorm_epsilon)
        outputs = column_linear(
            normed,
            [projection() for projection in inputs],
            self.tp_group,
            sequence_parallel=self.sequence_parallel,
        )
        x = row_linear(
            between(*outputs),
            output(),
            x,
            self.tp_group,
            sequence_parallel=self.sequence_parallel,
        )
        return x, None
