"""LaX's norm and gates against autograd of their definitions, in fp64."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from boost_layers import ops
from boost_layers.parameters import balanced_factors

PHI: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "identity": lambda v: v,
}


def normal(*shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(len(shape) + sum(shape))
    return torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_()


def close(value: Tensor, expected: Tensor | None) -> None:
    assert expected is not None
    torch.testing.assert_close(value, expected, rtol=1e-12, atol=1e-12)


def expected_latent(w: Tensor, ranks: tuple[int, ...], norm: str, *affine: Tensor) -> Tensor:
    parts = []
    for member, *tensors in zip(
        w.split(ranks, 1), *(each.split(ranks) for each in affine), strict=True
    ):
        if norm == "layernorm":
            member = F.layer_norm(member, member.shape[1:], *tensors, eps=1e-6)
        elif norm == "rmsnorm":
            member = F.rms_norm(member, member.shape[1:], *tensors, eps=1e-6)
        parts.append(member)
    return torch.cat(parts, dim=1)


@pytest.mark.parametrize("ranks", [(5,), (4, 4, 4), (3, 8)])
@pytest.mark.parametrize("activation", PHI)
@pytest.mark.parametrize("norm", ["none", "rmsnorm", "layernorm"])
def test_activate_latent_and_its_gradients(
    norm: str, activation: str, ranks: tuple[int, ...]
) -> None:
    width = sum(ranks)
    w, affine = normal(7, width), []
    if norm != "none":
        affine = [normal(width), normal(width + 1)[:width].detach().requires_grad_()]
        affine = affine[: 1 if norm == "rmsnorm" else 2]
    settings = ranks, activation, norm, *affine
    z = ops.activate_latent(w.detach(), *settings)
    expected = PHI[activation](expected_latent(w, ranks, norm, *affine))
    close(z, expected)

    dz = normal(7, width).detach()
    expected.backward(dz)
    dw, *daffine = ops.activate_latent_backward(dz, w.detach(), *settings)
    close(dw, w.grad)
    for value, tensor in zip(daffine, affine, strict=False):
        assert value is not None
        close(value, tensor.grad)
    assert all(value is None for value in daffine[len(affine) :])


@pytest.mark.parametrize("rank", [1, 7, 12, 16])
@pytest.mark.parametrize("gate", ["identity", "linear", "tensor"])
def test_gates_and_their_gradients(gate: str, rank: int) -> None:
    p, q = balanced_factors(rank)
    weights = {
        "identity": (),
        "linear": (normal(rank, rank), normal(rank)),
        "tensor": (normal(p, p), normal(q, q + 1)[:, :q].detach().requires_grad_()),
    }[gate]
    z = normal(9, rank)
    # The Kronecker product is the same gate as one matrix: vec(E1' Z E2) = (E1 x E2)' vec(Z).
    matrix = torch.eye(rank, dtype=torch.float64)
    expected = z @ matrix
    if gate == "linear":
        expected = F.linear(z, *weights)
    elif gate == "tensor":
        expected = z @ torch.kron(*weights)
    close(ops.apply_gate(z.detach(), gate, [w.detach() for w in weights]), expected)

    dg = normal(9, rank).detach()
    expected.backward(dg)
    dz, dweights = ops.apply_gate_backward(dg, z.detach(), gate, [w.detach() for w in weights])
    close(dz, z.grad)
    assert len(dweights) == len(weights)
    for value, weight in zip(dweights, weights, strict=True):
        close(value, weight.grad)


def test_the_tensor_gates_sides_are_as_equal_as_can_be() -> None:
    sides = {1: (1, 1), 7: (1, 7), 12: (3, 4), 16: (4, 4), 128: (8, 16), 1024: (32, 32)}
    assert {rank: balanced_factors(rank) for rank in sides} == sides


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_norms_arithmetic_is_in_fp32(dtype: torch.dtype) -> None:
    """A mean of large numbers in half precision would lose what distinguishes them."""
    w = (normal(6, 64).detach() * 0.05 + 30.0).to(dtype)
    weight, bias = torch.ones(64, dtype=dtype), torch.zeros(64, dtype=dtype)
    z = ops.activate_latent(w, (64,), "identity", "layernorm", weight, bias)
    exact = F.layer_norm(w.double(), (64,), eps=1e-6)
    assert z.dtype == dtype
    assert (z.double() - exact).abs().max() <= 4 * torch.finfo(dtype).eps


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_partial_sums_of_fp16_are_kept_in_fp32(dtype: torch.dtype) -> None:
    x = torch.full((2, 64), 100.0, dtype=dtype)
    a = torch.full((3, 64), 100.0, dtype=dtype)
    h = torch.empty(2, 3, dtype=ops.message_dtype(dtype))
    ops.project_down(x, a, h)
    assert h.isfinite().all()
    torch.testing.assert_close(h.float(), torch.full((2, 3), 640000.0), rtol=8e-3, atol=0)
    u = ops.divide_latent(h, torch.full((2, 1), 100.0), dtype)
    assert u.dtype == dtype and u.isfinite().all()
