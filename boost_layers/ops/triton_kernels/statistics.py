"""Kernel 1: the residual's sum, Σx² per token, and the statistics' slots of a message."""

# Triton evaluates annotations: its functions can have those that it knows, and no others.
# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from boost_layers.ops import reference
from boost_layers.ops.triton_kernels.common import (
    launch,
    narrow,
    nearest_bf16,
    readable,
    row_stride,
    tile,
    tile_of,
    widen,
)

_MOST_COLUMNS = 8192
_ROWS_OF_STATISTICS = 256


def rms_stats(x: Tensor, slots: Tensor | None = None, tp_rank: int = 0) -> Tensor:
    """As `reference.rms_stats`."""
    return _rms_stats(x, None, slots, tp_rank)


def residual_add_rms_stats(
    x: Tensor, delta: Tensor, slots: Tensor | None = None, tp_rank: int = 0
) -> Tensor:
    """As `reference.residual_add_rms_stats`: one pass over x and Δ."""
    return _rms_stats(x, readable(delta), slots, tp_rank)


def _rms_stats(x: Tensor, delta: Tensor | None, slots: Tensor | None, tp_rank: int) -> Tensor:
    n, k = x.shape
    s = x.new_empty(n, 1, dtype=reference.wide(x.dtype))
    if n == 0:
        return s
    rows, columns, warps = tile(k, _MOST_COLUMNS)
    launch(
        _rms_stats_kernel,
        triton.cdiv(n, rows),
        x,
        x,
        delta,
        s,
        slots,
        n,
        k,
        *x.stride(),
        row_stride(delta),
        *((0, 0) if slots is None else slots.stride()),
        3 * tp_rank,
        SLOT_COLUMNS=0 if slots is None else slots.shape[1],
        SLOT_BLOCK=1 if slots is None else triton.next_power_of_2(slots.shape[1]),
        SPLIT=slots is not None and slots.dtype == torch.bfloat16,
        ROWS=rows,
        COLUMNS=columns,
        num_warps=warps,
    )
    return s


@triton.jit
def _rms_stats_kernel(
    x,
    delta,
    sums,
    slots,
    n,
    k,
    x_row,
    x_column,
    delta_row,
    slots_row,
    slots_column,
    first_slot,
    SLOT_COLUMNS: tl.constexpr,
    SLOT_BLOCK: tl.constexpr,
    SPLIT: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    WIDE = sums.dtype.element_ty
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    inside = rows < n
    squares = tl.zeros([ROWS, COLUMNS], WIDE)
    for start in range(0, k, COLUMNS):
        columns = start + tl.arange(0, COLUMNS).to(tl.int64)
        mask = inside[:, None] & (columns < k)[None, :]
        place = x + rows[:, None] * x_row + columns[None, :] * x_column
        value = widen(tl.load(place, mask=mask, other=0.0), WIDE)
        if delta is not None:
            added = tl.load(
                delta + rows[:, None] * delta_row + columns[None, :], mask=mask, other=0.0
            )
            # S is that of what is stored.
            moved = narrow(value + widen(added, WIDE), x.dtype.element_ty)
            tl.store(place, moved, mask=mask)
            value = widen(moved, WIDE)
        squares += value * value
    s = tl.sum(squares, axis=1)
    tl.store(sums + rows, s, mask=inside)
    if SLOT_COLUMNS > 0:
        slot = tl.arange(0, SLOT_BLOCK)[None, :]
        values = tl.broadcast_to(s[:, None], [ROWS, SLOT_BLOCK])
        if SPLIT:
            # Each part is the bf16 rounding of what is left; the subtractions are exact.
            s = s.to(tl.float32)
            hi = nearest_bf16(s)
            mid = nearest_bf16(s - hi)
            lo = nearest_bf16((s - hi) - mid)
            values = tl.where(slot == first_slot, hi[:, None], 0.0)
            values = tl.where(slot == first_slot + 1, mid[:, None], values)
            values = tl.where(slot == first_slot + 2, lo[:, None], values)
        place = slots + rows[:, None] * slots_row + slot * slots_column
        mask = inside[:, None] & (slot < SLOT_COLUMNS)
        tl.store(place, narrow(values, slots.dtype.element_ty), mask=mask)


def read_statistics(block: Tensor) -> Tensor:
    """As `reference.read_statistics`."""
    if block.dtype != torch.bfloat16:
        return block.clone()
    n, columns = block.shape
    s = block.new_empty(n, 1, dtype=torch.float32)
    if n > 0:
        block = readable(block)
        launch(
            _read_statistics_kernel,
            triton.cdiv(n, _ROWS_OF_STATISTICS),
            s,
            block,
            s,
            n,
            block.stride(0),
            COLUMNS=columns,
            ROWS=_ROWS_OF_STATISTICS,
        )
    return s


@triton.jit
def _read_statistics_kernel(block, sums, n, block_row, COLUMNS: tl.constexpr, ROWS: tl.constexpr):
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    s = whole_sum(block, rows, rows < n, block_row, COLUMNS, tl.float32)
    tl.store(sums + rows, s, mask=rows < n)


@triton.jit
def whole_sum(
    block,
    rows,
    inside,
    block_row,
    COLUMNS: tl.constexpr,
    WIDE: tl.constexpr,
):
    """S of each of `rows` from its statistics `[n, COLUMNS]`: S itself, or slots, which are added
    up in the order of the ranks."""
    place = block + rows * block_row
    if block.dtype.element_ty == tl.bfloat16:
        s = tl.zeros_like(rows).to(tl.float32)
        for column in tl.static_range(0, COLUMNS, 3):
            hi = widen(tl.load(place + column, mask=inside, other=0.0), tl.float32)
            mid = widen(tl.load(place + column + 1, mask=inside, other=0.0), tl.float32)
            lo = widen(tl.load(place + column + 2, mask=inside, other=0.0), tl.float32)
            s += (hi + mid) + lo
        return s.to(WIDE)
    else:
        return tl.load(place, mask=inside, other=0.0).to(WIDE)


def residual_gradient(dresidual: Tensor, x: Tensor, ds: Tensor) -> Tensor:
    """As `reference.residual_gradient`."""
    n, k = x.shape
    dx = x.new_empty(n, k)
    if dx.numel() > 0:
        dresidual, x = readable(dresidual), readable(x)
        rows, columns, warps = tile(k)
        launch(
            _residual_gradient_kernel,
            triton.cdiv(n, rows) * triton.cdiv(k, columns),
            x,
            dresidual,
            x,
            ds,
            dx,
            n,
            k,
            dresidual.stride(0),
            x.stride(0),
            ds.stride(0),
            ROWS=rows,
            COLUMNS=columns,
            num_warps=warps,
        )
    return dx


@triton.jit
def _residual_gradient_kernel(
    dresidual,
    x,
    ds,
    dx,
    n,
    k,
    dresidual_row,
    x_row,
    ds_row,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    WIDE = ds.dtype.element_ty
    rows, columns = tile_of(k, ROWS, COLUMNS)
    mask = (rows < n) & (columns < k)
    slope = 2.0 * tl.load(ds + rows * ds_row, mask=rows < n, other=0.0)
    value = widen(tl.load(x + rows * x_row + columns, mask=mask, other=0.0), WIDE)
    grad = widen(tl.load(dresidual + rows * dresidual_row + columns, mask=mask, other=0.0), WIDE)
    tl.store(dx + rows * k + columns, narrow(grad + value * slope, dx.dtype.element_ty), mask=mask)
