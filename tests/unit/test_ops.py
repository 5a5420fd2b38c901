"""Each op against the formula that its docstring names: forward, hand-written backward, bf16.

The references are dense and in fp64; gradients come from autograd of the formula, or from
`gradcheck` of the op with its own backward.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from megatron.core.models.common.embeddings.rope_utils import _apply_rotary_pos_emb_bshd
from torch import Tensor

from boost_layers import ops

TOKENS = [0, 1, 7]
EXACT = 1e-14


def normal(*shape: int, dtype: torch.dtype = torch.float64, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)


def strided(x: Tensor) -> Tensor:
    """The same numbers as every second column of a wider tensor."""
    wide = x.new_full((*x.shape[:-1], 2 * x.shape[-1]), math.nan)
    wide[..., ::2] = x
    return wide[..., ::2]


def assert_close(value: Tensor, reference: Tensor, tolerance: float = EXACT) -> None:
    assert value.shape == reference.shape
    torch.testing.assert_close(value, reference, rtol=tolerance, atol=tolerance)


def assert_rounded_once(value: Tensor, exact: Tensor, slack: Tensor | float = 0.0) -> None:
    """`value` is bf16 and within 0.51 of a bf16 unit in the last place of the fp64 `exact`, give or
    take an absolute `slack`."""
    assert value.dtype == torch.bfloat16 and value.shape == exact.shape
    _, exponent = torch.frexp(exact)
    ulp = torch.ldexp(torch.ones_like(exact), exponent - 8)
    assert ((value.double() - exact).abs() <= 0.51 * ulp + slack).all()


def with_backward(forward: Callable[..., Any], backward: Callable[..., Any]) -> Callable[..., Any]:
    """`forward` as an autograd function of all its arguments; `backward(gradient, *arguments)`."""

    class Op(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *arguments: Tensor) -> Tensor:
            ctx.save_for_backward(*arguments)
            return forward(*arguments)

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Any:
            return backward(gradient, *ctx.saved_tensors)

    return Op.apply


def leaf(x: Tensor) -> Tensor:
    return x.detach().clone().requires_grad_()


@pytest.mark.parametrize("n", TOKENS)
@pytest.mark.parametrize("k", [1, 13])
def test_sum_of_squares(n: int, k: int) -> None:
    x = normal(n, k)
    for given in (x, strided(x)):
        s = ops.sum_of_squares(given)
        assert s.dtype == torch.float64
        assert_close(s, (x * x).sum(dim=1, keepdim=True))
    assert ops.sum_of_squares(x.float()).dtype == torch.float32


@pytest.mark.parametrize("n", TOKENS)
@pytest.mark.parametrize("w", [1, 15])
def test_normalise_latent(n: int, w: int) -> None:
    h, s = normal(n, w), normal(n, 1).square() * 9
    given = h.clone()
    u, rho = ops.normalise_latent(given, s, 9, 1e-5, given.dtype)
    assert u.data_ptr() == given.data_ptr(), "documented to work in place"
    assert_close(u, h / (s / 9 + 1e-5).sqrt())
    assert_close(rho, (s / 9 + 1e-5).sqrt())


def test_normalise_latent_of_a_silent_token_is_finite() -> None:
    u, rho = ops.normalise_latent(torch.zeros(1, 4), torch.zeros(1, 1), 8, 1e-6, torch.float32)
    assert torch.equal(u, torch.zeros(1, 4))
    assert_close(rho, torch.tensor([[1e-3]]), 1e-7)


def test_normalise_latent_in_bf16_divides_in_fp32_and_rounds_once() -> None:
    h, s = normal(40, 33, dtype=torch.bfloat16), normal(40, 1, dtype=torch.float32).square() * 50
    exact = h.double() / (s.double() / 50 + 1e-5).sqrt()
    u, rho = ops.normalise_latent(h.clone(), s, 50, 1e-5, h.dtype)
    assert rho.dtype == torch.float32
    assert_close(rho.double(), (s.double() / 50 + 1e-5).sqrt(), 3e-7)
    assert_rounded_once(u, exact)


@pytest.mark.parametrize("n", TOKENS)
@pytest.mark.parametrize("widths", [(1,), (9,), (4, 1, 6)])
def test_the_online_norms_gradient(n: int, widths: tuple[int, ...]) -> None:
    """dx = Σ_groups c∘x + dH·A is the derivative of u = (x·Aᵀ)/ρ, whatever the grouping."""
    d, eps = 5, 1e-2
    x, weights = leaf(normal(n, d)), [normal(w, d, seed=w) for w in widths]
    rho = (x.square().mean(dim=1, keepdim=True) + eps).sqrt()
    latents = [x @ a.T / rho for a in weights]
    dlatents = [normal(n, w, seed=9) for w in widths]
    (expected,) = torch.autograd.grad(latents, x, dlatents)

    dx = torch.zeros(n, d, dtype=torch.float64)
    for a, u, du in zip(weights, latents, dlatents, strict=True):
        dh, c = ops.normalise_latent_backward(du, u.detach(), rho.detach(), d)
        assert c.shape == (n, 1)
        assert_close(dh, du / rho.detach())
        dx += c * x.detach() + dh @ a
    assert_close(dx, expected)


def test_the_online_norms_gradient_in_bf16_takes_the_dot_product_in_fp32() -> None:
    w, d = 4096, 64
    du, u = normal(6, w, dtype=torch.bfloat16), normal(6, w, dtype=torch.bfloat16, seed=3)
    rho = normal(6, 1, dtype=torch.float32).abs() + 0.5
    dh, c = ops.normalise_latent_backward(du, u, rho, d)
    assert c.dtype == torch.float32
    products = du.double() * u.double()
    exact = -products.sum(dim=1, keepdim=True) / (rho.double().square() * d)
    largest = products.abs().sum(dim=1, keepdim=True) / (rho.double().square() * d)
    assert ((c.double() - exact).abs() <= 1e-6 * largest).all()
    assert_rounded_once(dh, du.double() / rho.double())


@pytest.mark.parametrize("ranks", [(1,), (6,), (3, 1, 5)])
def test_fold_gamma(ranks: tuple[int, ...]) -> None:
    gamma, weights = normal(4), [normal(r, 4, seed=r) for r in ranks]
    expected = torch.cat([a @ torch.diag(gamma) for a in weights])
    assert_close(ops.fold_gamma(gamma, weights), expected)
    assert_close(ops.fold_gamma(gamma, [strided(a) for a in weights]), expected)
    assert torch.equal(ops.fold_gamma(None, weights), torch.cat(weights))


def silu(u: Tensor) -> Tensor:
    return u / (1 + torch.exp(-u))


def gelu(u: Tensor) -> Tensor:
    return u * (1 + torch.erf(u / math.sqrt(2))) / 2


ACTIVATIONS = {"silu": silu, "gelu": gelu, "identity": lambda u: u}


@pytest.mark.parametrize("shape", [(0, 3), (1, 1), (7, 11), (2, 3, 5)])
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activations(name: str, shape: tuple[int, ...]) -> None:
    u, dz = 3 * normal(*shape), normal(*shape, seed=1)
    formula_input = leaf(u)
    expected = ACTIVATIONS[name](formula_input)
    (gradient,) = torch.autograd.grad(expected, formula_input, dz)
    for given in (u, strided(u)):
        assert_close(ops.apply_activation(given, name), expected.detach())
        assert_close(ops.apply_activation_backward(dz, given, name), gradient)
    u16 = u.bfloat16()
    # In gelu's left tail, 1 + erf cancels in fp32.
    cancellation = torch.finfo(torch.float32).eps * u16.double().abs()
    exact = ACTIVATIONS[name](u16.double())
    assert_rounded_once(ops.apply_activation(u16, name), exact, cancellation)


@pytest.mark.parametrize("n", TOKENS)
@pytest.mark.parametrize("batched", [True, False])
@pytest.mark.parametrize(
    "shapes", [[(4, 3)], [(1, 1), (1, 1)], [(5, 3), (5, 3), (5, 3)], [(8, 3), (2, 3), (2, 4)]]
)
def test_project_up(shapes: list[tuple[int, int]], batched: bool, n: int) -> None:
    weights = [normal(*shape, seed=i) for i, shape in enumerate(shapes)]
    latents = [normal(n, r, seed=10 + i) for i, (_, r) in enumerate(shapes)]
    z = torch.cat(latents, dim=1)
    expected = [torch.einsum("nr,or->no", u, b) for u, b in zip(latents, weights, strict=True)]
    for given_z, given_weights in ((z, weights), (strided(z), [strided(b) for b in weights])):
        ys = ops.project_up(given_z, given_weights, batched=batched)
        assert len(ys) == len(expected)
        for y, reference in zip(ys, expected, strict=True):
            assert_close(y, reference)


GATED = {"swiglu": lambda gate, up: silu(gate) * up, "product": lambda gate, up: gate * up}


@pytest.mark.parametrize("shape", [(0, 3), (1, 1), (5, 9)])
@pytest.mark.parametrize("kind", GATED)
def test_gated_product(kind: str, shape: tuple[int, ...]) -> None:
    gate, up, dm = 2 * normal(*shape), normal(*shape, seed=1), normal(*shape, seed=2)
    leaves = leaf(gate), leaf(up)
    expected = GATED[kind](*leaves)
    gradients = torch.autograd.grad(expected, leaves, dm)
    for given in ((gate, up), (strided(gate), strided(up))):
        assert_close(ops.gated_product(*given, kind), expected.detach())
        for value, reference in zip(
            ops.gated_product_backward(dm, *given, kind), gradients, strict=True
        ):
            assert_close(value, reference)


def test_the_product_in_bf16_rounds_once() -> None:
    gate, up = normal(9, 30, dtype=torch.bfloat16), normal(9, 30, dtype=torch.bfloat16, seed=1)
    assert_rounded_once(ops.gated_product(gate, up, "product"), gate.double() * up.double())


def rms(x: Tensor, gamma: Tensor, eps: float) -> Tensor:
    return gamma * x / (x.square().mean(dim=-1, keepdim=True) + eps).sqrt()


@pytest.mark.parametrize("n", TOKENS)
@pytest.mark.parametrize("d", [1, 10])
def test_rms_norm(n: int, d: int) -> None:
    x, gamma, dy, eps = normal(n, d), 1 + normal(d), normal(n, d, seed=1), 1e-3
    leaves = leaf(x), leaf(gamma)
    expected = rms(*leaves, eps)
    dx, dgamma = torch.autograd.grad(expected, leaves, dy)
    for given in (x, strided(x)):
        y, rho = ops.rms_norm(given, gamma, eps)
        assert_close(y, expected.detach())
        assert_close(rho, (x.square().mean(dim=-1, keepdim=True) + eps).sqrt())
        values = ops.rms_norm_backward(dy, given, gamma, rho)
        assert_close(values[0], dx)
        assert_close(values[1], dgamma)


def test_rms_norm_in_bf16_is_computed_in_fp32() -> None:
    x, gamma = 30 * normal(20, 512, dtype=torch.bfloat16), 1 + normal(512, dtype=torch.bfloat16)
    dy = normal(20, 512, dtype=torch.bfloat16, seed=4)
    y, rho = ops.rms_norm(x, gamma, 1e-5)
    assert rho.dtype == torch.float32
    leaves = leaf(x.double()), leaf(gamma.double())
    exact = rms(*leaves, 1e-5)
    assert_rounded_once(y, exact.detach())
    gradients = torch.autograd.grad(exact, leaves, dy.double())
    for value, reference in zip(ops.rms_norm_backward(dy, x, gamma, rho), gradients, strict=True):
        assert value.dtype == torch.bfloat16
        # Rounding an operand to bf16 first makes it 1.4 times the error of rounding the result.
        error = (value.double() - reference).norm() / reference.norm()
        rounding = (reference.bfloat16().double() - reference).norm() / reference.norm()
        assert error <= 1.02 * rounding


def rotation(s: int, pairs: int, interleaved: bool) -> tuple[Tensor, Tensor]:
    """Angles `[s, pairs]` and Megatron's frequencies `[s, 1, 1, 2·pairs]` that mean the same."""
    angles = 3 * normal(s, pairs, seed=5)
    if interleaved:
        both = torch.stack((angles, angles), dim=-1).flatten(1)
    else:
        both = torch.cat((angles, angles), dim=1)
    return angles, both[:, None, None, :]


ROTARY = [(6, 6), (10, 4), (2, 2)]


@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize(("e", "p"), ROTARY)
@pytest.mark.parametrize("s", [1, 5])
def test_rotary_is_a_complex_multiplication(s: int, e: int, p: int, interleaved: bool) -> None:
    t = normal(s, 3, 2, e)
    angles, freqs = rotation(s, p // 2, interleaved)
    if interleaved:
        real, imaginary = t[..., 0:p:2], t[..., 1:p:2]
    else:
        real, imaginary = t[..., : p // 2], t[..., p // 2 : p]
    turned = torch.complex(real, imaginary) * torch.exp(1j * angles)[:, None, None, :]
    expected = t.clone()
    if interleaved:
        expected[..., :p] = torch.view_as_real(turned).flatten(-2)
    else:
        expected[..., :p] = torch.cat((turned.real, turned.imag), dim=-1)

    for given in (t, strided(t)):
        out = ops.rotate_half(given, freqs.cos(), freqs.sin(), interleaved=interleaved)
        assert_close(out, expected)
        assert out.permute(1, 2, 0, 3).is_contiguous(), "attention reads [b, h, s, e]"


@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize(("e", "p"), ROTARY)
def test_rotary_is_megatrons(e: int, p: int, interleaved: bool) -> None:
    t = normal(7, 2, 3, e)
    _, freqs = rotation(7, p // 2, interleaved)
    expected = _apply_rotary_pos_emb_bshd(t, freqs, rotary_interleaved=interleaved)
    out = ops.rotate_half(t, freqs.cos(), freqs.sin(), interleaved=interleaved)
    assert_close(out, expected)


@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize(("e", "p"), ROTARY)
def test_rotarys_gradient(e: int, p: int, interleaved: bool) -> None:
    _, freqs = rotation(3, p // 2, interleaved)
    cos, sin = freqs.cos(), freqs.sin()
    op = with_backward(
        lambda t: ops.rotate_half(t, cos, sin, interleaved=interleaved),
        lambda dt, _: ops.rotate_half_backward(dt, cos, sin, interleaved=interleaved),
    )
    torch.autograd.gradcheck(op, (leaf(normal(3, 2, 2, e)),))
    dt = normal(3, 2, 2, e, seed=8)
    rotate = ops.rotate_half_backward
    gradient = rotate(dt, cos, sin, interleaved=interleaved)
    assert gradient.is_contiguous()
    assert_close(rotate(strided(dt), cos, sin, interleaved=interleaved), gradient)


@pytest.mark.parametrize("interleaved", [True, False])
def test_rotary_in_bf16_rounds_as_megatrons_does(interleaved: bool) -> None:
    t = normal(7, 2, 3, 16, dtype=torch.bfloat16)
    _, freqs = rotation(7, 8, interleaved)
    cos, sin = freqs.cos().bfloat16(), freqs.sin().bfloat16()
    out = ops.rotate_half(t, cos, sin, interleaved=interleaved)
    exact = _apply_rotary_pos_emb_bshd(t.double(), freqs, rotary_interleaved=interleaved)
    megatrons = _apply_rotary_pos_emb_bshd(t, freqs, rotary_interleaved=interleaved)
    error = (out.double() - exact).norm()
    assert error <= 1.05 * (megatrons.double() - exact).norm()
    assert error <= 4e-3 * exact.norm()


@pytest.mark.parametrize("n", [1, 3])
def test_backwards_against_finite_differences(n: int) -> None:
    x, gamma = leaf(normal(n, 4)), leaf(1 + normal(4))
    torch.autograd.gradcheck(
        with_backward(
            lambda x, gamma: ops.rms_norm(x, gamma, 1e-2)[0],
            lambda dy, x, gamma: ops.rms_norm_backward(
                dy, x, gamma, ops.rms_norm(x, gamma, 1e-2)[1]
            ),
        ),
        (x, gamma),
    )
    for kind in GATED:
        torch.autograd.gradcheck(
            with_backward(
                lambda gate, up, kind=kind: ops.gated_product(gate, up, kind),
                lambda dm, gate, up, kind=kind: ops.gated_product_backward(dm, gate, up, kind),
            ),
            (leaf(normal(n, 3)), leaf(normal(n, 3, seed=1))),
        )
    for name in ACTIVATIONS:
        torch.autograd.gradcheck(
            with_backward(
                lambda u, name=name: ops.apply_activation(u, name).clone(),
                lambda dz, u, name=name: ops.apply_activation_backward(dz, u, name),
            ),
            (leaf(normal(n, 3)),),
        )
