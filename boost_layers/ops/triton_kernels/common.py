"""What the kernels share: conversions, arithmetic that is rounded correctly, the tile of a
program, and the launch."""

# Triton evaluates annotations: its functions can have those that it knows, and no others.
# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)
"""TRITON_INTERPRET=1: the kernels run in numpy, which the tests do on the CPU."""

PARTS = 256
"""Programs that share the tokens where gradients of parameters are summed over them. Not the number
of multiprocessors, so that the order of the sums is the same on every GPU."""

_ELEMENTS = 2048
_ELEMENTS_PER_WARP = 512


@triton.jit
def widen(x, WIDE: tl.constexpr):
    """x in fp32 or fp64."""
    if INTERPRETED and x.dtype == tl.bfloat16:
        # The interpreter's own conversion is wrong for denormals.
        bits = x.to(tl.uint16, bitcast=True).to(tl.uint32) << 16
        return bits.to(tl.float32, bitcast=True).to(WIDE)
    else:
        return x.to(WIDE)


@triton.jit
def narrow(x, DTYPE: tl.constexpr):
    """x rounded to nearest even."""
    if INTERPRETED and DTYPE == tl.bfloat16:
        # The interpreter's own conversion truncates.
        bits = nearest_bf16(x.to(tl.float32)).to(tl.uint32, bitcast=True)
        return (bits >> 16).to(tl.uint16).to(tl.bfloat16, bitcast=True)
    else:
        return x.to(DTYPE)


@triton.jit
def nearest_bf16(x):
    """The bf16 number nearest to x (even at a tie), in fp32 as x is: in whole numbers, so that no
    compiler can take it for a round trip that it may leave out."""
    bits = x.to(tl.uint32, bitcast=True)
    # A NaN's mantissa must not be carried into the sign.
    bits = tl.where(x != x, 0x7FC00000, bits).to(tl.uint32)
    bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def root(x):
    """√x, rounded correctly as the next two are: Triton's fp32 `sqrt`, `rsqrt` and `/` are not."""
    if x.dtype == tl.float64:
        return tl.sqrt(x)
    else:
        return tl.sqrt_rn(x)


@triton.jit
def reciprocal(x):
    """1/x."""
    if x.dtype == tl.float64:
        return 1.0 / x
    else:
        return tl.div_rn(1.0, x)


@triton.jit
def ratio(x, y):
    """x/y, y in the dtype of x or a constant."""
    if x.dtype == tl.float64:
        return x / y
    else:
        return tl.div_rn(x, y)


@triton.jit
def tile_of(width, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Rows `[ROWS, 1]` and columns `[1, COLUMNS]` of this program, tile after tile along a row."""
    tiles = tl.cdiv(width, COLUMNS)
    program = tl.program_id(0)
    rows = (program // tiles).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    columns = (program % tiles).to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)
    return rows[:, None], columns[None, :]


def tile(width: int, most_columns: int = _ELEMENTS) -> tuple[int, int, int]:
    """Rows and columns of a program's tile of a matrix `[n, width]`, and its warps: 16 elements
    for each thread, and few rows where a row is wide."""
    columns = min(triton.next_power_of_2(max(1, width)), most_columns)
    rows = min(max(1, _ELEMENTS // columns), 128)
    return rows, columns, min(max(1, rows * columns // _ELEMENTS_PER_WARP), 16)


def launch(kernel: Any, programs: int, like: Tensor, *args: Any, **constants: Any) -> None:
    """Run `programs` programs of a kernel on the device of `like`, in its current stream."""
    with torch.cuda.device_of(like):
        kernel[(programs,)](*args, **constants)


def wide(dtype: torch.dtype) -> Any:
    """The dtype of arithmetic, as Triton calls it."""
    return tl.float64 if dtype == torch.float64 else tl.float32


def readable(t: Tensor) -> Tensor:
    """The same numbers with those of a row next to each other."""
    return t if t.stride(-1) == 1 or t.shape[-1] <= 1 else t.contiguous()


def row_stride(t: Tensor | None) -> int:
    """From one row to the next, for a tensor that may be missing."""
    return 0 if t is None else t.stride(0)
