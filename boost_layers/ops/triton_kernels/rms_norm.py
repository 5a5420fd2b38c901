"""RMSNorm of whole tokens, for the borders and the full-rank baseline: a token is one block."""

# Triton evaluates annotations: its functions can have those that it knows, and no others.
# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from boost_layers.ops import reference
from boost_layers.ops.triton_kernels.common import (
    PARTS,
    launch,
    narrow,
    ratio,
    readable,
    reciprocal,
    root,
    row_stride,
    tile,
    widen,
)

_MOST_COLUMNS = 2**20
"""Elements of a block, in Triton."""


def rms_norm(x: Tensor, gamma: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """As `reference.rms_norm`: one pass."""
    n, d = x.shape
    y = x.new_empty(n, d)
    rho = x.new_empty(n, 1, dtype=reference.wide(x.dtype))
    if y.numel() > 0:
        x = readable(x)
        rows, columns, warps = tile(d, _MOST_COLUMNS)
        launch(
            _rms_norm_kernel,
            triton.cdiv(n, rows),
            x,
            x,
            gamma.contiguous(),
            y,
            rho,
            n,
            d,
            x.stride(0),
            EPS=float(eps),
            ROWS=rows,
            COLUMNS=columns,
            num_warps=warps,
        )
    return y, rho


@triton.jit
def _rms_norm_kernel(
    x,
    gamma,
    y,
    rho,
    n,
    d,
    x_row,
    EPS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    WIDE = rho.dtype.element_ty
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, COLUMNS)
    exists = columns < d
    mask = (rows < n)[:, None] & exists[None, :]
    value = widen(tl.load(x + rows[:, None] * x_row + columns[None, :], mask=mask, other=0.0), WIDE)
    weight = widen(tl.load(gamma + columns, mask=exists, other=0.0), WIDE)
    s = tl.sum(value * value, axis=1)
    size = root(tl.where(rows < n, ratio(s, d.to(WIDE)) + EPS, 1.0))
    tl.store(rho + rows, size, mask=rows < n)
    result = value * reciprocal(size)[:, None] * weight[None, :]
    place = y + rows[:, None] * d + columns[None, :]
    tl.store(place, narrow(result, y.dtype.element_ty), mask=mask)


def rms_norm_backward(
    dy: Tensor, x: Tensor, gamma: Tensor, rho: Tensor, dresidual: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """As `reference.rms_norm_backward`: one pass. dγ is a sum over `PARTS` parts of the tokens,
    which are added up afterwards, always in the same order."""
    n, d = x.shape
    dx = x.new_empty(n, d)
    rows, columns, warps = tile(d, _MOST_COLUMNS)
    programs = min(triton.cdiv(n, rows), PARTS)
    dgamma = rho.new_empty(programs, d)
    if dx.numel() > 0:
        dy, x = readable(dy), readable(x)
        dresidual = None if dresidual is None else readable(dresidual)
        launch(
            _rms_norm_backward_kernel,
            programs,
            x,
            dy,
            x,
            gamma.contiguous(),
            rho.contiguous(),
            dresidual,
            dx,
            dgamma,
            n,
            d,
            *(row_stride(t) for t in (dy, x, dresidual)),
            ROWS=rows,
            COLUMNS=columns,
            num_warps=warps,
        )
    return dx, dgamma.sum(dim=0).to(gamma.dtype)


@triton.jit
def _rms_norm_backward_kernel(
    dy,
    x,
    gamma,
    rho,
    dresidual,
    dx,
    dgamma,
    n,
    d,
    dy_row,
    x_row,
    dresidual_row,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    WIDE = rho.dtype.element_ty
    columns = tl.arange(0, COLUMNS)
    exists = columns < d
    weight = widen(tl.load(gamma + columns, mask=exists, other=0.0), WIDE)[None, :]
    by_gamma = tl.zeros([COLUMNS], WIDE)
    part = tl.program_id(0)
    for tokens in range(part, tl.cdiv(n, ROWS), tl.num_programs(0)):
        rows = tl.cast(tokens, tl.int64) * ROWS + tl.arange(0, ROWS)
        row = rows[:, None]
        column = columns[None, :]
        mask = (row < n) & exists[None, :]
        inverse = reciprocal(tl.load(rho + row, mask=row < n, other=1.0))
        grad = widen(tl.load(dy + row * dy_row + column, mask=mask, other=0.0), WIDE)
        value = widen(tl.load(x + row * x_row + column, mask=mask, other=0.0), WIDE)
        normed = value * inverse
        t = grad * normed
        by_gamma += tl.sum(t, axis=0)
        along = tl.sum(t * weight, axis=1, keep_dims=True) / d.to(WIDE)
        result = (grad * weight - normed * along) * inverse
        if dresidual is not None:
            place = dresidual + row * dresidual_row + column
            result += widen(tl.load(place, mask=mask, other=0.0), WIDE)
        tl.store(dx + row * d + column, narrow(result, dx.dtype.element_ty), mask=mask)
    tl.store(dgamma + part.to(tl.int64) * d + columns, by_gamma, mask=exists)
