"""The Triton kernels against the references in fp64, on the CPU by Triton's interpreter.

Whether Triton interprets is settled when it is imported, for the whole process. All cases
therefore run in one process of their own; tensors go there and back as shared memory, so that what
a kernel writes in place is seen here, strides and aliases included.
"""

from __future__ import annotations

import inspect
import math
import multiprocessing
import os
import re
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack, contextmanager
from itertools import product
from pathlib import Path
from typing import Any
from unittest import mock

import numpy
import pytest
import torch
from torch import Tensor

from boost_layers import ops
from boost_layers.ops import reference

F32, F64, BF16, F16 = torch.float32, torch.float64, torch.bfloat16, torch.float16
FORWARD, GRADIENT = 1e-6, 1e-5
"""Relative errors allowed in fp32."""

pytestmark = pytest.mark.slow

DTYPES = [F32, F64, BF16, F16]

Run = Callable[..., Any]


@contextmanager
def process(**environment: str) -> Iterator[ProcessPoolExecutor]:
    """A fresh process with this environment."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=context) as executor:
        with mock.patch.dict(os.environ, environment, BOOST_OPS="reference"):
            executor.submit(_prepare).result()
        yield executor


def _prepare() -> None:
    torch.set_num_threads(1)
    numpy.seterr(all="ignore")


def _run(name: str, args: Any, kwargs: Any, parts: int = 0) -> Any:
    from boost_layers.ops import triton_kernels

    op = getattr(triton_kernels, name)
    with ExitStack() as stack:
        if parts:
            stack.enter_context(mock.patch.dict(op.__globals__, PARTS=parts))
        return op(*args, **kwargs)


def _names() -> dict[str, inspect.Signature | None]:
    from boost_layers.ops import triton_kernels

    return {name: _signature(triton_kernels, name) for name in triton_kernels.__all__}


def _signature(module: Any, name: str) -> inspect.Signature | None:
    op = getattr(module, name)
    return inspect.signature(op) if callable(op) else None


@pytest.fixture(scope="module")
def interpreter() -> Iterator[ProcessPoolExecutor]:
    pytest.importorskip("triton")
    with process(TRITON_INTERPRET="1") as executor:
        yield executor


@pytest.fixture
def run(interpreter: ProcessPoolExecutor) -> Run:
    def run_there(name: str, *args: Any, **kwargs: Any) -> Any:
        return interpreter.submit(_run, name, args, kwargs).result()

    return run_there


def normal(*shape: int, dtype: torch.dtype = F32, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(shape, generator=generator, dtype=F64).to(dtype)


def rows_apart(x: Tensor, fill: float = 7.0) -> Tensor:
    """The same numbers as the middle columns of a wider matrix."""
    wide = x.new_full((*x.shape[:-1], x.shape[-1] + 5), fill)
    wide[..., 2:-3] = x
    return wide[..., 2:-3]


def columns_apart(x: Tensor) -> Tensor:
    """The same numbers as every second column of a wider matrix."""
    wide = x.new_full((*x.shape[:-1], 2 * x.shape[-1]), math.nan)
    wide[..., ::2] = x
    return wide[..., ::2]


LAYOUTS = {"contiguous": lambda x: x.clone(), "rows": rows_apart, "columns": columns_apart}


def doubled(value: Any) -> Any:
    """The same arguments in fp64, which is exact."""
    if isinstance(value, Tensor):
        return value.double()
    if isinstance(value, list | tuple):
        return type(value)(doubled(each) for each in value)
    if isinstance(value, dict):
        return {key: doubled(each) for key, each in value.items()}
    return F64 if isinstance(value, torch.dtype) else value


def expected(name: str, *args: Any, **kwargs: Any) -> Any:
    return getattr(reference, name)(*doubled(args), **doubled(kwargs))


def close(
    value: Tensor | None,
    exact: Tensor | None,
    tolerance: float = FORWARD,
    of: str = "element",
    least: float = 0.0,
) -> None:
    """Within `tolerance` of the exact number (or of the largest in its row, or of `least`, where
    numbers are differences of larger ones), and in half precision half a unit in the last place
    more; Inf and NaN where they ought to be."""
    if exact is None:
        assert value is None
        return
    assert value is not None and value.shape == exact.shape
    if value.dtype == F64:
        tolerance = 1e-12
    limits = torch.finfo(value.dtype)
    bound = torch.where(exact.abs() > limits.max * (1 + limits.eps / 4), exact * math.inf, exact)
    finite = bound.isfinite()
    assert value[~finite].double().nan_to_num(-1.0).equal(bound[~finite].nan_to_num(-1.0))
    given, bound = (each.masked_fill(~finite, 0.0) for each in (value.double(), bound))
    scale = bound.abs()
    if of == "row" and bound.numel():
        scale = scale.amax(dim=-1, keepdim=True)
    allowed = tolerance * scale.clamp(min=least) + limits.smallest_normal * limits.eps
    if value.dtype in (BF16, F16):
        _, exponent = torch.frexp(bound)
        ulp = torch.ldexp(torch.full_like(bound, limits.eps), exponent - 1)
        allowed = allowed + 0.501 * ulp
    wrong = (given - bound).abs() > allowed
    assert not wrong.any(), f"{given[wrong][:5]} instead of {bound[wrong][:5]}"


def test_every_op_is_there_with_its_signature(interpreter: ProcessPoolExecutor) -> None:
    names = {name: _signature(reference, name) for name in reference.__all__}
    assert interpreter.submit(_names).result() == names


def _compile_launches() -> list[str]:
    """Compiles what a few calls launch for a GPU that need not be there; the kernels' names."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    from triton.runtime.jit import JITFunction

    from boost_layers.ops import triton_kernels as ops

    compiled = []

    def run(kernel: Any, *args: Any, grid: Any, warmup: bool, num_warps: int = 4, **more: Any):
        types, constants = {}, dict(more)
        for name, value in zip(kernel.arg_names, args, strict=False):
            if isinstance(value, Tensor):
                types[name] = "*" + {F32: "fp32", BF16: "bf16"}[value.dtype]
            elif value is None:
                constants[name] = value
            else:
                types[name] = "i32"
        types.update(dict.fromkeys(constants, "constexpr"))
        source = ASTSource(kernel, {name: types[name] for name in kernel.arg_names}, constants)
        triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": num_warps})
        compiled.append(kernel.__name__)

    JITFunction.run = run  # type: ignore[method-assign]
    x, wide, weight = normal(4, 96, dtype=BF16), normal(4, 1), normal(96, dtype=BF16)
    slots = torch.empty(4, 6, dtype=BF16)
    ops.residual_add_rms_stats(x, x.clone(), slots)
    ops.read_statistics(slots)
    ops.residual_gradient(x, x, wide)
    online = {"statistics": slots, "hidden_size": 96, "eps": 1e-5}
    norm: dict[str, Any] = {"norm": "layernorm", "weight": weight, "bias": weight}
    ops.latent_epilogue(x, [64, 32], "gelu", gated=x, **norm, **online)
    ops.latent_epilogue_backward(x.flatten(), [64, 32], "silu", h=x, v=x, dv=x, **norm, **online)
    ops.gated_product(x, x, "swiglu")
    ops.gated_product_backward(x, x, x, "swiglu")
    heads = normal(4, 1, 3, 32, dtype=BF16)
    ops.rotary_backward([heads], 1, slots, slots, interleaved=True)
    ops.rms_norm(x, weight, 1e-5)
    ops.rms_norm_backward(x, x, weight, wide, x)
    return compiled


def test_every_kernel_compiles(tmp_path: Path) -> None:
    """The interpreter takes what the compiler refuses."""
    pytest.importorskip("triton")
    environment = {"TRITON_CACHE_DIR": str(tmp_path), "TRITON_DISABLE_LINE_INFO": "1"}
    with process(TRITON_INTERPRET="0", **environment) as executor:
        compiled = executor.submit(_compile_launches).result()
    sources = (Path(ops.__file__).parent / "triton_kernels").glob("*.py")
    kernels = re.findall(r"def (\w+_kernel)\(", "".join(path.read_text() for path in sources))
    assert sorted(compiled) == sorted(kernels) and kernels


def mantissas() -> Tensor:
    """Numbers whose squares have all kinds of last 16 bits, which decide how bf16 rounds: those at
    and beside a tie or a bf16 number, and any."""
    generator = torch.Generator().manual_seed(7)
    x = torch.rand(1_000_000, generator=generator) + 1.0
    low = (x * x).view(torch.int32) & 0xFFFF
    at_ties = torch.cat([x[low == each][:9] for each in (0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF)])
    return torch.cat([at_ties, x[:4000]])


@pytest.mark.parametrize(("exponent", "tp_rank"), [(0, 0), (-50, 3), (62, 1)])
def test_slots_hold_every_bit_of_s(run: Run, exponent: int, tp_rank: int) -> None:
    x = (mantissas() * 2.0**exponent)[:: 1 if exponent == 0 else 5].view(-1, 1)
    slots = torch.full((len(x), 12), math.nan, dtype=BF16)
    s = run("rms_stats", x, slots, tp_rank)
    assert s.equal(x * x) and s.isfinite().all()
    own = slots[:, 3 * tp_rank : 3 * tp_rank + 3].float()
    assert ((own[:, 0] + own[:, 1]) + own[:, 2]).equal(s[:, 0])
    assert slots.count_nonzero() == own.count_nonzero()
    parts = torch.empty_like(slots)
    reference.rms_stats(x, parts, tp_rank)
    assert slots.equal(parts)
    assert run("read_statistics", slots).equal(s)


def test_slots_of_what_bf16_cannot_hold(run: Run) -> None:
    x = torch.tensor([[math.inf], [math.nan], [1e30], [1e-30], [0.0]])
    slots = torch.empty(5, 3, dtype=BF16)
    s = run("rms_stats", x, slots)
    assert s.nan_to_num(-1.0).equal((x * x).nan_to_num(-1.0))
    assert run("read_statistics", slots).flatten().isnan().tolist() == [True] * 3 + [False] * 2
    assert run("read_statistics", slots)[3:].equal(s[3:])


def test_slots_in_a_strided_block_and_wide_ones(run: Run) -> None:
    x = normal(7, 20)
    s = run("rms_stats", x)
    for layout in LAYOUTS.values():
        for slots in (torch.zeros(7, 6, dtype=BF16), torch.zeros(7, 1)):
            block = layout(slots)
            assert run("rms_stats", x, block, 1 if slots.shape[1] > 1 else 0).equal(s)
            assert run("read_statistics", block).equal(s)
    framed = rows_apart(torch.zeros(7, 3, dtype=BF16))
    run("rms_stats", x, framed)
    assert (framed._base[:, :2] == 7).all() and (framed._base[:, -3:] == 7).all()


def test_slots_add_up_in_the_order_of_the_ranks(run: Run) -> None:
    s = torch.stack([normal(300) ** 2, normal(300) ** 2 * 1e-6, normal(300) ** 2 * 1e3], dim=1)
    block = torch.zeros(300, 9, dtype=BF16)
    for rank in range(3):
        slots = torch.empty_like(block)
        reference.rms_stats(s[:, rank : rank + 1].sqrt(), slots, rank)
        block += slots
    parts = block.float().view(300, 3, 3).sum(dim=2)
    assert run("read_statistics", block).flatten().equal((parts[:, 0] + parts[:, 1]) + parts[:, 2])


@pytest.mark.parametrize("dtype", DTYPES)
def test_residual_add_rms_stats(run: Run, dtype: torch.dtype) -> None:
    # One is wider than a block.
    shapes = [(1, 1, "rows"), (7, 33, "rows"), (40, 64, "columns"), (2, 8200, "contiguous")]
    for n, k, layout in shapes:
        x, delta = normal(n, k, dtype=dtype), normal(n, k, dtype=dtype, seed=1)
        moved, given = LAYOUTS[layout](x), LAYOUTS[layout](delta)
        s = run("residual_add_rms_stats", moved, given)
        assert moved.equal(x + delta) and given.equal(delta)
        assert s.dtype == reference.wide(dtype)
        close(s, moved.double().square().sum(dim=1, keepdim=True))
        assert run("rms_stats", moved).equal(s)
        if layout == "rows":
            assert (moved._base[:, :2] == 7).all() and (moved._base[:, -3:] == 7).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_residual_gradient(run: Run, dtype: torch.dtype) -> None:
    for (n, k), layout in zip([(1, 1), (7, 33), (3, 3000)], LAYOUTS.values(), strict=True):
        dresidual, x = normal(n, k, dtype=dtype), normal(n, k, dtype=dtype, seed=1)
        args = layout(dresidual), layout(x), normal(n, 1, dtype=reference.wide(dtype))
        dx = run("residual_gradient", *args)
        assert dx.dtype == dtype and dx.is_contiguous()
        close(dx, expected("residual_gradient", *args), of="row")


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
        found = interpreter.submit(_run, name, args, kwargs, parts=2).result()
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
