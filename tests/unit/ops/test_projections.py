"""Kernels 3 and 4: up- and down-projections, and γ folded into the latter's weights."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from boost_layers import ops
from boost_layers.ops import dispatch
from tests.support.op_cases import (
    HALVES,
    assert_close,
    assert_product,
    batch_first,
    border_is_untouched,
    contiguous,
    every_second,
    exact,
    in_wider_rows,
    leaf,
    transposed,
    wide,
)
from tests.support.served import (
    DEVICES,
    FLOATS,
    LAID_OUT,
    Served,
)


@pytest.mark.skipif(DEVICES == ["cpu"], reason="no GPU, where every case here runs as well")
def test_csrc_is_built_for_the_gpu() -> None:
    assert dispatch.cuda_architectures()


@FLOATS
@pytest.mark.parametrize("k", [1, 17, 130])
@pytest.mark.parametrize("ranks", [(1,), (33,), (17, 1, 5), (17, 1, 5, 2, 9, 3, 4)], ids=str)
def test_fold_gamma(served: Served, ranks: tuple[int, ...], k: int, dtype: torch.dtype) -> None:
    gamma = 1 + served.normal(k, dtype=dtype)
    weights = [served.normal(r, k, dtype=dtype, seed=r) for r in ranks]
    leaves = leaf(exact(gamma)), *(leaf(exact(a)) for a in weights)
    expected = torch.cat([a * leaves[0] for a in leaves[1:]])
    assert_close(ops.fold_gamma(gamma, weights), expected.detach())
    for m_dtype in {dtype, wide(dtype)}:
        m = served.normal(sum(ranks), k, dtype=m_dtype, seed=3)
        dgamma, *dweights = torch.autograd.grad(expected, leaves, exact(m), retain_graph=True)
        found, of_gamma = ops.fold_gamma_backward(m, gamma, weights)
        # The reference rounds M∘A to the dtype of M before it is added up.
        narrow = served.rounding(1 / 64 if m_dtype in HALVES else 0.0)
        assert of_gamma.dtype == dtype
        terms = (exact(m) * exact(torch.cat(weights))).abs().sum(dim=0).norm()
        assert_close(of_gamma, dgamma, terms=terms, rounding=narrow)
        for value, gradient in zip(found, dweights, strict=True):
            assert value.dtype == dtype
            assert_close(value, gradient)


@FLOATS
@pytest.mark.parametrize("ranks", [(17, 1, 5), (17, 1, 5, 2, 9, 3, 4)], ids=str)
def test_fold_gamma_adds_to_main_gradients(
    served: Served, ranks: tuple[int, ...], dtype: torch.dtype
) -> None:
    gamma = 1 + served.normal(33, dtype=dtype)
    weights = [served.normal(r, 33, dtype=dtype, seed=r) for r in ranks]
    for m_dtype in {dtype, wide(dtype)}:
        m = served.normal(sum(ranks), 33, dtype=m_dtype, seed=3)
        mains = [served.normal(r, 33, dtype=wide(dtype), seed=40 + r) for r in ranks]
        parts = exact(m).split(list(ranks))
        expected = [exact(g) + p * exact(gamma) for g, p in zip(mains, parts, strict=True)]
        dgamma = ops.fold_gamma_accumulate(m, gamma, weights, mains)
        for value, gradient in zip(mains, expected, strict=True):
            assert_close(value, gradient)
        _, alone = ops.fold_gamma_backward(m, gamma, weights)
        assert torch.equal(dgamma, alone)


@LAID_OUT
def test_fold_gamma_of_any_layout(served: Served, layout: Callable[[Tensor], Tensor]) -> None:
    gamma, weights = served.normal(17), [served.normal(5, 17), served.normal(3, 17)]
    m = served.normal(8, 17, seed=1)
    given = every_second(gamma), [layout(a) for a in weights]
    assert torch.equal(ops.fold_gamma(*given), ops.fold_gamma(gamma, weights))
    dweights, dgamma = ops.fold_gamma_backward(layout(m), *given)
    expected, of_gamma = ops.fold_gamma_backward(m, gamma, weights)
    assert all(torch.equal(a, b) for a, b in zip(dweights, expected, strict=True))
    assert_close(dgamma, exact(of_gamma))


UP_SHAPES = [
    ((1, 1),),
    ((33, 17),),
    ((17, 3), (17, 3), (17, 3)),
    ((130, 33), (17, 33), (17, 33)),
    ((5, 1), (3, 17)),
]


@FLOATS
@pytest.mark.parametrize("n", [0, 1, 33])
@pytest.mark.parametrize("shapes", UP_SHAPES, ids=str)
def test_up_projection(
    served: Served, shapes: tuple[tuple[int, int], ...], n: int, dtype: torch.dtype
) -> None:
    weights = [served.normal(*shape, dtype=dtype, seed=i) for i, shape in enumerate(shapes)]
    zs = [served.normal(n, r, dtype=dtype, seed=10 + i) for i, (_, r) in enumerate(shapes)]
    dys = [served.normal(n, o, dtype=dtype, seed=20 + i) for i, (o, _) in enumerate(shapes)]
    z = torch.cat([part.flatten() for part in zs])
    ys = ops.up_projection(z, weights)
    dz = ops.up_projection_dgrad([every_second(dy) for dy in dys], weights)
    ranks = [r for _, r in shapes]
    dweights = ops.up_projection_wgrad([in_wider_rows(dy) for dy in dys], z, ranks)
    dzs = [p.view(-1, r) for p, r in zip(dz.split([n * r for r in ranks]), ranks, strict=True)]
    for i, (y, part, weight, dy) in enumerate(zip(ys, zs, weights, dys, strict=True)):
        assert_product(y, part, weight.T)
        assert_product(dzs[i], dy, weight)
        assert_product(dweights[i], dy.T, part)
    start = 0
    for y in ys:
        assert y.is_contiguous() and y.storage_offset() == start, "one after the other"
        start += y.numel()


def test_up_projection_of_any_layout(served: Served) -> None:
    weights = [served.normal(5, 3, seed=1), served.normal(4, 2, seed=2)]
    z = served.normal(7 * 5)
    expected = ops.up_projection(z, weights)
    for layout in (in_wider_rows, transposed, every_second):
        given = [layout(b) for b in weights]
        for y, same in zip(ops.up_projection(z, given), expected, strict=True):
            assert_close(y, exact(same))
        dz = ops.up_projection_dgrad([layout(y) for y in expected], given)
        assert_close(dz, exact(ops.up_projection_dgrad(expected, weights)))


PLACES = {
    "ascending": (0, 2, 4),
    "descending": (4, 2, 0),
    "uneven": (0, 1, 4),
    "there and back": (2, 4, 0),
}
"""Where in one buffer the members of a group lie, as they do in Megatron's: what is ascending and
even is one batched GEMM on CUDA."""


@pytest.mark.parametrize("places", PLACES.values(), ids=PLACES)
def test_up_projections_whose_weights_lie_anywhere_in_a_buffer(
    served: Served, places: tuple[int, ...]
) -> None:
    n, o, r = 33, 17, 3
    weights, mains = (served.normal(5, o, r, seed=seed) for seed in (1, 2))
    z, dys = served.normal(3 * n * r, seed=3), list(served.normal(3, n, o, seed=4))
    given, into = ([buffer[place] for place in places] for buffer in (weights, mains))
    before = exact(mains)
    ys, dz = ops.up_projection(z, given), ops.up_projection_dgrad(dys, given)
    dweights = ops.up_projection_wgrad(dys, z, [r] * 3)
    ops.up_projection_accumulate(dys, z, into)
    for i, place in enumerate(places):
        part = z.view(3, n, r)[i]
        assert_product(ys[i], part, weights[place].T)
        assert_product(dz.view(3, n, r)[i], dys[i], weights[place])
        assert_product(dweights[i], dys[i].T, part)
        assert_close(mains[place], before[place] + exact(dys[i]).T @ exact(part))
    for place in {0, 1, 2, 3, 4} - set(places):
        assert torch.equal(exact(mains[place]), before[place])


def test_gradients_that_are_the_same_for_every_token(served: Served) -> None:
    """Expanded, as a sum or a mean leaves them: one row in memory."""
    weights = [served.normal(17, 3, seed=i) for i in range(2)]
    dys = [served.normal(1, 17, seed=10 + i).expand(33, 17) for i in range(2)]
    z, x = served.normal(2 * 33 * 3), served.normal(33, 5, seed=5)
    dz = ops.up_projection_dgrad(dys, weights).view(2, 33, 3)
    dweights = ops.up_projection_wgrad(dys, z, [3, 3])
    for i in range(2):
        assert_product(dz[i], dys[i], weights[i])
        assert_product(dweights[i], dys[i].T, z.view(2, 33, 3)[i])
    assert_product(ops.down_projection_dgrad(dys[0], weights[0]), dys[0], weights[0])
    assert_product(ops.down_projection_wgrad(dys[0], x), dys[0].T, x)


@FLOATS
@pytest.mark.parametrize("n", [0, 1, 33])
def test_up_projection_adds_to_main_gradients(served: Served, n: int, dtype: torch.dtype) -> None:
    widths, ranks = (17, 130), [33, 3]
    dys = [served.normal(n, o, dtype=dtype, seed=o) for o in widths]
    zs = [served.normal(n, r, dtype=dtype, seed=r) for r in ranks]
    mains = [
        served.normal(o, r, dtype=wide(dtype), seed=9) for o, r in zip(widths, ranks, strict=True)
    ]
    products = [exact(dy).T @ exact(part) for dy, part in zip(dys, zs, strict=True)]
    expected = [exact(main) + product for main, product in zip(mains, products, strict=True)]
    z = torch.cat([part.flatten() for part in zs])
    ops.up_projection_accumulate(dys, z, mains)
    for main, gradient, product in zip(mains, expected, products, strict=True):
        # The reference rounds the product before it is added.
        size = product.norm(dim=1, keepdim=True) / gradient.norm(dim=1, keepdim=True)
        rounding = served.rounding(1 / 128 if dtype in HALVES else 0.0)
        assert_close(main, gradient, rounding=rounding * size.max().item())


TOKENS = {
    "[n, k]": lambda x: x[:, 0],
    "[s, b, k]": contiguous,
    "[s, b, k] of [b, s, k]": batch_first,
    "wider rows": in_wider_rows,
    "wider rows of [b, s, k]": lambda x: batch_first(in_wider_rows(batch_first(x))),
}
TOKEN_LAYOUTS = pytest.mark.parametrize("tokens", TOKENS.values(), ids=TOKENS)


def as_matrix(x: Tensor) -> Tensor:
    return exact(x).reshape(-1, x.shape[-1])


@FLOATS
@TOKEN_LAYOUTS
@pytest.mark.parametrize("size", [(0, 2), (1, 1), (1, 3), (17, 1), (17, 2)], ids=str)
def test_down_projection(
    served: Served,
    size: tuple[int, int],
    tokens: Callable[[Tensor], Tensor],
    dtype: torch.dtype,
) -> None:
    (s, b), k, w = size, 33, 17
    x, weight = tokens(served.normal(s, b, k, dtype=dtype)), served.normal(w, k, dtype=dtype)
    for out_dtype in {dtype, wide(dtype)}:
        message = torch.full((*x.shape[:-1], w), math.nan, dtype=out_dtype, device=served.device)
        out = in_wider_rows(message)
        ops.down_projection(x, weight, out)
        assert_product(out, x, weight.T)
        assert border_is_untouched(out)


@FLOATS
@pytest.mark.parametrize(("n", "k", "w"), [(0, 3, 2), (1, 1, 1), (33, 130, 17), (17, 1, 3)])
def test_down_projections_input_gradient(
    served: Served, n: int, k: int, w: int, dtype: torch.dtype
) -> None:
    dh, weight = served.normal(n, w, dtype=dtype), served.normal(w, k, dtype=dtype, seed=1)
    expected = exact(dh) @ exact(weight)
    assert_product(ops.down_projection_dgrad(every_second(dh), weight), dh, weight)
    for layout in (contiguous, in_wider_rows):
        filled = served.normal(n, k, dtype=dtype, seed=2)
        dx = layout(filled.clone())
        assert ops.down_projection_dgrad(in_wider_rows(dh), transposed(weight), dx) is dx
        assert_close(dx, exact(filled) + expected)
        assert layout is contiguous or border_is_untouched(dx)


@FLOATS
@pytest.mark.parametrize(
    ("layout", "size"),
    # A matrix of tokens has no batch that could be empty.
    [
        pytest.param(layout, size, id=f"{layout} {size}")
        for layout, size in itertools.product(TOKENS, [(0, 2), (3, 0), (1, 1), (17, 3)])
        if not (layout == "[n, k]" and size == (3, 0))
    ],
)
def test_down_projections_weight_gradient(
    served: Served, layout: str, size: tuple[int, int], dtype: torch.dtype
) -> None:
    (s, b), k, w = size, 33, 17
    x = TOKENS[layout](served.normal(s, b, k, dtype=dtype))
    dh = served.normal(s, b, w, dtype=dtype, seed=1)
    dh = dh[:, 0] if x.dim() == 2 else dh
    m = ops.down_projection_wgrad(dh, x)
    # Where the tokens of a batch are apart it is added up from one GEMM for each of its sequences.
    rounding = b / 128 if x.dim() == 3 and m.dtype in HALVES else 0.0
    assert_product(m, as_matrix(dh).T, as_matrix(x), rounding=rounding)

    main = served.normal(w, k, dtype=wide(dtype), seed=2)
    expected = exact(main) + as_matrix(dh).T @ as_matrix(x)
    ops.down_projection_accumulate(dh, x, main)
    # The reference rounds the product before it is added.
    assert_close(main, expected, rounding=served.rounding(1 / 128 if dtype in HALVES else 0.0))
