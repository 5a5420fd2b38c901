"""Changes of layout: of the residual stream at the borders of the stack of layers, and between
tensors that every rank holds whole and the share of one rank.

`[s/T, b, d]` is sharded along the sequence (Megatron's sequence parallelism), `[s, b, d/T]` along
hidden (between BTP layers). Both hold the same number of elements on a rank.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from boost_layers import communication
from boost_layers.initialization import shard_of


def as_tokens(x: Tensor) -> Tensor:
    """`[s, b, k]` → `[n, k]` with n = s·b; a view where x is contiguous."""
    return x.reshape(-1, x.shape[-1])


def as_sequence(y: Tensor, like: Tensor) -> Tensor:
    """`[n, k]` → `[s, b, k]` with s and b of `like`. The result shares y's memory without being a
    view to autograd, so that a Function may give it out and the next may write into it."""
    shaped: Tensor = torch.ops.aten._unsafe_view(y, [*like.shape[:-1], y.shape[-1]])
    return shaped


def _sequence_to_hidden(x: Tensor, group: dist.ProcessGroup, phase: communication.Phase) -> Tensor:
    tp_size = group.size()
    s_local, b, d = x.shape
    by_rank = x.view(s_local, b, tp_size, d // tp_size).permute(2, 0, 1, 3)
    received = communication.all_to_all(by_rank, group, phase)
    return received.reshape(tp_size * s_local, b, d // tp_size)


def _hidden_to_sequence(x: Tensor, group: dist.ProcessGroup, phase: communication.Phase) -> Tensor:
    tp_size = group.size()
    s, b, d_local = x.shape
    received = communication.all_to_all(x.view(tp_size, s // tp_size, b, d_local), group, phase)
    return received.permute(1, 2, 0, 3).reshape(s // tp_size, b, tp_size * d_local)


class _SequenceToHidden(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return _sequence_to_hidden(x.contiguous(), group, communication.current_phase())

    @staticmethod
    def backward(ctx: Any, dx: Tensor) -> tuple[Tensor, None]:
        return _hidden_to_sequence(dx.contiguous(), ctx.group, "backward"), None


class _HiddenToSequence(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return _hidden_to_sequence(x.contiguous(), group, communication.current_phase())

    @staticmethod
    def backward(ctx: Any, dx: Tensor) -> tuple[Tensor, None]:
        return _sequence_to_hidden(dx.contiguous(), ctx.group, "backward"), None


def sequence_to_hidden(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """`[s/T, b, d]` → `[s, b, d/T]`: one all-to-all of the tensor forward, one backward."""
    return x if group.size() == 1 else _SequenceToHidden.apply(x, group)


def hidden_to_sequence(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """`[s, b, d/T]` → `[s/T, b, d]`: one all-to-all of the tensor forward, one backward."""
    return x if group.size() == 1 else _HiddenToSequence.apply(x, group)


class _ReduceScatterHidden(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        by_rank = x.unflatten(-1, (group.size(), -1)).movedim(-2, 0)
        phase = communication.current_phase()
        return communication.reduce_scatter(by_rank, group, phase, "border")

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        return gather_along(dy, -1, ctx.group, "backward", "border"), None


def reduce_scatter_hidden(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Partial sums `[s, b, d]` on every rank → `[s, b, d/T]` of their sum: one reduce-scatter of x
    forward; backward one all-gather of the gradient's share."""
    return x if group.size() == 1 else _ReduceScatterHidden.apply(x, group)


class _GatherLastDim(torch.autograd.Function):
    """`[…, k/T]` → `[…, k]` with a gradient that is partial on each rank."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return gather_last_dim(x, group, communication.current_phase())

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        tp_size = ctx.group.size()
        by_rank = dy.view(*dy.shape[:-1], tp_size, -1).movedim(-2, 0)
        return communication.reduce_scatter(by_rank, ctx.group, "backward"), None


def gather_last_dim(x: Tensor, group: dist.ProcessGroup, phase: communication.Phase) -> Tensor:
    """`[…, k/T]` of every rank → `[…, k]`, without autograd: one all-gather."""
    gathered = communication.all_gather(x, group, phase)
    return gathered.movedim(0, -2).reshape(*x.shape[:-1], -1)


def gather_partial_gradient(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """`[…, k/T]` → `[…, k]`: one all-gather of `x` forward, one reduce-scatter of the gradient
    backward, whose consumers hold partial gradients."""
    return x if group.size() == 1 else _GatherLastDim.apply(x, group)


class _Gather(torch.autograd.Function):
    """A rank's share of a tensor → the whole, with a gradient that is whole everywhere."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, dim: int, group: dist.ProcessGroup, scope: communication.Scope
    ) -> Tensor:
        ctx.dim, ctx.group = dim, group
        return gather_along(x, dim, group, communication.current_phase(), scope)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None, None]:
        group = ctx.group
        return shard_of(dy, ctx.dim, group.rank(), group.size()).contiguous(), None, None, None


class _Split(torch.autograd.Function):
    """A tensor that is whole everywhere → this rank's share."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, dim: int, group: dist.ProcessGroup, scope: communication.Scope
    ) -> Tensor:
        ctx.dim, ctx.group, ctx.scope = dim, group, scope
        return shard_of(x, dim, group.rank(), group.size()).contiguous()

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None, None]:
        return gather_along(dy, ctx.dim, ctx.group, "backward", ctx.scope), None, None, None


def gather_along(
    x: Tensor,
    dim: int,
    group: dist.ProcessGroup,
    phase: communication.Phase,
    scope: communication.Scope = "layer",
) -> Tensor:
    """Every rank's `x` put together along `dim`, without autograd: one all-gather of `x`."""
    gathered = communication.all_gather(x, group, phase, scope)
    return torch.cat(gathered.unbind(0), dim=dim) if group.size() > 1 else gathered[0]


def gather_replicated(
    x: Tensor, dim: int, group: dist.ProcessGroup, scope: communication.Scope = "layer"
) -> Tensor:
    """A rank's `1/T` along `dim` → the whole tensor on every rank, whose gradient is whole and
    equal on every rank too: one all-gather of `x` forward; backward takes this rank's share, no
    collective. (A reduce-scatter would multiply the gradient by T.)"""
    return x if group.size() == 1 else _Gather.apply(x, dim, group, scope)


def split_replicated(
    x: Tensor, dim: int, group: dist.ProcessGroup, scope: communication.Scope = "layer"
) -> Tensor:
    """A tensor that every rank holds whole → this rank's `1/T` of it along `dim`: no collective
    forward; backward one all-gather of the share's gradient."""
    return x if group.size() == 1 else _Split.apply(x, dim, group, scope)
