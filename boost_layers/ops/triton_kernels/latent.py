"""Kernel 2: from reduced latents to the input of the up-projections, and back.

All members of a token are one tile `[MEMBERS, RANK]`, both rounded up to powers of two, so that a
member's norm and the dot product over all of them need one pass over the token.
"""

# Triton evaluates annotations: its functions can have those that it knows, and no others.
# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

from itertools import accumulate
from math import gcd
from typing import TYPE_CHECKING, Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from boost_layers.ops import reference
from boost_layers.ops.triton_kernels.activation import activated, with_slope
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
from boost_layers.ops.triton_kernels.statistics import whole_sum

if TYPE_CHECKING:
    from collections.abc import Sequence

_MOST_ELEMENTS = 2**20
"""Of a tile, in Triton."""


def latent_epilogue(
    h: Tensor,
    ranks: Sequence[int],
    activation: str,
    *,
    statistics: Tensor | None = None,
    hidden_size: int = 1,
    eps: float = 0.0,
    gated: Tensor | None = None,
    norm: str = "none",
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor | None]:
    """As `reference.latent_epilogue`: one read and one write."""
    n, width = h.shape
    dtype = dtype or h.dtype
    z = h.new_empty(n * width, dtype=dtype)
    v = None if gated is None else h.new_empty(n, width, dtype=dtype)
    if z.numel() > 0:
        h, statistics, gated = readable(h), _readable(statistics), _readable(gated)
        members = _members(ranks)
        launch(
            _latent_epilogue_kernel,
            triton.cdiv(n, members["ROWS"]),
            h,
            h,
            statistics,
            gated,
            _contiguous(weight),
            _contiguous(bias),
            z,
            v,
            n,
            width,
            *(row_stride(t) for t in (h, statistics, gated)),
            **members,
            **_settings(activation, norm, statistics, hidden_size, eps, h),
        )
    return z, v


def latent_epilogue_backward(
    dz: Tensor,
    ranks: Sequence[int],
    activation: str,
    *,
    h: Tensor | None = None,
    v: Tensor | None = None,
    dv: Tensor | None = None,
    statistics: Tensor | None = None,
    hidden_size: int = 1,
    eps: float = 0.0,
    norm: str = "none",
    weight: Tensor | None = None,
    bias: Tensor | None = None,
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
    """As `reference.latent_epilogue_backward`: one pass. dγ and dβ are sums over `PARTS` parts of
    the tokens, which are added up afterwards, always in the same order."""
    value = h if v is None else v
    assert value is not None
    n, width = value.shape
    wide = reference.wide(dz.dtype)
    dh = value.new_empty(n, width, dtype=dz.dtype if h is None else h.dtype)
    dv_whole = None if v is None else dz.new_empty(n, width)
    ds = None if statistics is None else dz.new_empty(n, 1, dtype=wide)
    members = _members(ranks)
    programs = triton.cdiv(n, members["ROWS"])
    if norm != "none":
        programs = min(programs, PARTS)
    dweight = None if weight is None else dz.new_empty(programs, width, dtype=wide)
    dbias = None if bias is None else dz.new_empty(programs, width, dtype=wide)
    if dh.numel() > 0:
        h, v, dv, statistics = (_readable(t) for t in (h, v, dv, statistics))
        launch(
            _latent_epilogue_backward_kernel,
            programs,
            dz,
            dz.contiguous(),
            h,
            v,
            dv,
            statistics,
            _contiguous(weight),
            _contiguous(bias),
            dh,
            dv_whole,
            ds,
            dweight,
            dbias,
            n,
            width,
            *(row_stride(t) for t in (h, v, dv, statistics)),
            **members,
            **_settings(activation, norm, statistics, hidden_size, eps, dz),
        )
    return (
        dh,
        dv_whole,
        ds,
        None if dweight is None else dweight.sum(dim=0).to(dz.dtype),
        None if dbias is None else dbias.sum(dim=0).to(dz.dtype),
    )


def _readable(t: Tensor | None) -> Tensor | None:
    return None if t is None else readable(t)


def _contiguous(t: Tensor | None) -> Tensor | None:
    return None if t is None else t.contiguous()


def _members(ranks: Sequence[int]) -> dict[str, Any]:
    """The constants of a kernel that say how its tile is made."""
    members = triton.next_power_of_2(len(ranks))
    rank = triton.next_power_of_2(max(1, *ranks))
    rows, _, warps = tile(members * rank, _MOST_ELEMENTS)
    return {
        "RANKS": tuple(ranks),
        "STARTS": tuple(accumulate(ranks, initial=0)),
        "GROUPS": len(ranks),
        "ALIGNED": gcd(16, *ranks),
        "MEMBERS": members,
        "RANK": rank,
        "ROWS": rows,
        "num_warps": warps,
    }


def _settings(
    activation: str,
    norm: str,
    statistics: Tensor | None,
    hidden_size: int,
    eps: float,
    like: Tensor,
) -> dict[str, Any]:
    """The constants of a kernel that say what it computes."""
    return {
        "ACTIVATION": activation,
        "NORM": norm,
        "NORM_EPS": reference.LATENT_NORM_EPS,
        "COLUMNS": 0 if statistics is None else statistics.shape[1],
        "HIDDEN_SIZE": float(hidden_size),
        "EPS": float(eps),
        "WIDE": tl.float64 if like.dtype == torch.float64 else tl.float32,
    }


@triton.jit
def _latent_epilogue_kernel(
    h,
    statistics,
    gated,
    weight,
    bias,
    z,
    v,
    n,
    width,
    h_row,
    statistics_row,
    gated_row,
    RANKS: tl.constexpr,
    STARTS: tl.constexpr,
    GROUPS: tl.constexpr,
    ALIGNED: tl.constexpr,
    MEMBERS: tl.constexpr,
    RANK: tl.constexpr,
    ROWS: tl.constexpr,
    ACTIVATION: tl.constexpr,
    NORM: tl.constexpr,
    NORM_EPS: tl.constexpr,
    COLUMNS: tl.constexpr,
    HIDDEN_SIZE: tl.constexpr,
    EPS: tl.constexpr,
    WIDE: tl.constexpr,
):
    ranks, starts = _ranks_and_starts(RANKS, STARTS, GROUPS, ALIGNED, MEMBERS)
    within = tl.arange(0, RANK)[None, None, :]
    columns = starts + within
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    inside = rows < n
    row = rows[:, None, None]
    mask = inside[:, None, None] & (within < ranks)

    value = widen(tl.load(h + row * h_row + columns, mask=mask, other=0.0), WIDE)
    if COLUMNS > 0:
        s = whole_sum(statistics, rows, inside, statistics_row, COLUMNS, WIDE)
        value = value * _inverse_rho(s, inside, HIDDEN_SIZE, EPS)[:, None, None]
    if gated is not None:
        value += widen(tl.load(gated + row * gated_row + columns, mask=mask, other=0.0), WIDE)
        # What is normalised is what is kept.
        kept = narrow(value, v.dtype.element_ty)
        tl.store(v + row * width + columns, kept, mask=mask)
        value = widen(kept, WIDE)
    if NORM != "none":
        normed, _ = _normed(value, ranks, mask, NORM, NORM_EPS)
        value = _affine(normed, weight, bias, columns, within < ranks, WIDE)
    result = narrow(activated(value, ACTIVATION), z.dtype.element_ty)
    tl.store(z + starts.to(tl.int64) * n + row * ranks + within, result, mask=mask)


@triton.jit
def _latent_epilogue_backward_kernel(
    dz,
    h,
    v,
    dv_in,
    statistics,
    weight,
    bias,
    dh,
    dv_out,
    ds,
    dweight,
    dbias,
    n,
    width,
    h_row,
    v_row,
    dv_row,
    statistics_row,
    RANKS: tl.constexpr,
    STARTS: tl.constexpr,
    GROUPS: tl.constexpr,
    ALIGNED: tl.constexpr,
    MEMBERS: tl.constexpr,
    RANK: tl.constexpr,
    ROWS: tl.constexpr,
    ACTIVATION: tl.constexpr,
    NORM: tl.constexpr,
    NORM_EPS: tl.constexpr,
    COLUMNS: tl.constexpr,
    HIDDEN_SIZE: tl.constexpr,
    EPS: tl.constexpr,
    WIDE: tl.constexpr,
):
    ranks, starts = _ranks_and_starts(RANKS, STARTS, GROUPS, ALIGNED, MEMBERS)
    within = tl.arange(0, RANK)[None, None, :]
    columns = starts + within
    of_member = within < ranks
    by_weight = tl.zeros([MEMBERS, RANK], WIDE)
    by_bias = tl.zeros([MEMBERS, RANK], WIDE)
    part = tl.program_id(0)
    for tokens in range(part, tl.cdiv(n, ROWS), tl.num_programs(0)):
        rows = tl.cast(tokens, tl.int64) * ROWS + tl.arange(0, ROWS)
        inside = rows < n
        row = rows[:, None, None]
        mask = inside[:, None, None] & of_member

        place = dz + starts.to(tl.int64) * n + row * ranks + within
        grad = widen(tl.load(place, mask=mask, other=0.0), WIDE)
        if COLUMNS > 0:
            s = whole_sum(statistics, rows, inside, statistics_row, COLUMNS, WIDE)
            inverse_rho = _inverse_rho(s, inside, HIDDEN_SIZE, EPS)
            latent = widen(tl.load(h + row * h_row + columns, mask=mask, other=0.0), WIDE)
        if v is not None:
            value = widen(tl.load(v + row * v_row + columns, mask=mask, other=0.0), WIDE)
        elif COLUMNS > 0:
            value = latent * inverse_rho[:, None, None]
        else:
            value = widen(tl.load(h + row * h_row + columns, mask=mask, other=0.0), WIDE)

        if NORM == "none":
            grad = with_slope(grad, value, ACTIVATION)
        else:
            normed, inverse = _normed(value, ranks, mask, NORM, NORM_EPS)
            y = _affine(normed, weight, bias, columns, of_member, WIDE)
            grad = with_slope(grad, y, ACTIVATION)
            by_weight += tl.sum(grad * normed, axis=0)
            by_bias += tl.sum(grad, axis=0)
            grad *= widen(tl.load(weight + columns, mask=of_member, other=0.0), WIDE)
            count = tl.maximum(ranks, 1).to(WIDE)
            along = tl.sum(grad * normed, axis=2, keep_dims=True) / count
            if NORM == "layernorm":
                mean = tl.sum(grad, axis=2, keep_dims=True) / count
                grad -= mean
            grad = (grad - normed * along) * inverse

        if dv_in is not None:
            grad += widen(tl.load(dv_in + row * dv_row + columns, mask=mask, other=0.0), WIDE)
        whole = row * width + columns
        if dv_out is not None:
            tl.store(dv_out + whole, narrow(grad, dv_out.dtype.element_ty), mask=mask)
        if COLUMNS > 0:
            # The lanes beyond a member hold −mean after a norm; h is zero there.
            dot = tl.sum(tl.sum(grad * latent, axis=2), axis=1)
            # Not by the cube of 1/ρ, which overflows sooner.
            slope = dot * inverse_rho * inverse_rho * (inverse_rho / (-2.0 * HIDDEN_SIZE))
            tl.store(ds + rows, slope, mask=inside)
            grad *= inverse_rho[:, None, None]
        tl.store(dh + whole, narrow(grad, dh.dtype.element_ty), mask=mask)
    if dweight is not None:
        place = part.to(tl.int64) * width + tl.reshape(columns, [MEMBERS, RANK])
        tl.store(dweight + place, by_weight, mask=tl.reshape(of_member, [MEMBERS, RANK]))
    if dbias is not None:
        place = part.to(tl.int64) * width + tl.reshape(columns, [MEMBERS, RANK])
        tl.store(dbias + place, by_bias, mask=tl.reshape(of_member, [MEMBERS, RANK]))


@triton.jit
def _ranks_and_starts(
    RANKS: tl.constexpr,
    STARTS: tl.constexpr,
    GROUPS: tl.constexpr,
    ALIGNED: tl.constexpr,
    MEMBERS: tl.constexpr,
):
    """The rank and the first column of each member, `[1, MEMBERS, 1]`; 0 beyond the last one."""
    member = tl.arange(0, MEMBERS)[None, :, None]
    ranks = tl.zeros([1, MEMBERS, 1], tl.int32)
    starts = tl.zeros([1, MEMBERS, 1], tl.int32)
    for i in tl.static_range(GROUPS):
        ranks = tl.where(member == i, RANKS[i], ranks)
        starts = tl.where(member == i, STARTS[i], starts)
    # Triton does not see through `where`, and without this would not use accesses of 16 bytes.
    ranks = tl.multiple_of(ranks, [ALIGNED, ALIGNED, ALIGNED])
    starts = tl.multiple_of(starts, [ALIGNED, ALIGNED, ALIGNED])
    return ranks, starts


@triton.jit
def _inverse_rho(s, inside, HIDDEN_SIZE: tl.constexpr, EPS: tl.constexpr):
    """1/ρ of each token; 1 beyond the last one."""
    return reciprocal(root(tl.where(inside, ratio(s, HIDDEN_SIZE) + EPS, 1.0)))


@triton.jit
def _normed(value, ranks, mask, NORM: tl.constexpr, NORM_EPS: tl.constexpr):
    """x̂, zero beyond a member, and 1/σ `[ROWS, MEMBERS, 1]`."""
    count = tl.maximum(ranks, 1).to(value.dtype)
    if NORM == "layernorm":
        mean = tl.sum(value, axis=2, keep_dims=True) / count
        value = tl.where(mask, value - mean, 0.0)
    variance = tl.sum(value * value, axis=2, keep_dims=True) / count
    inverse = reciprocal(root(variance + NORM_EPS))
    return value * inverse, inverse


@triton.jit
def _affine(normed, weight, bias, columns, of_member, WIDE: tl.constexpr):
    """γ∘x̂ + β."""
    y = normed * widen(tl.load(weight + columns, mask=of_member, other=0.0), WIDE)
    if bias is not None:
        y += widen(tl.load(bias + columns, mask=of_member, other=0.0), WIDE)
    return y
