"""Kernel 1: the residual's sum, its statistics and their slots."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from boost_layers import ops
from tests.support.op_cases import (
    assert_close,
    border_is_untouched,
    exact,
    in_wider_rows,
    leaf,
    wide,
)
from tests.support.served import (
    FLOATS,
    LAID_OUT,
    SIZED,
    Served,
    sum_of_squares,
)


def decoded(slots: Tensor) -> Tensor:
    """Each rank's hi + mid + lo `[n, T]`, exactly."""
    return exact(slots).unflatten(1, (-1, 3)).sum(dim=-1)


@FLOATS
@SIZED
def test_rms_stats(served: Served, size: tuple[int, int], dtype: torch.dtype) -> None:
    x = served.normal(*size, dtype=dtype)
    s = ops.rms_stats(x)
    assert s.dtype == wide(dtype)
    assert_close(s, sum_of_squares(x))


def test_tokens_without_elements_have_a_sum_of_zero(served: Served) -> None:
    x = served.normal(4, 0, dtype=torch.bfloat16)
    slots = torch.full((4, 6), math.nan, dtype=torch.bfloat16, device=served.device)
    assert (ops.rms_stats(x, slots, 1) == 0).all()
    assert (slots == 0).all()


@FLOATS
@SIZED
def test_residual_add(served: Served, size: tuple[int, int], dtype: torch.dtype) -> None:
    before = served.normal(*size, dtype=dtype)
    x, delta = before.clone(), served.normal(*size, dtype=dtype, seed=1)
    s = ops.residual_add_rms_stats(x, delta)
    assert torch.equal(x, before + delta)
    assert_close(s, sum_of_squares(x))


@LAID_OUT
@FLOATS
def test_statistics_of_any_layout(
    served: Served, dtype: torch.dtype, layout: Callable[[Tensor], Tensor]
) -> None:
    x, delta = served.normal(5, 33, dtype=dtype), served.normal(5, 33, dtype=dtype, seed=1)
    assert_close(ops.rms_stats(layout(x)), sum_of_squares(x))
    target = in_wider_rows(x)
    s = ops.residual_add_rms_stats(target, layout(delta))
    assert torch.equal(target, x + delta)
    assert border_is_untouched(target)
    assert_close(s, sum_of_squares(target))
    ds = served.normal(5, 1, dtype=wide(dtype), seed=2)
    dx = ops.residual_gradient(layout(delta), layout(x), ds)
    assert_close(dx, exact(delta) + 2 * exact(ds) * exact(x))


@pytest.mark.parametrize("tp_size", [1, 2, 4])
@pytest.mark.parametrize("n", [0, 1, 33])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_slots_of_all_ranks_add_up(
    served: Served, dtype: torch.dtype, n: int, tp_size: int
) -> None:
    """Every rank writes its slots behind its latents; their sum in bf16 holds every S."""
    reduced, sums = torch.zeros(n, 3 * tp_size, dtype=torch.bfloat16, device=served.device), []
    for rank in range(tp_size):
        x, delta = (served.normal(n, 17, dtype=dtype, seed=10 * rank + i) for i in (0, 1))
        slots = in_wider_rows(torch.full_like(reduced, math.nan))
        alone = in_wider_rows(torch.full_like(reduced, math.nan))
        s = ops.residual_add_rms_stats(x, delta, slots, rank)
        assert torch.equal(ops.rms_stats(x, alone, rank), s)
        assert torch.equal(slots, alone), "every column is written"
        assert border_is_untouched(slots) and border_is_untouched(alone)
        reduced += slots
        sums.append(s)
    own = torch.cat(sums, dim=1)
    assert torch.equal(decoded(reduced), exact(own)), "bit for bit"
    total = ops.read_statistics(in_wider_rows(reduced))
    assert total.dtype == torch.float32
    if tp_size == 1:
        assert torch.equal(total, own)
    assert_close(total, exact(own).sum(dim=1, keepdim=True))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16])
def test_a_wide_slot_is_the_sum_itself(served: Served, dtype: torch.dtype) -> None:
    x = served.normal(17, 33, dtype=dtype)
    slot = in_wider_rows(torch.full_like(x[:, :1], math.nan, dtype=wide(dtype)))
    s = ops.rms_stats(x, slot)
    assert torch.equal(slot, s)
    assert border_is_untouched(slot)
    assert torch.equal(ops.read_statistics(slot), s)


def test_slots_hold_sums_of_every_exponent(served: Served) -> None:
    """hi + mid + lo == S bit for bit wherever the last bit of S is a bf16 number, which is down to
    2⁻¹¹⁰; below, to half of bf16's smallest number for each of three slots' last bit. S whose `hi`
    is Inf decodes as NaN."""
    exponents = torch.arange(-75, 64).repeat_interleave(257)
    mantissas = 1 + torch.rand(len(exponents), generator=torch.Generator().manual_seed(0))
    mantissas[::257], mantissas[1::257] = 1.0, 2 - 2.0**-23
    x = torch.ldexp(mantissas, exponents).view(-1, 1).to(served.device)
    slots = torch.empty(len(x), 3, dtype=torch.bfloat16, device=served.device)
    s = ops.rms_stats(x, slots)
    found, whole = decoded(slots), exact(s)
    overflows = whole > 3.396e38
    assert overflows.any() and found[overflows].isnan().all()
    assert ops.read_statistics(slots)[overflows.to(served.device)].isnan().all()
    ordinary = ~overflows & (whole >= 2.0**-110)
    assert ordinary.sum() > 20_000
    assert torch.equal(found[ordinary], whole[ordinary])
    assert torch.equal(ops.read_statistics(slots)[ordinary], s[ordinary])
    tiny = whole < 2.0**-110
    assert tiny.any() and ((found - whole)[tiny].abs() <= 2.0**-134).all()


@FLOATS
@SIZED
def test_residual_gradient(served: Served, size: tuple[int, int], dtype: torch.dtype) -> None:
    n, _ = size
    dresidual, x = served.normal(*size, dtype=dtype), served.normal(*size, dtype=dtype, seed=1)
    ds = served.normal(n, 1, dtype=wide(dtype), seed=2)
    dx = ops.residual_gradient(dresidual, x, ds)
    tokens = leaf(exact(x))
    s = tokens.square().sum(dim=1, keepdim=True)
    (expected,) = torch.autograd.grad([tokens, s], tokens, [exact(dresidual), exact(ds)])
    assert_close(dx, expected)
