"""Triton: gated product, rotary embedding, RMSNorm."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from boost_layers.ops import reference
from tests.support.triton_interpreter import (
    BF16,
    DTYPES,
    F16,
    F32,
    F64,
    GRADIENT,
    LAYOUTS,
    Run,
    close,
    doubled,
    expected,
    normal,
)

pytestmark = pytest.mark.slow


PART_OF_WIDER = 3


def strided_heads(t: Tensor) -> list[Tensor]:
    """The same numbers contiguous, batch first, heads first, as a part of wider heads, and with the
    elements of a head apart."""
    wide = t.new_full((*t.shape[:-1], 2 * t.shape[-1]), 7.0)
    wide[..., : t.shape[-1]] = t
    return [
        t.clone(),
        t.transpose(0, 1).clone(memory_format=torch.contiguous_format).transpose(0, 1),
        t.permute(1, 2, 0, 3).clone(memory_format=torch.contiguous_format).permute(2, 0, 1, 3),
        wide[..., : t.shape[-1]],
        t.transpose(2, 3).clone(memory_format=torch.contiguous_format).transpose(2, 3),
    ]


@pytest.mark.parametrize(
    ("dtype", "interleaved"), [(F32, False), (F32, True), (BF16, False), (F16, True), (F64, True)]
)
def test_rotary_in_place_and_its_gradient(run: Run, dtype: torch.dtype, interleaved: bool) -> None:
    cases = [
        (1, 1, 1, 2, 2),
        (3, 1, 5, 12, 6),
        (2, 1, 3, 8, 8),
        (1, 2, 3, 6, 4),
        (1, 1, 70, 64, 64),
    ]
    turn = {"interleaved": interleaved}
    for layout, (s, b, h, e, rotated) in enumerate(cases):
        cos, sin = normal(s, rotated, dtype=dtype), normal(s, rotated, dtype=dtype, seed=1)
        numbers = normal(s, b, h, e, dtype=dtype), normal(s, b, 1, e, dtype=dtype, seed=2)
        q, k = (strided_heads(t)[layout] for t in numbers)
        grads = run("rotary_backward", [q, k, q], 2, cos, sin, **turn)
        exact = expected("rotary_backward", [q, k, q], 2, cos, sin, **turn)
        assert q.equal(numbers[0])
        for grad, grad_exact in zip(grads, exact, strict=True):
            assert grad.is_contiguous() and grad.dtype == dtype
            close(grad, grad_exact, of="row")
        assert grads[1].data_ptr() - grads[0].data_ptr() == q.numel() * q.element_size()
        assert grads[2].equal(q) and grads[0][..., rotated:].equal(q[..., rotated:])

        run("rotary_", [q, k], cos, sin, **turn)
        turned = doubled(numbers)
        reference.rotary_(turned, cos.double(), sin.double(), **turn)
        close(q, turned[0], of="row")
        close(k, turned[1], of="row")
        assert q[..., rotated:].equal(numbers[0][..., rotated:])
        if layout == PART_OF_WIDER:
            assert q._base is not None and (q._base[..., e:] == 7).all()


def test_rotary_of_parts_of_one_tensor_leaves_the_rest(run: Run) -> None:
    """As q, k and v lie in the output of one projection."""
    fused = normal(4, 2, 5, 8)
    before = fused.clone()
    cos, sin = normal(4, 8), normal(4, 8, seed=1)
    exact = fused.double()
    reference.rotary_([exact[:, :, :4]], cos.double(), sin.double(), interleaved=False)
    run("rotary_", [fused[:, :, :3], fused[:, :, 3:4]], cos, sin, interleaved=False)
    close(fused, exact, of="row")
    assert fused[:, :, 4].equal(before[:, :, 4])


@pytest.mark.parametrize("kind", ["swiglu", "product"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_gated_product_and_its_gradient(run: Run, dtype: torch.dtype, kind: str) -> None:
    shapes = [(1, 1, "rows"), (7, 33, "columns"), (7, 33, "rows"), (3, 1500, "contiguous")]
    for n, width, layout in shapes:
        gate, up, dm = (LAYOUTS[layout](normal(n, width, dtype=dtype, seed=i)) for i in range(3))
        m = run("gated_product", gate, up, kind)
        assert m.dtype == dtype and m.is_contiguous()
        close(m, expected("gated_product", gate, up, kind))
        grads = run("gated_product_backward", dm, gate, up, kind)
        exact = expected("gated_product_backward", dm, gate, up, kind)
        for grad, grad_exact in zip(grads, exact, strict=True):
            assert grad.dtype == dtype and grad.is_contiguous()
            close(grad, grad_exact, GRADIENT, "row")


@pytest.mark.parametrize("dtype", DTYPES)
def test_rms_norm_and_its_gradient(run: Run, dtype: torch.dtype) -> None:
    for (n, d), layout in zip([(1, 2), (7, 33), (40, 100)], LAYOUTS.values(), strict=True):
        x, dy, dresidual = (layout(normal(n, d, dtype=dtype, seed=i)) for i in range(3))
        gamma = normal(d, dtype=dtype)
        y, rho = run("rms_norm", x, gamma, 1e-5)
        assert y.dtype == dtype and rho.dtype == reference.wide(dtype)
        for value, exact in zip((y, rho), expected("rms_norm", x, gamma, 1e-5), strict=True):
            close(value, exact)
        for args in [(dy, x, gamma, rho), (dy, x, gamma, rho, dresidual)]:
            dx, dgamma = run("rms_norm_backward", *args)
            assert dx.dtype == dgamma.dtype == dtype
            dx_exact, dgamma_exact = expected("rms_norm_backward", *args)
            close(dx, dx_exact, GRADIENT, "row")
            close(dgamma, dgamma_exact, GRADIENT, "row")
