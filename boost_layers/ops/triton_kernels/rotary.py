"""Kernel 5: rotary embedding, and the layout of heads between projections and attention."""

# Triton evaluates annotations: its functions can have those that it knows, and no others.
# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl
from torch import Tensor

from boost_layers.ops.triton_kernels.common import launch, narrow, tile, wide, widen

if TYPE_CHECKING:
    from collections.abc import Sequence


def rotary_(tensors: Sequence[Tensor], cos: Tensor, sin: Tensor, *, interleaved: bool) -> None:
    """As `reference.rotary_`."""
    for t in tensors:
        _rotate(t, t, cos, sin, interleaved, transposed=False)


def rotary_backward(
    grads: Sequence[Tensor], rotated: int, cos: Tensor, sin: Tensor, *, interleaved: bool
) -> list[Tensor]:
    """As `reference.rotary_backward`."""
    sizes = [t.numel() for t in grads]
    parts = grads[0].new_empty(sum(sizes)).split(sizes)
    found = [part.view(t.shape) for part, t in zip(parts, grads, strict=True)]
    for i, (t, out) in enumerate(zip(grads, found, strict=True)):
        if i < rotated:
            _rotate(t, out, cos, sin, interleaved, transposed=True)
        else:
            out.copy_(t)
    return found


def _rotate(
    t: Tensor, out: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, *, transposed: bool
) -> None:
    if t.numel() == 0:
        return
    s, b, heads, e = t.shape
    width = cos.shape[-1]
    rest = 0 if out is t else e - width
    pairs = triton.next_power_of_2(max(1, width // 2))
    rows, _, warps = tile(pairs)
    rows = min(rows, triton.next_power_of_2(heads))
    launch(
        _rotary_kernel,
        s * b * triton.cdiv(heads, rows),
        t,
        t,
        out,
        cos.contiguous(),
        sin.contiguous(),
        b,
        heads,
        *t.stride(),
        *out.stride(),
        WIDTH=width,
        REST=rest,
        REST_BLOCK=triton.next_power_of_2(max(1, rest)),
        PAIRS=pairs,
        HEADS=rows,
        INTERLEAVED=interleaved,
        TRANSPOSED=transposed,
        WIDE=wide(t.dtype),
        num_warps=warps,
    )


@triton.jit
def _rotary_kernel(
    t,
    out,
    cos,
    sin,
    b,
    heads,
    t_s,
    t_b,
    t_h,
    t_e,
    out_s,
    out_b,
    out_h,
    out_e,
    WIDTH: tl.constexpr,
    REST: tl.constexpr,
    REST_BLOCK: tl.constexpr,
    PAIRS: tl.constexpr,
    HEADS: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    TRANSPOSED: tl.constexpr,
    WIDE: tl.constexpr,
):
    tiles = tl.cdiv(heads, HEADS)
    token = tl.program_id(0) // tiles
    head = ((tl.program_id(0) % tiles) * HEADS + tl.arange(0, HEADS)).to(tl.int64)[:, None]
    position = (token // b).to(tl.int64)
    sequence = (token % b).to(tl.int64)
    source = t + position * t_s + sequence * t_b + head * t_h
    target = out + position * out_s + sequence * out_b + head * out_h

    pair = tl.arange(0, PAIRS)
    if INTERLEAVED:
        first = 2 * pair
        second = first + 1
    else:
        first = pair
        second = pair + WIDTH // 2
    exists = pair < WIDTH // 2
    mask = (head < heads) & exists[None, :]
    cos += position * WIDTH
    sin += position * WIDTH
    cos1 = widen(tl.load(cos + first, mask=exists, other=0.0), WIDE)[None, :]
    cos2 = widen(tl.load(cos + second, mask=exists, other=0.0), WIDE)[None, :]
    sin1 = widen(tl.load(sin + first, mask=exists, other=0.0), WIDE)[None, :]
    sin2 = widen(tl.load(sin + second, mask=exists, other=0.0), WIDE)[None, :]
    if TRANSPOSED:
        sine = sin1
        sin1 = -sin2
        sin2 = -sine
    first = first[None, :]
    second = second[None, :]
    x1 = widen(tl.load(source + first * t_e, mask=mask, other=0.0), WIDE)
    x2 = widen(tl.load(source + second * t_e, mask=mask, other=0.0), WIDE)
    turned1 = narrow(x1 * cos1 - x2 * sin1, out.dtype.element_ty)
    turned2 = narrow(x2 * cos2 + x1 * sin2, out.dtype.element_ty)
    tl.store(target + first * out_e, turned1, mask=mask)
    tl.store(target + second * out_e, turned2, mask=mask)
    if REST > 0:
        beyond = tl.arange(0, REST_BLOCK)[None, :]
        mask = (head < heads) & (beyond < REST)
        moved = tl.load(source + (WIDTH + beyond) * t_e, mask=mask)
        tl.store(target + (WIDTH + beyond) * out_e, moved, mask=mask)
