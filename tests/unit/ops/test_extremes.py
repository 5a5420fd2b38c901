"""Huge and tiny numbers."""

from __future__ import annotations

import math

import pytest
import torch

from boost_layers import ops
from tests.support.op_cases import (
    Epilogue,
    EpilogueNumbers,
    assert_close,
    exact,
    leaf,
    rms_normed,
)
from tests.support.served import (
    Served,
    sum_of_squares,
)
from tests.unit.ops.test_latent_epilogue import check_epilogue, check_epilogue_backward

SCALED = pytest.mark.parametrize(
    "dtype", [torch.float64, torch.float32, torch.bfloat16], ids=["fp64", "fp32", "bf16"]
)
SCALES = pytest.mark.parametrize("scale", [1e18, 1e-18], ids=["huge", "tiny"])


@SCALES
@SCALED
def test_statistics_of_huge_and_tiny_tokens(
    served: Served, scale: float, dtype: torch.dtype
) -> None:
    """S itself is a normal number of fp32 there; so are ρ and what is divided by it."""
    x, delta = (scale * served.normal(3, 33, dtype=dtype, seed=i) for i in (0, 1))
    s = ops.residual_add_rms_stats(x, delta)
    assert_close(s, sum_of_squares(x))
    gamma = served.normal(33, dtype=dtype)
    y, rho = ops.rms_norm(x, gamma, 0.0)
    assert_close(y, rms_normed(exact(x), exact(gamma), 0.0))
    dy = served.normal(3, 33, dtype=dtype, seed=2)
    leaves = leaf(exact(x)), leaf(exact(gamma))
    gradients = torch.autograd.grad(rms_normed(*leaves, 0.0), leaves, exact(dy))
    for value, gradient in zip(ops.rms_norm_backward(dy, x, gamma, rho), gradients, strict=True):
        assert_close(value, gradient, terms=gradient.norm())


@SCALES
@SCALED
def test_epilogue_of_huge_and_tiny_tokens(served: Served, scale: float, dtype: torch.dtype) -> None:
    """u = h/ρ is of order one whatever the tokens are; its gradients are of order 1/scale."""
    numbers = EpilogueNumbers(Epilogue((33,), "silu", statistics=0), dtype, served.device)
    numbers.eps = 0.0
    assert numbers.statistics is not None and numbers.sum is not None
    numbers.h = scale * numbers.h
    numbers.statistics = numbers.statistics * scale**2
    numbers.sum = exact(numbers.statistics)
    check_epilogue(numbers)
    check_epilogue_backward(numbers, None)


def test_sums_beyond_fp32_are_infinite_and_below_it_zero(served: Served) -> None:
    x = torch.tensor([[1e20, 1.0], [1e-30, 0.0], [1e-22, 1e-22]], device=served.device)
    s = ops.rms_stats(x)
    assert s[0] == math.inf and s[1] == 0
    assert abs(s[2].item() - 2e-44) <= 3e-45, "denormal: to two of its units"
    y, rho = ops.rms_norm(x, torch.ones(2, device=served.device), 1e-6)
    assert torch.equal(y[0], torch.zeros_like(y[0]))
    assert_close(rho[1:], torch.full((2, 1), 1e-3, dtype=torch.float64))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_denormal_numbers_are_kept(served: Served, dtype: torch.dtype) -> None:
    """No elementwise op flushes them. (GEMMs may: they are libraries'.)"""
    unit = 2.0**-149 if dtype == torch.float32 else 2.0**-133
    units = torch.arange(-33.0, 33.0).view(2, 33).double()
    tiny = (units * unit).to(served.device, dtype)
    assert torch.equal(exact(tiny), units * unit)
    one, twos = torch.ones_like(tiny), torch.full_like(tiny, 2)
    s = torch.ones(2, 1, device=served.device)
    zero = torch.zeros_like(tiny)
    cos = twos[:, :32].contiguous()
    heads = tiny.clone().view(2, 1, 1, 33)
    ops.rotary_([heads], cos, torch.zeros_like(cos), interleaved=False)
    added = tiny.clone()
    ops.residual_add_rms_stats(added, tiny)
    for value, factor in (
        (ops.gated_product(tiny, twos, "product"), 2.0),
        (ops.gated_product_backward(tiny, one, twos, "product")[0], 2.0),
        (ops.residual_gradient(tiny, zero, s), 1.0),
        (ops.residual_gradient(zero, tiny, s), 2.0),
        (ops.latent_epilogue(tiny, [33], "identity")[0].view(2, 33), 1.0),
        (ops.fold_gamma(twos[0], [tiny]), 2.0),
        (heads.view(2, 33)[:, :32], 2.0),
        (added, 2.0),
    ):
        width = value.shape[1]
        assert torch.equal(exact(value), factor * unit * units[:, :width])


def test_activations_at_the_ends_of_fp32(served: Served) -> None:
    """φ of a large number is the number or zero, to the smallest normal number where exp
    overflows; their slopes are one or zero."""
    u = torch.tensor([[1e18, 3e38, 100.0, -100.0, -1e18, -3e38, 0.0, -0.0]], device=served.device)
    one = torch.ones_like(u)
    ends = torch.tensor([1e18, 3e38, 100.0, 0.0, 0.0, 0.0, 0.0, 0.0]).double()
    slopes = torch.tensor([1.0, 1.0, 1.0, 0.0, 0.0, 0.0, 0.5, 0.5]).double()
    found = [(ops.gated_product(u, one, "swiglu")[0], ends)]
    found += [(ops.gated_product_backward(one, u, one, "swiglu")[0][0], slopes)]
    for activation in ("silu", "gelu"):
        found += [(ops.latent_epilogue(u, [8], activation)[0], ends)]
        dh, *_ = ops.latent_epilogue_backward(one.flatten(), [8], activation, h=u)
        found += [(dh[0], slopes)]
    for value, expected in found:
        torch.testing.assert_close(exact(value), expected.float().double(), rtol=1e-6, atol=1.2e-38)
