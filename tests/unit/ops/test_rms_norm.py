"""RMSNorm of whole tokens."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from boost_layers import ops
from tests.support.op_cases import (
    assert_close,
    every_second,
    exact,
    in_wider_rows,
    leaf,
    rms_normed,
    wide,
)
from tests.support.served import (
    FLOATS,
    LAID_OUT,
    SIZED,
    Served,
)


@FLOATS
@SIZED
def test_rms_norm(served: Served, size: tuple[int, int], dtype: torch.dtype) -> None:
    n, k = size
    x, gamma = served.normal(n, k, dtype=dtype), 1 + served.normal(k, dtype=dtype)
    dy, dresidual = (served.normal(n, k, dtype=dtype, seed=i) for i in (1, 2))
    leaves = leaf(exact(x)), leaf(exact(gamma))
    expected = rms_normed(*leaves, 1e-3)
    root = (exact(x).square().mean(dim=1, keepdim=True) + 1e-3).sqrt()
    y, rho = ops.rms_norm(x, gamma, 1e-3)
    assert rho.dtype == wide(dtype)
    assert_close(y, expected.detach())
    assert_close(rho, root)

    dx, dgamma = torch.autograd.grad(expected, leaves, exact(dy))
    terms = (exact(dy) * exact(gamma)).norm(dim=1, keepdim=True) / root
    for given, whole in ((None, dx), (dresidual, dx + exact(dresidual))):
        value, of_gamma = ops.rms_norm_backward(dy, x, gamma, rho, given)
        assert_close(value, whole, terms=terms)
        assert of_gamma.dtype == dtype
        assert_close(of_gamma, dgamma, terms=(exact(dy * x).abs() / root).sum(dim=0).norm())


@LAID_OUT
def test_rms_norm_of_any_layout(served: Served, layout: Callable[[Tensor], Tensor]) -> None:
    x, dy, dresidual = (served.normal(5, 33, dtype=torch.float32, seed=i) for i in range(3))
    gamma = served.normal(33, dtype=torch.float32)
    y, rho = ops.rms_norm(x, gamma, 1e-3)
    for value, same in zip(
        ops.rms_norm(layout(x), every_second(gamma), 1e-3), (y, rho), strict=True
    ):
        assert_close(value, exact(same))
    dx, dgamma = ops.rms_norm_backward(
        layout(dy), layout(x), every_second(gamma), in_wider_rows(rho), layout(dresidual)
    )
    expected = ops.rms_norm_backward(dy, x, gamma, rho, dresidual)
    assert_close(dx, exact(expected[0]))
    assert_close(dgamma, exact(expected[1]))
