"""LaX's gates against autograd of their definitions, in fp64, and what is not in half precision."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from boost_layers import ops
from boost_layers.parameters import balanced_factors


def normal(*shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(len(shape) + sum(shape))
    return torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_()


def close(value: Tensor, expected: Tensor | None) -> None:
    assert expected is not None
    torch.testing.assert_close(value, expected, rtol=1e-12, atol=1e-12)


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
    z, _ = ops.latent_epilogue(w, (64,), "identity", norm="layernorm", weight=weight, bias=bias)
    exact = F.layer_norm(w.double(), (64,), eps=ops.LATENT_NORM_EPS)
    assert z.dtype == dtype
    assert (z.view(6, 64).double() - exact).abs().max() <= 4 * torch.finfo(dtype).eps


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_partial_sums_of_fp16_are_kept_in_fp32(dtype: torch.dtype) -> None:
    x = torch.full((2, 64), 100.0, dtype=dtype)
    a = torch.full((3, 64), 100.0, dtype=dtype)
    h = torch.empty(2, 3, dtype=ops.message_dtype(dtype))
    ops.down_projection(x, a, h)
    assert h.isfinite().all()
    torch.testing.assert_close(h.float(), torch.full((2, 3), 640000.0), rtol=8e-3, atol=0)
    s = torch.full((2, 1), 1e4)
    u, _ = ops.latent_epilogue(h, (3,), "identity", statistics=s, hidden_size=1, dtype=dtype)
    assert u.dtype == dtype and u.isfinite().all()
