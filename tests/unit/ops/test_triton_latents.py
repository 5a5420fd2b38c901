"""Triton: the latent epilogue."""

from __future__ import annotations

from concurrent.futures import ProcessPoolExecutor
from itertools import product
from typing import Any

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
    columns_apart,
    expected,
    normal,
    rows_apart,
    run_there,
)

pytestmark = pytest.mark.slow


NORMS = ["none", "rmsnorm", "layernorm"]
ACTIVATIONS = ["silu", "gelu", "identity"]
LATENTS = [
    *product(NORMS, ACTIVATIONS, [F32]),
    *(
        (norm, phi, dtype)
        for norm, phi in zip(NORMS, ACTIVATIONS, strict=True)
        for dtype in DTYPES[1:]
    ),
]
SHAPES = [(1, (1,)), (7, (16, 16, 16)), (37, (33, 8, 1))]


def affine(norm: str, width: int, dtype: torch.dtype) -> dict[str, Any]:
    if norm == "none":
        return {}
    given = {"norm": norm, "weight": normal(width, dtype=dtype)}
    return given | ({"bias": normal(width, dtype=dtype, seed=1)} if norm == "layernorm" else {})


def online(n: int, dtype: torch.dtype, in_slots: bool) -> tuple[dict[str, Any], dict[str, Any]]:
    """The arguments of the online norm, and the same with S as it is in fp64."""
    s = (normal(n, 1, dtype=reference.wide(dtype), seed=2).square() + 0.5) * 100
    settings = {"hidden_size": 96, "eps": 1e-5}
    block = s
    if in_slots:
        block = torch.zeros(n, 9, dtype=BF16)
        for rank in range(3):
            slots = torch.empty_like(block)
            reference.rms_stats(s.sqrt() * (rank + 1), slots, rank)
            block += slots
        s = block.double().sum(dim=1, keepdim=True)
    return {"statistics": block, **settings}, {"statistics": s.double(), **settings}


@pytest.mark.parametrize(("norm", "activation", "dtype"), LATENTS)
def test_latent_epilogue(run: Run, norm: str, activation: str, dtype: torch.dtype) -> None:
    # Without a norm no sum is behind a number, and it is as exact as its own size says.
    of = "element" if norm == "none" else "row"
    for (n, ranks), layout in zip(SHAPES, LAYOUTS.values(), strict=True):
        width = sum(ranks)
        common = affine(norm, width, dtype)
        h = layout(normal(n, width, dtype=dtype))
        given, exact = online(n, dtype, in_slots=n > 1 and dtype != F64)
        z, v = run("latent_epilogue", h, ranks, activation, **given, **common)
        z_exact, _ = expected("latent_epilogue", h, ranks, activation, **exact, **common)
        assert v is None and z.dtype == dtype
        close_members(z, z_exact, n, ranks, of)

        gated = layout(normal(n, width, dtype=dtype, seed=3))
        z, v = run("latent_epilogue", h, ranks, activation, gated=gated, **given, **common)
        _, v_exact = expected("latent_epilogue", h, ranks, activation, gated=gated, **exact)
        assert v.dtype == dtype
        close(v, v_exact, of="row")
        # z is that of the rounded v.
        z_exact, _ = expected("latent_epilogue", v, ranks, activation, **common)
        close_members(z, z_exact, n, ranks, of)


def close_slope(
    ds: Tensor | None, exact: Any, dh: Tensor, h: Tensor, settings: Any, least: float = 0.0
) -> None:
    """dS, relative to what it sums: after a norm, to which scale means nothing, it is nearly 0."""
    if exact is None:
        assert ds is None
        return
    assert ds is not None and ds.dtype == reference.wide(ds.dtype) and ds.shape == exact.shape
    square = settings["statistics"] / settings["hidden_size"] + settings["eps"]
    terms = (
        (dh.abs().clamp(min=least) * h.double().abs()).sum(dim=1, keepdim=True)
        / square
        / settings["hidden_size"]
    )
    tolerance = 1e-12 if ds.dtype == F64 else GRADIENT
    assert ((ds.double() - exact).abs() <= tolerance * terms).all()


def close_members(
    z: Tensor, exact: Tensor, n: int, ranks: tuple[int, ...], of: str = "row"
) -> None:
    pairs = zip(*(reference.split_members(each, n, ranks) for each in (z, exact)), strict=True)
    for part, part_exact in pairs:
        close(part, part_exact, of=of)


@pytest.mark.parametrize("dtype", [BF16, F16])
def test_latents_in_fp32_give_results_in_half_precision(run: Run, dtype: torch.dtype) -> None:
    h, dz = normal(9, 24), normal(9 * 24, dtype=dtype)
    common = affine("layernorm", 24, dtype)
    given, exact = online(9, dtype, in_slots=False)
    z, _ = run("latent_epilogue", h, [16, 8], "silu", **given, **common, dtype=dtype)
    assert z.dtype == dtype
    z_exact, _ = expected("latent_epilogue", h, [16, 8], "silu", **exact, **common)
    close_members(z, z_exact, 9, (16, 8))
    dh, _, ds, *_ = run("latent_epilogue_backward", dz, [16, 8], "silu", h=h, **given, **common)
    dh_exact, _, ds_exact, *_ = expected(
        "latent_epilogue_backward", dz, [16, 8], "silu", h=h, **exact, **common
    )
    assert dh.dtype == ds.dtype == F32
    close(dh, dh_exact, GRADIENT, "row")
    close_slope(ds, ds_exact, dh_exact, h, exact)


@pytest.mark.parametrize(("norm", "activation", "dtype"), LATENTS)
def test_latent_epilogue_backward(run: Run, norm: str, activation: str, dtype: torch.dtype) -> None:
    first = NORMS.index(norm) + ACTIVATIONS.index(activation)
    for i, names in enumerate(["h+statistics", "h", "h+v+dv+statistics", "v"]):
        n, ranks = SHAPES[(first + i) % len(SHAPES)]
        width = sum(ranks)
        tensors = {
            "h": rows_apart(normal(n, width, dtype=dtype)),
            # Not h/ρ + gated: that φ′ and the norm come from v must show.
            "v": columns_apart(normal(n, width, dtype=dtype, seed=3)),
            "dv": rows_apart(normal(n, width, dtype=dtype, seed=4)),
        }
        given, exact = affine(norm, width, dtype), affine(norm, width, dtype)
        for name in names.split("+"):
            if name == "statistics":
                settings = online(n, dtype, in_slots=n > 1 and dtype != F64)
                given, exact = given | settings[0], exact | settings[1]
            else:
                given[name] = exact[name] = tensors[name]
        args = normal(n * width, dtype=dtype, seed=5), ranks, activation
        dh, dv, ds, dweight, dbias = run("latent_epilogue_backward", *args, **given)
        right = expected("latent_epilogue_backward", *args, **exact)
        # A norm of one number has next to no gradient: what is left of a difference.
        least = 0.1 if width == 1 else 0.0
        assert dh.dtype == dtype
        close(dh, right[0], GRADIENT, "row", least)
        close(dv, right[1], GRADIENT, "row", least)
        close_slope(ds, right[2], right[0], tensors["h"], exact, least)
        close(dweight, right[3], GRADIENT, "row", least)
        close(dbias, right[4], GRADIENT, "row")


def test_programs_add_up_the_gradients_of_parameters(interpreter: ProcessPoolExecutor) -> None:
    """Each over several of its tiles, and then over the programs."""
    n, ranks = 300, (9, 4)
    dz, v = normal(n * 13), normal(n, 13, seed=1)
    settings = {"v": v, **affine("layernorm", 13, F32)}
    rho = v.square().mean(dim=1, keepdim=True).sqrt()
    calls: list[tuple[str, Any, dict[str, Any]]] = [
        ("latent_epilogue_backward", (dz, ranks, "silu"), settings),
        ("rms_norm_backward", (dz.view(n, 13), v, settings["weight"], rho), {}),
    ]
    for name, args, kwargs in calls:
        found = interpreter.submit(run_there, name, args, kwargs, parts=2).result()
        for value, exact in zip(found, expected(name, *args, **kwargs), strict=True):
            close(value, exact, GRADIENT, "row")


@pytest.mark.parametrize(("activation", "lowest"), [("silu", -80.0), ("gelu", -6.0)])
def test_activations_far_below_zero(run: Run, activation: str, lowest: float) -> None:
    """Relative to each number: 1 + erf would cancel."""
    h = torch.linspace(lowest, 80.0, 4000).view(1, -1)
    z, _ = run("latent_epilogue", h, [4000], activation)
    exact, _ = expected("latent_epilogue", h, [4000], activation)
    # The rounding of erfc's argument x/√2 counts x² times.
    condition = 1 + h.clamp(max=0).flatten() ** 2 if activation == "gelu" else 1.0
    assert ((z.double() - exact).abs() <= 2e-7 * condition * exact.abs() + 1e-45).all()
