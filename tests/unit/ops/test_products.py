"""Kernel 5: the gated product, and rotary embedding."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from boost_layers import ops
from tests.support.op_cases import (
    BORDER,
    GATED,
    HALVES,
    assert_close,
    batch_first,
    every_second,
    exact,
    leaf,
    rotation,
    transposed,
)
from tests.support.served import (
    FLOATS,
    LAID_OUT,
    SIZED,
    Served,
)


@FLOATS
@SIZED
@pytest.mark.parametrize("kind", GATED)
def test_gated_product(
    served: Served, kind: str, size: tuple[int, int], dtype: torch.dtype
) -> None:
    gate = 2 * served.normal(*size, dtype=dtype)
    up, dm = (served.normal(*size, dtype=dtype, seed=i) for i in (1, 2))
    leaves = leaf(exact(gate)), leaf(exact(up))
    expected = GATED[kind](*leaves)
    gradients = torch.autograd.grad(expected, leaves, exact(dm))
    # The reference rounds SiLU, and dm∘up, by themselves.
    rounding = served.rounding(1 / 128 if kind == "swiglu" and dtype in HALVES else 0.0)
    assert_close(ops.gated_product(gate, up, kind), expected.detach(), rounding=rounding)
    found = ops.gated_product_backward(dm, gate, up, kind)
    for value, gradient in zip(found, gradients, strict=True):
        assert_close(value, gradient, rounding=rounding)


@LAID_OUT
@pytest.mark.parametrize("kind", GATED)
def test_gated_product_of_any_layout(
    served: Served, kind: str, layout: Callable[[Tensor], Tensor]
) -> None:
    gate, up, dm = (served.normal(5, 33, dtype=torch.float32, seed=i) for i in range(3))
    assert_close(
        ops.gated_product(layout(gate), layout(up), kind), exact(ops.gated_product(gate, up, kind))
    )
    found = ops.gated_product_backward(layout(dm), layout(gate), layout(up), kind)
    for value, same in zip(found, ops.gated_product_backward(dm, gate, up, kind), strict=True):
        assert_close(value, exact(same))


HEADS = [(6, 6), (10, 4), (2, 2), (64, 64), (70, 34), (5, 0)]


def turned(t: Tensor, angles: Tensor, interleaved: bool) -> Tensor:
    """Every pair of t `[s, b, h, e]` as a complex number, times exp(i·angle)."""
    p = 2 * angles.shape[1]
    rest = t[..., p:]
    if interleaved:
        pairs = torch.complex(t[..., 0:p:2], t[..., 1:p:2])
    else:
        pairs = torch.complex(t[..., : p // 2], t[..., p // 2 : p])
    pairs = pairs * torch.exp(1j * angles)[:, None, None, :]
    if interleaved:
        return torch.cat((torch.view_as_real(pairs).flatten(-2), rest), dim=-1)
    return torch.cat((pairs.real, pairs.imag, rest), dim=-1)


def heads_of(served: Served, s: int, b: int, e: int, dtype: torch.dtype) -> list[Tensor]:
    """q, k and v of grouped-query attention as their one up-projection leaves them, and k in the
    layout of `[b, s, h, e]`."""
    flat = served.normal(s, b, 5 * e, dtype=dtype)
    q, k, v = flat.split([3 * e, e, e], dim=-1)
    return [
        q.unflatten(-1, (3, e)),
        batch_first(k).unflatten(-1, (1, e)),
        v.unflatten(-1, (1, e)),
    ]


@FLOATS
@pytest.mark.parametrize("interleaved", [True, False], ids=["adjacent", "halves"])
@pytest.mark.parametrize(("e", "p"), HEADS)
@pytest.mark.parametrize(("s", "b"), [(0, 1), (1, 1), (5, 2)])
def test_rotary(
    served: Served, s: int, b: int, e: int, p: int, interleaved: bool, dtype: torch.dtype
) -> None:
    heads = heads_of(served, s, b, e, dtype)
    _, both = rotation(s, p, interleaved)
    cos, sin = both.cos().to(served.device, dtype), both.sin().to(served.device, dtype)
    # cos and sin are rounded when the op gets them: the formula takes the same.
    first, second = slice(0, p // 2), slice(p // 2, p)
    if interleaved:
        first, second = slice(0, p, 2), slice(1, p, 2)
    c, s_ = exact(cos)[:, None, None, first], exact(sin)[:, None, None, first]

    def expected(t: Tensor, sign: int) -> Tensor:
        out, x = exact(t), exact(t)
        out[..., first] = x[..., first] * c - sign * x[..., second] * s_
        out[..., second] = x[..., second] * c + sign * x[..., first] * s_
        return out

    # The reference rounds one of the two products.
    rounding = served.rounding(1 / 128 if dtype in HALVES else 0.0)
    rotated = [t.clone(memory_format=torch.preserve_format) for t in heads[:2]]
    ops.rotary_(rotated, cos, sin, interleaved=interleaved)
    for value, t in zip(rotated, heads, strict=False):
        assert_close(value, expected(t, 1), rounding=rounding)
    if dtype == torch.float64:
        angles, _ = rotation(s, p, interleaved)
        assert_close(rotated[0], turned(exact(heads[0]), angles, interleaved))

    back = ops.rotary_backward(heads, 2, cos, sin, interleaved=interleaved)
    start = 0
    for i, (value, t) in enumerate(zip(back, heads, strict=True)):
        assert_close(value, expected(t, -1) if i < 2 else exact(t), rounding=rounding)
        assert value.is_contiguous() and value.storage_offset() == start, "one after the other"
        start += value.numel()


@pytest.mark.parametrize("interleaved", [True, False], ids=["adjacent", "halves"])
def test_rotary_in_place_leaves_what_lies_around(served: Served, interleaved: bool) -> None:
    plain = served.normal(5, 2, 3, 10, dtype=torch.float32)
    around = plain.new_full((5, 2, 4, 13), BORDER)
    inside = around[:, :, 1:, 2:12]
    inside.copy_(plain)
    _, both = rotation(5, 6, interleaved)
    cos, sin = (f().to(served.device, torch.float32) for f in (both.cos, both.sin))
    ops.rotary_([inside], cos, sin, interleaved=interleaved)
    ops.rotary_([plain], every_second(cos), transposed(sin), interleaved=interleaved)
    assert torch.equal(inside, plain)
    inside.fill_(BORDER)
    assert (around == BORDER).all()


def test_rotary_of_a_rank_without_query_heads(served: Served) -> None:
    none, k = served.normal(5, 2, 0, 4), served.normal(5, 2, 1, 4)
    cos, sin = served.normal(5, 4, seed=1), served.normal(5, 4, seed=2)
    _, back = ops.rotary_backward([none, k], 2, cos, sin, interleaved=False)
    (expected,) = ops.rotary_backward([k], 1, cos, sin, interleaved=False)
    assert torch.equal(back, expected)
    both, alone = k.clone(), k.clone()
    ops.rotary_([none, both], cos, sin, interleaved=False)
    ops.rotary_([alone], cos, sin, interleaved=False)
    assert torch.equal(both, alone)


def test_rotary_of_asymmetric_tables_is_transposed_backward(served: Served) -> None:
    """Backward is the transpose of forward, even if a pair's two sines or cosines differ."""
    for interleaved in (True, False):
        t, dt = served.normal(3, 1, 2, 6), served.normal(3, 1, 2, 6, seed=1)
        cos, sin = served.normal(3, 4, seed=2), served.normal(3, 4, seed=3)
        (back,) = ops.rotary_backward([dt], 1, cos, sin, interleaved=interleaved)
        before = (t * back).sum(dim=(1, 2, 3))
        ops.rotary_([t], cos, sin, interleaved=interleaved)
        assert_close((t * dt).sum(dim=(1, 2, 3)), exact(before), terms=10.0)
