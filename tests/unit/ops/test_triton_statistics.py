"""Triton: the residual's sum, its statistics and their slots."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from boost_layers.ops import reference
from tests.support.triton_interpreter import (
    BF16,
    DTYPES,
    LAYOUTS,
    Run,
    close,
    expected,
    normal,
    rows_apart,
)

pytestmark = pytest.mark.slow


def mantissas() -> Tensor:
    """Numbers whose squares have all kinds of last 16 bits, which decide how bf16 rounds: those at
    and beside a tie or a bf16 number, and any."""
    generator = torch.Generator().manual_seed(7)
    x = torch.rand(1_000_000, generator=generator) + 1.0
    low = (x * x).view(torch.int32) & 0xFFFF
    at_ties = torch.cat([x[low == each][:9] for each in (0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF)])
    return torch.cat([at_ties, x[:4000]])


@pytest.mark.parametrize(("exponent", "tp_rank"), [(0, 0), (-50, 3), (62, 1)])
def test_slots_hold_every_bit_of_s(run: Run, exponent: int, tp_rank: int) -> None:
    x = (mantissas() * 2.0**exponent)[:: 1 if exponent == 0 else 5].view(-1, 1)
    slots = torch.full((len(x), 12), math.nan, dtype=BF16)
    s = run("rms_stats", x, slots, tp_rank)
    assert s.equal(x * x) and s.isfinite().all()
    own = slots[:, 3 * tp_rank : 3 * tp_rank + 3].float()
    assert ((own[:, 0] + own[:, 1]) + own[:, 2]).equal(s[:, 0])
    assert slots.count_nonzero() == own.count_nonzero()
    parts = torch.empty_like(slots)
    reference.rms_stats(x, parts, tp_rank)
    assert slots.equal(parts)
    assert run("read_statistics", slots).equal(s)


def test_slots_of_what_bf16_cannot_hold(run: Run) -> None:
    x = torch.tensor([[math.inf], [math.nan], [1e30], [1e-30], [0.0]])
    slots = torch.empty(5, 3, dtype=BF16)
    s = run("rms_stats", x, slots)
    assert s.nan_to_num(-1.0).equal((x * x).nan_to_num(-1.0))
    assert run("read_statistics", slots).flatten().isnan().tolist() == [True] * 3 + [False] * 2
    assert run("read_statistics", slots)[3:].equal(s[3:])


def test_slots_in_a_strided_block_and_wide_ones(run: Run) -> None:
    x = normal(7, 20)
    s = run("rms_stats", x)
    for layout in LAYOUTS.values():
        for slots in (torch.zeros(7, 6, dtype=BF16), torch.zeros(7, 1)):
            block = layout(slots)
            assert run("rms_stats", x, block, 1 if slots.shape[1] > 1 else 0).equal(s)
            assert run("read_statistics", block).equal(s)
    framed = rows_apart(torch.zeros(7, 3, dtype=BF16))
    run("rms_stats", x, framed)
    assert (framed._base[:, :2] == 7).all() and (framed._base[:, -3:] == 7).all()


def test_slots_add_up_in_the_order_of_the_ranks(run: Run) -> None:
    s = torch.stack([normal(300) ** 2, normal(300) ** 2 * 1e-6, normal(300) ** 2 * 1e3], dim=1)
    block = torch.zeros(300, 9, dtype=BF16)
    for rank in range(3):
        slots = torch.empty_like(block)
        reference.rms_stats(s[:, rank : rank + 1].sqrt(), slots, rank)
        block += slots
    parts = block.float().view(300, 3, 3).sum(dim=2)
    assert run("read_statistics", block).flatten().equal((parts[:, 0] + parts[:, 1]) + parts[:, 2])


@pytest.mark.parametrize("dtype", DTYPES)
def test_residual_add_rms_stats(run: Run, dtype: torch.dtype) -> None:
    # One is wider than a block.
    shapes = [(1, 1, "rows"), (7, 33, "rows"), (40, 64, "columns"), (2, 8200, "contiguous")]
    for n, k, layout in shapes:
        x, delta = normal(n, k, dtype=dtype), normal(n, k, dtype=dtype, seed=1)
        moved, given = LAYOUTS[layout](x), LAYOUTS[layout](delta)
        s = run("residual_add_rms_stats", moved, given)
        assert moved.equal(x + delta) and given.equal(delta)
        assert s.dtype == reference.wide(dtype)
        close(s, moved.double().square().sum(dim=1, keepdim=True))
        assert run("rms_stats", moved).equal(s)
        if layout == "rows":
            assert (moved._base[:, :2] == 7).all() and (moved._base[:, -3:] == 7).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_residual_gradient(run: Run, dtype: torch.dtype) -> None:
    for (n, k), layout in zip([(1, 1), (7, 33), (3, 3000)], LAYOUTS.values(), strict=True):
        dresidual, x = normal(n, k, dtype=dtype), normal(n, k, dtype=dtype, seed=1)
        args = layout(dresidual), layout(x), normal(n, 1, dtype=reference.wide(dtype))
        dx = run("residual_gradient", *args)
        assert dx.dtype == dtype and dx.is_contiguous()
        close(dx, expected("residual_gradient", *args), of="row")
