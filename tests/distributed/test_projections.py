"""Each projection of every strategy alone, in fp64, against autograd of its dense formula.

The formula is applied to whole tensors on every rank; the projection gets this rank's shards. Its
outputs and the gradients of its inputs and weights must be the shards of the formula's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, distributed

from boost_layers.latent import Latent, LatentKind
from boost_layers.projection.column_up import up
from boost_layers.projection.full_rank import column_linear, row_linear
from boost_layers.projection.row_down import NormSettings, down, norm_down
from boost_layers.projection.vanilla import column_down, row_up
from tests.support.distributed import run_ranks
from tests.support.reduced import u_of

S, B, D, R, OUT = 8, 3, 16, 12, 20
EPS = 1e-5


def shard(whole: Tensor, axis: int | None) -> Tensor:
    size, rank = distributed.get_world_size(), distributed.get_rank()
    return whole if axis is None else whole.chunk(size, dim=axis)[rank].contiguous()


def compare(
    parallel: Callable[..., Sequence[Tensor]],
    dense: Callable[..., Sequence[Tensor]],
    inputs: Sequence[tuple[tuple[int, ...], int | None]],
    output_axes: Sequence[int | None],
    partial: Sequence[int] = (),
) -> None:
    """Compare both functions of `inputs` (whole shape, sharded axis), output by output.

    `partial` names replicated inputs whose gradient another operation has yet to sum over ranks.
    """
    generator = torch.Generator().manual_seed(7)
    wholes = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape, _ in inputs]
    shards = [shard(w, axis).clone() for w, (_, axis) in zip(wholes, inputs, strict=True)]
    for tensor in (*wholes, *shards):
        tensor.requires_grad_()
    expected, got = dense(*wholes), parallel(*shards)
    seeds = [torch.randn(e.shape, generator=generator, dtype=torch.float64) for e in expected]
    torch.autograd.backward(expected, seeds)
    torch.autograd.backward(
        got, [shard(seed, axis) for seed, axis in zip(seeds, output_axes, strict=True)]
    )
    for value, whole, axis in zip(got, expected, output_axes, strict=True):
        torch.testing.assert_close(value, shard(whole, axis), rtol=1e-12, atol=1e-12)
    for number, (local, whole, (_, axis)) in enumerate(zip(shards, wholes, inputs, strict=True)):
        assert local.grad is not None and whole.grad is not None
        gradient = local.grad
        if number in partial:
            distributed.all_reduce(gradient)
        torch.testing.assert_close(gradient, shard(whole.grad, axis), rtol=1e-12, atol=1e-12)


def rms(x: Tensor) -> Tensor:
    return x / torch.sqrt(x.square().mean(dim=-1, keepdim=True) + EPS)


def btp() -> None:
    group = distributed.group.WORLD
    for online in (True, False):
        for groups in ((2,), (1, 1)):

            def norm_and_down(
                x: Tensor, gamma: Tensor, *a: Tensor, groups: Any = groups, online: bool = online
            ) -> list[Tensor]:
                norm = NormSettings(D, EPS, online, group)
                x, reduced = norm_down(x, None, gamma, a, groups, norm)
                return [x, *(u_of(each, x.dtype) for each in reduced)]

            def add_norm_and_down(
                x: Tensor, delta: Tensor, gamma: Tensor, *a: Tensor, groups: Any = groups
            ) -> list[Tensor]:
                norm = NormSettings(D, EPS, online, group)  # noqa: B023
                x, reduced = norm_down(x, delta.clone(), gamma, a, groups, norm)
                return [x, *(u_of(each, x.dtype) for each in reduced)]

            def dense_norm_and_down(
                x: Tensor, gamma: Tensor, *a: Tensor, groups: Any = groups
            ) -> list[Tensor]:
                u = [F.linear(rms(x) * gamma, weight) for weight in a]
                return [x.clone(), *(u if len(groups) > 1 else [torch.cat(u, dim=-1)])]

            shapes = [((S, B, D), 2), ((D,), 0), ((R, D), 1), ((R, D), 1)]
            compare(norm_and_down, dense_norm_and_down, shapes, [2, *[None] * len(groups)])
            compare(
                add_norm_and_down,
                lambda x, delta, *others: dense_norm_and_down(x + delta, *others),  # noqa: B023
                [shapes[0], *shapes],
                [2, *[None] * len(groups)],
            )
    for several in (1, 2):
        compare(
            lambda y, *a: [down(y, a, group)],
            lambda y, *a: [F.linear(y, torch.cat(a))],
            [((S, B, D), 2), *[((R, D), 1)] * several],
            [None],
        )
    for activation, phi in (("silu", F.silu), ("gelu", F.gelu), ("identity", lambda u: u)):
        compare(
            lambda u, *b, act=activation: up(Latent(u, LatentKind((R, R), act)), b, group),
            lambda u, *b, phi=phi: [
                F.linear(phi(part), w) for part, w in zip(u.split(R, -1), b, strict=True)
            ],
            [((S, B, 2 * R), None), ((OUT, R), 0), ((OUT, R), 0)],
            [2, 2],
        )


def vanilla() -> None:
    group = distributed.group.WORLD
    kind = LatentKind((R // group.size(),), "silu")
    for reduce in (True, False):
        compare(
            lambda x, a, reduce=reduce: [column_down(x, [a], group, reduce_gradient=reduce)],
            lambda x, a: [F.linear(x, a)],
            [((S, B, D), None), ((R, D), 0)],
            [2],
            partial=() if reduce else (0,),
        )
    for sliced in (False, True):
        compare(
            lambda u, b, sliced=sliced: row_up(u, [b], kind, group, sliced=sliced),
            lambda u, b: [F.linear(F.silu(u), b)],
            [((S, B, R), 2), ((OUT, R), 1)],
            [2 if sliced else None],
        )
    compare(
        lambda u, x, b: row_up(u, [b], kind, group, residual=x),
        lambda u, x, b: [x + F.linear(F.silu(u), b)],
        [((S, B, R), 2), ((S, B, OUT), None), ((OUT, R), 1)],
        [None],
    )


def full_rank() -> None:
    group = distributed.group.WORLD
    modes = (False, True) if distributed.get_world_size() > 1 else (False,)
    for sequence_parallel in modes:
        stream = 0 if sequence_parallel else None
        compare(
            lambda x, *w, sp=sequence_parallel: column_linear(x, w, group, sequence_parallel=sp),
            lambda x, *w: [F.linear(x, weight) for weight in w],
            [((S, B, D), stream), ((OUT, D), 0), ((R, D), 0)],
            [2, 2],
        )
        compare(
            lambda y, w, x, sp=sequence_parallel: [
                row_linear(y, w, x, group, sequence_parallel=sp)
            ],
            lambda y, w, x: [x + F.linear(y, w)],
            [((S, B, OUT), 2), ((D, OUT), 1), ((S, B, D), stream)],
            [stream],
        )


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_projections_agree_with_their_dense_formulas(tp: int) -> None:
    run_ranks(all_strategies, tp)


def all_strategies() -> None:
    btp()
    vanilla()
    full_rank()
