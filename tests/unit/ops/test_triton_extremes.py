"""Triton: huge and tiny numbers, NaN and Inf, and nothing at all."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from boost_layers.ops import reference
from tests.support.triton_interpreter import (
    BF16,
    DTYPES,
    F32,
    Run,
    close,
    expected,
    normal,
)
from tests.unit.ops.test_triton_latents import NORMS, affine

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("size", [1e30, 1e-30])
def test_huge_and_tiny_numbers(run: Run, size: float) -> None:
    x, y = normal(5, 33) * size, normal(5, 33, seed=1)
    close(run("rms_stats", x * 1e-12), expected("rms_stats", x * 1e-12))
    close(run("residual_gradient", x, y, y[:, :1]), expected("residual_gradient", x, y, y[:, :1]))
    args = x, [20, 13], "identity"
    settings = {"statistics": y[:, :1] ** 2 * min(size, 1e8), "hidden_size": 33}
    close(
        run("latent_epilogue", *args, **settings)[0],
        expected("latent_epilogue", *args, **settings)[0],
    )
    close(run("gated_product", x, y, "product"), expected("gated_product", x, y, "product"))
    args = x.to(BF16), y.to(BF16), "swiglu"
    close(run("gated_product", *args), expected("gated_product", *args))


@pytest.mark.parametrize(("value", "dtype"), [(math.nan, F32), (math.inf, BF16), (-math.inf, F32)])
def test_nan_and_inf_pass_through(run: Run, value: float, dtype: torch.dtype) -> None:
    """In the tokens in which they are, and in no other."""

    def marked(t: Tensor) -> Tensor:
        t = t.clone()
        t[1, 2] = value
        return t

    def finite(t: Tensor) -> list[bool]:
        return t.isfinite().all(dim=1).tolist()

    x, y = marked(normal(4, 12, dtype=dtype)), normal(4, 12, dtype=dtype, seed=1)
    one = [True, False, True, True]
    moved = x.clone()
    assert finite(run("residual_add_rms_stats", moved, y)) == one == finite(moved)
    assert moved[1, 2].equal(x[1, 2]) or math.isnan(value)
    assert finite(run("residual_gradient", x, y, normal(4, 1))) == one
    assert finite(run("gated_product", y, x, "swiglu")) == one
    assert all(finite(t) == one for t in run("gated_product_backward", x, y, y, "product"))
    for norm in NORMS:
        common = affine(norm, 12, dtype)
        z, v = run("latent_epilogue", x, [12], "identity", gated=y, **common)
        assert finite(z.view(4, 12)) == one == finite(v)
        dh, *_ = run("latent_epilogue_backward", x.flatten(), [12], "silu", h=y, **common)
        assert finite(dh) == one
        statistics = torch.tensor([[1.0], [math.nan], [1.0], [1.0]])
        z, _ = run("latent_epilogue", y, [12], "silu", statistics=statistics, **common)
        assert finite(z.view(4, 12)) == one
    assert finite(run("rms_norm", x, y[0], 1e-5)[0]) == one
    dx, _ = run("rms_norm_backward", x, y, y[0], torch.ones(4, 1))
    assert finite(dx) == one
    t = x.view(4, 1, 1, 12).clone()
    run("rotary_", [t], y[:, :8], y[:, :8], interleaved=False)
    assert finite(t.view(4, 12)) == one


@pytest.mark.parametrize(("n", "width"), [(0, 6), (3, 0)])
def test_nothing_to_do(run: Run, n: int, width: int) -> None:
    """Results of the right shapes and dtypes; parameters' gradients are zero."""
    for dtype in DTYPES:
        x, column = torch.empty(n, width, dtype=dtype), torch.ones(n, 1)
        weight = torch.empty(width, dtype=dtype)
        slots = torch.empty(n, 3, dtype=BF16)
        norm: dict[str, Any] = {"norm": "layernorm", "weight": weight, "bias": weight}
        calls: list[tuple[Any, ...]] = [
            ("rms_stats", x, slots),
            ("residual_add_rms_stats", x, x.clone()),
            ("read_statistics", slots),
            ("residual_gradient", x, x, column.to(reference.wide(dtype))),
            ("gated_product", x, x, "swiglu"),
            ("gated_product_backward", x, x, x, "swiglu"),
            ("rms_norm", x, weight, 1e-5),
            ("rms_norm_backward", x, x, weight, column.to(reference.wide(dtype))),
            ("rotary_backward", [x.view(n, 1, 1, width)] * 2, 1, x, x, {"interleaved": False}),
            ("rotary_", [x.view(n, 1, 1, width)], x, x, {"interleaved": True}),
        ]
        if width > 0:
            calls += [
                ("latent_epilogue", x, [4, 2], "silu", {"gated": x, **norm}),
                ("latent_epilogue_backward", x.flatten(), [4, 2], "silu", {"v": x, **norm}),
            ]
        for name, *args in calls:
            kwargs = args.pop() if isinstance(args[-1], dict) else {}
            found = flat(run(name, *args, **kwargs))
            if name == "latent_epilogue_backward":
                right = [x, x, weight, weight]
            else:
                right = flat(getattr(reference, name)(*args, **kwargs))
            for value, exact in zip(found, right, strict=True):
                assert value.shape == exact.shape and value.dtype == exact.dtype, name
                assert value.numel() == 0 or n > 0 or value.equal(torch.zeros_like(value))


def flat(results: Any) -> list[Tensor]:
    if results is None or isinstance(results, Tensor):
        return [] if results is None else [results]
    return [tensor for result in results for tensor in flat(result)]
