"""Backward all-reduces run behind the weight gradients, and nobody reads them too early.

One process plays a group of two equal ranks: the all-reduce leaves NaN in the tensor until `wait`
writes the sum, which is what "must not be read before wait" allows it to do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from boost_layers import communication
from boost_layers.latent import Latent, LatentKind
from boost_layers.projection import column_up, full_rank, row_down, vanilla
from tests.support.single_layer import ONE_RANK

TWO_RANKS: Any = SimpleNamespace(size=lambda: 2, rank=lambda: 0)


WEIGHT_GRADIENTS = ("boost::up_projection_wgrad", "boost::down_projection_wgrad")
"""GEMMs of csrc, whose insides are not seen."""


class FakeNetwork:
    """Stands in for `torch.distributed` with two equal ranks; `events` are in order of time."""

    def __init__(self) -> None:
        self.events: list[str] = []

    def all_reduce(self, x: Tensor, group: Any, async_op: bool = False) -> Any:
        summed = 2 * x
        if not async_op:
            self.events.append("all-reduce")
            x.copy_(summed)
            return None
        self.events.append("start")
        x.fill_(torch.nan)

        def wait() -> None:
            self.events.append("wait")
            x.copy_(summed)

        return SimpleNamespace(wait=wait)


class Gemms(TorchDispatchMode):
    """Notes every matrix product among the network's events, by the shape of its result."""

    def __init__(self, network: FakeNetwork) -> None:
        super().__init__()
        self.network = network

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func._schema.name
        if name in ("aten::mm", "aten::addmm", "aten::addmm_", "aten::bmm", *WEIGHT_GRADIENTS):
            results = result if isinstance(result, list) else [result]
            self.network.events += [f"gemm {tuple(each.shape)}" for each in results]
        return result


@contextmanager
def fake_network() -> Iterator[FakeNetwork]:
    network = FakeNetwork()
    with mock.patch.object(communication.dist, "all_reduce", network.all_reduce):
        yield network


def normal(*shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_()


S, B, IN, R, OUT = 3, 2, 5, 4, 6


def up(group: Any, latent: Tensor, weights: list[Tensor]) -> tuple[Tensor, ...]:
    return column_up.up(Latent(latent, LatentKind((R, R), "silu")), weights, group)


def column_down(group: Any, x: Tensor, weights: list[Tensor]) -> tuple[Tensor, ...]:
    return (vanilla.column_down(x, weights, group, reduce_gradient=True),)


def column_linear(group: Any, x: Tensor, weights: list[Tensor]) -> tuple[Tensor, ...]:
    return full_rank.column_linear(x, weights, group, sequence_parallel=False)


# The function, its input, its weights and the results of the GEMMs that are to hide the all-reduce.
CASES: dict[str, tuple[Callable[..., Any], tuple[int, ...], list[tuple[int, int]], list[str]]] = {
    "btp up": (up, (S, B, 2 * R), [(OUT, R), (OUT, R)], ["gemm (6, 4)", "gemm (6, 4)"]),
    "btp up, unequal": (up, (S, B, 2 * R), [(OUT, R), (2, R)], ["gemm (6, 4)", "gemm (2, 4)"]),
    "vanilla down": (column_down, (S, B, IN), [(R, IN), (R, IN)], ["gemm (8, 5)"]),
    "dense": (column_linear, (S, B, IN), [(OUT, IN), (2, IN)], ["gemm (6, 5)", "gemm (2, 5)"]),
}


@pytest.mark.parametrize("name", CASES)
def test_the_all_reduce_runs_behind_the_weight_gradients(name: str) -> None:
    function, shape, weight_shapes, behind = CASES[name]
    x, weights = normal(*shape), [normal(*w) for w in weight_shapes]
    with fake_network() as network:
        ys = function(TWO_RANKS, x, weights)
        network.events.clear()
        with Gemms(network):
            torch.autograd.backward(ys, [torch.ones_like(y) for y in ys])
    start, wait = network.events.index("start"), network.events.index("wait")
    assert network.events[start + 1 : wait] == behind
    assert network.events.count("start") == network.events.count("wait") == 1
    assert "all-reduce" not in network.events


@pytest.mark.parametrize("name", CASES)
def test_the_gradient_is_the_awaited_sum(name: str) -> None:
    """With two equal ranks, twice the gradient of one; a missing `wait` would leave NaN."""
    function, shape, weight_shapes, _ = CASES[name]
    gradients = []
    for group in (ONE_RANK, TWO_RANKS):
        x, weights = normal(*shape), [normal(*w) for w in weight_shapes]
        with fake_network():
            ys = function(group, x, weights)
            torch.autograd.backward(ys, [torch.ones_like(y) for y in ys])
        gradients.append([x.grad, *(w.grad for w in weights)])
    (alone, *weights_alone), (summed, *weights_summed) = gradients
    torch.testing.assert_close(summed, 2 * alone, rtol=1e-13, atol=0)
    for one, two in zip(weights_alone, weights_summed, strict=True):
        assert torch.equal(one, two)


def test_the_latents_gradient_through_down_and_up() -> None:
    """o's pair, whose second half adds the residual: the residual's gradient is not summed."""
    y, residual = normal(S, B, IN), normal(S, B, OUT)
    a, b = normal(R, IN), normal(OUT, R)
    with fake_network() as network:
        u = row_down.down(y, [a], TWO_RANKS)
        (delta,) = column_up.up(Latent(u, LatentKind((R,), "silu")), [b], TWO_RANKS)
        x = delta.add_(residual)
        x.sum().backward()
    assert network.events == ["all-reduce", "start", "wait"]

    y2, residual2 = y.detach().clone().requires_grad_(), residual.detach().clone().requires_grad_()
    u2 = 2 * torch.nn.functional.linear(y2, a.detach())
    x2 = residual2 + torch.nn.functional.linear(torch.nn.functional.silu(u2), b.detach())
    torch.testing.assert_close(x, x2)
    x2.sum().backward()
    # The sum over two ranks in forward doubles u; its own gradient in backward doubles dz.
    torch.testing.assert_close(y.grad, y2.grad)
    assert torch.equal(residual.grad, torch.ones_like(residual))


def test_a_group_of_one_waits_for_nothing() -> None:
    with fake_network() as network:
        x = torch.ones(3)
        pending = communication.start_all_reduce(x, ONE_RANK, "backward")
        assert pending.wait() is x
    assert network.events == []
    assert torch.equal(x, torch.ones(3))


def test_pending_waits_once() -> None:
    with fake_network() as network:
        x = torch.ones(3)
        pending = communication.start_all_reduce(x, TWO_RANKS, "backward")
        assert x.isnan().all()
        assert torch.equal(pending.wait(), torch.full((3,), 2.0))
    assert network.events == ["start", "wait"]
