"""Kernel 5: the gated product of the MLP."""

# Triton evaluates annotations: its functions can have those that it knows, and no others.
# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from boost_layers.ops.triton_kernels.activation import activated, with_slope
from boost_layers.ops.triton_kernels.common import (
    launch,
    narrow,
    readable,
    tile,
    tile_of,
    wide,
    widen,
)


def gated_product(gate: Tensor, up: Tensor, kind: str) -> Tensor:
    """As `reference.gated_product`, rounded once."""
    out = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
    if out.numel() > 0:
        _launch(_gated_product_kernel, (gate, up), (out,), kind)
    return out


def gated_product_backward(
    dm: Tensor, gate: Tensor, up: Tensor, kind: str
) -> tuple[Tensor, Tensor]:
    """As `reference.gated_product_backward`, rounded once."""
    dgate, dup = torch.empty((2, *gate.shape), dtype=gate.dtype, device=gate.device).unbind()
    if dgate.numel() > 0:
        _launch(_gated_product_backward_kernel, (dm, gate, up), (dgate, dup), kind)
    return dgate, dup


def _launch(kernel: Any, given: tuple[Tensor, ...], made: tuple[Tensor, ...], kind: str) -> None:
    """Matrices without gaps are one long row: then every width is as fast as any other."""
    if all(t.is_contiguous() for t in given):
        given = tuple(t.view(1, -1) for t in given)
        made = tuple(t.view(1, -1) for t in made)
    else:
        given = tuple(readable(t) for t in given)
    n, width = given[0].shape
    rows, columns, warps = tile(width)
    launch(
        kernel,
        triton.cdiv(n, rows) * triton.cdiv(width, columns),
        given[0],
        *given,
        *made,
        n,
        width,
        *(t.stride(0) for t in given),
        SWIGLU=kind == "swiglu",
        WIDE=wide(given[0].dtype),
        ROWS=rows,
        COLUMNS=columns,
        num_warps=warps,
    )


@triton.jit
def _gated_product_kernel(
    gate,
    up,
    out,
    n,
    width,
    gate_row,
    up_row,
    SWIGLU: tl.constexpr,
    WIDE: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    rows, columns = tile_of(width, ROWS, COLUMNS)
    mask = (rows < n) & (columns < width)
    g = widen(tl.load(gate + rows * gate_row + columns, mask=mask, other=0.0), WIDE)
    u = widen(tl.load(up + rows * up_row + columns, mask=mask, other=0.0), WIDE)
    if SWIGLU:
        g = activated(g, "silu")
    tl.store(out + rows * width + columns, narrow(g * u, out.dtype.element_ty), mask=mask)


@triton.jit
def _gated_product_backward_kernel(
    dm,
    gate,
    up,
    dgate,
    dup,
    n,
    width,
    dm_row,
    gate_row,
    up_row,
    SWIGLU: tl.constexpr,
    WIDE: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    rows, columns = tile_of(width, ROWS, COLUMNS)
    mask = (rows < n) & (columns < width)
    d = widen(tl.load(dm + rows * dm_row + columns, mask=mask, other=0.0), WIDE)
    g = widen(tl.load(gate + rows * gate_row + columns, mask=mask, other=0.0), WIDE)
    u = widen(tl.load(up + rows * up_row + columns, mask=mask, other=0.0), WIDE)
    by_gate = d * u
    if SWIGLU:
        by_gate = with_slope(by_gate, g, "silu")
        g = activated(g, "silu")
    place = rows * width + columns
    tl.store(dgate + place, narrow(by_gate, dgate.dtype.element_ty), mask=mask)
    tl.store(dup + place, narrow(d * g, dup.dtype.element_ty), mask=mask)
