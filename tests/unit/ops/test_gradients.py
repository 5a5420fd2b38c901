"""Gradients that autograd finds, of csrc's operators by themselves."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.op_cases import (
    leaf,
    normal,
)

Differentiable = dict[str, tuple[Callable[..., Any], list[Tensor]]]


def differentiable(device: str, n: int) -> Differentiable:
    """By name: an operator as a function of the tensors that it is differentiated by."""
    boost = torch.ops.boost

    def t(*shape: int, seed: int = 0) -> Tensor:
        return leaf(normal(*shape, device=device, seed=seed))

    def epilogue(norm: str, activation: str) -> Callable[..., Any]:
        def function(h: Tensor, s: Tensor | None, gated: Tensor | None, *weights: Tensor) -> Any:
            z, v = boost.latent_epilogue(
                h, s, gated, *(*weights, None, None)[:2], [3, 2], activation, norm, 5, 1e-2, h.dtype
            )
            return z if gated is None else (z, v)

        return function

    h, gated, gamma, beta = t(n, 5), t(n, 5, seed=1), t(5, seed=2), t(5, seed=3)
    s = leaf(1 + normal(n, 1, device=device).square())
    downs, ups = [t(3, 4), t(2, 4)], [t(4, 3), t(2, 2)]
    return {
        "sum_of_squares": (lambda x: boost.sum_of_squares(x), [h]),
        "residual_gradient": (lambda *a: boost.residual_gradient(*a), [h, gated, s]),
        "epilogue": (lambda h: epilogue("none", "gelu")(h, None, None), [h]),
        "epilogue, statistics": (lambda h, s: epilogue("none", "silu")(h, s, None), [h, s]),
        "epilogue, rmsnorm": (
            lambda h, s, w: epilogue("rmsnorm", "silu")(h, s, None, w),
            [h, s, gamma],
        ),
        "epilogue, LaX": (epilogue("layernorm", "gelu"), [h, s, gated, gamma, beta]),
        "epilogue, LaX's gate alone": (
            lambda h, g: epilogue("none", "identity")(h, None, g),
            [h, gated],
        ),
        "fold_gamma": (lambda g, *a: boost.fold_gamma(g, a), [t(4), *downs]),
        "up_projection": (lambda z, *b: boost.up_projection(z, b), [t(5 * n), *ups]),
        "swiglu": (lambda g, u: boost.gated_product(g, u, "swiglu"), [h, gated]),
        "product": (lambda g, u: boost.gated_product(g, u, "product"), [h, gated]),
        "rms_norm": (lambda x, g: boost.rms_norm(x, g, 1e-2)[0], [h, gamma]),
    }


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("name", differentiable("cpu", 0))
def test_gradients_against_finite_differences(csrc_device: str, name: str, n: int) -> None:
    function, inputs = differentiable(csrc_device, n)[name]
    torch.autograd.gradcheck(function, inputs)


@pytest.mark.parametrize("name", differentiable("cpu", 0))
def test_gradients_of_an_empty_batch(csrc_device: str, name: str) -> None:
    function, inputs = differentiable(csrc_device, 0)[name]
    outputs = function(*inputs)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    for gradient, x in zip(
        torch.autograd.grad(outputs, inputs, [torch.ones_like(y) for y in outputs]),
        inputs,
        strict=True,
    ):
        assert gradient.shape == x.shape
        if name != "fold_gamma":
            assert not gradient.any()
