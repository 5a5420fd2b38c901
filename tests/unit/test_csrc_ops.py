"""Every op as csrc has it, and as the reference has it, against the formula in its docstring.

The formulas (tests/support/op_cases.py and here) are dense and in fp64, their gradients from
autograd. fp32 must agree to 1e-6, fp64 to 1e-12; bf16 and fp16 must be within a unit in the last
place of what is exact for the given numbers. Where the plain reference rounds on the way, it says
so in its `rounding`, and only the reference gets it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from boost_layers import ops
from boost_layers.ops import dispatch
from tests.support.op_cases import (
    BORDER,
    DTYPES,
    EPILOGUES,
    GATED,
    HALVES,
    LATENT_NORM_EPS,
    LAYOUTS,
    Epilogue,
    EpilogueNumbers,
    Sample,
    assert_close,
    assert_product,
    batch_first,
    border_is_untouched,
    contiguous,
    every_second,
    exact,
    in_wider_rows,
    leaf,
    normal,
    operator,
    operator_samples,
    rms_normed,
    rotation,
    transposed,
    wide,
)

SIZES = [(0, 3), (1, 1), (3, 17), (17, 33), (33, 130)]
FLOATS = pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d).removeprefix("torch."))
HALF = pytest.mark.parametrize("dtype", HALVES, ids=lambda d: str(d).removeprefix("torch."))
SIZED = pytest.mark.parametrize("size", SIZES, ids=lambda s: f"{s[0]}x{s[1]}")
LAID_OUT = pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
DEVICES = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]
SERVED = [(name, device) for device in DEVICES for name in ("csrc", "reference")]

no_csrc = dispatch.problem_of_csrc()


@dataclass(frozen=True)
class Served:
    """The implementation under test, and the device it serves."""

    name: str
    device: str

    def normal(self, *shape: int, dtype: torch.dtype = torch.float64, seed: int = 0) -> Tensor:
        return normal(*shape, dtype=dtype, device=self.device, seed=seed)

    def rounding(self, share: float) -> float:
        """The share of a row that the reference may lose by rounding on the way."""
        return share if self.name == "reference" else 0.0


def skip_if_not_there(name: str, device: str) -> None:
    if name == "csrc" and no_csrc is not None:
        pytest.skip(f"csrc: {no_csrc}")
    if name == "csrc" and device == "cuda" and not dispatch.cuda_architectures():
        pytest.skip("csrc is built without CUDA")


@pytest.fixture(params=SERVED, ids="-".join)
def served(request: pytest.FixtureRequest) -> Iterator[Served]:
    name, device = request.param
    skip_if_not_there(name, device)
    with ops.use(name, device):
        yield Served(name, device)


@pytest.fixture(params=DEVICES)
def csrc_device(request: pytest.FixtureRequest) -> Iterator[str]:
    skip_if_not_there("csrc", request.param)
    with ops.use("csrc", request.param):
        yield request.param


@pytest.mark.skipif(DEVICES == ["cpu"], reason="no GPU, where every case here runs as well")
def test_csrc_is_built_for_the_gpu() -> None:
    assert dispatch.cuda_architectures()


def sum_of_squares(x: Tensor) -> Tensor:
    return exact(x).square().sum(dim=1, keepdim=True)


def decoded(slots: Tensor) -> Tensor:
    """Each rank's hi + mid + lo `[n, T]`, exactly."""
    return exact(slots).unflatten(1, (-1, 3)).sum(dim=-1)


# Kernel 1: the residual's sum, its statistics and their slots.


@FLOATS
@SIZED
def test_rms_stats(served: Served, size: tuple[int, int], dtype: torch.dtype) -> None:
    x = served.normal(*size, dtype=dtype)
    s = ops.rms_stats(x)
    assert s.dtype == wide(dtype)
    assert_close(s, sum_of_squares(x))


@FLOATS
@SIZED
def test_residual_add(served: Served, size: tuple[int, int], dtype: torch.dtype) -> None:
    before = served.normal(*size, dtype=dtype)
    x, delta = before.clone(), served.normal(*size, dtype=dtype, seed=1)
    s = ops.residual_add_rms_stats(x, delta)
    assert torch.equal(x, before + delta)
    assert_close(s, sum_of_squares(x))


@LAID_OUT
@FLOATS
def test_statistics_of_any_layout(
    served: Served, dtype: torch.dtype, layout: Callable[[Tensor], Tensor]
) -> None:
    x, delta = served.normal(5, 33, dtype=dtype), served.normal(5, 33, dtype=dtype, seed=1)
    assert_close(ops.rms_stats(layout(x)), sum_of_squares(x))
    target = in_wider_rows(x)
    s = ops.residual_add_rms_stats(target, layout(delta))
    assert torch.equal(target, x + delta)
    assert border_is_untouched(target)
    assert_close(s, sum_of_squares(target))
    ds = served.normal(5, 1, dtype=wide(dtype), seed=2)
    dx = ops.residual_gradient(layout(delta), layout(x), ds)
    assert_close(dx, exact(delta) + 2 * exact(ds) * exact(x))


@pytest.mark.parametrize("tp_size", [1, 2, 4])
@pytest.mark.parametrize("n", [0, 1, 33])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_slots_of_all_ranks_add_up(
    served: Served, dtype: torch.dtype, n: int, tp_size: int
) -> None:
    """Every rank writes its slots behind its latents; their sum in bf16 holds every S."""
    reduced, sums = torch.zeros(n, 3 * tp_size, dtype=torch.bfloat16, device=served.device), []
    for rank in range(tp_size):
        x, delta = (served.normal(n, 17, dtype=dtype, seed=10 * rank + i) for i in (0, 1))
        slots = in_wider_rows(torch.full_like(reduced, math.nan))
        alone = in_wider_rows(torch.full_like(reduced, math.nan))
        s = ops.residual_add_rms_stats(x, delta, slots, rank)
        assert torch.equal(ops.rms_stats(x, alone, rank), s)
        assert torch.equal(slots, alone), "every column is written"
        assert border_is_untouched(slots) and border_is_untouched(alone)
        reduced += slots
        sums.append(s)
    own = torch.cat(sums, dim=1)
    assert torch.equal(decoded(reduced), exact(own)), "bit for bit"
    total = ops.read_statistics(in_wider_rows(reduced))
    assert total.dtype == torch.float32
    if tp_size == 1:
        assert torch.equal(total, own)
    assert_close(total, exact(own).sum(dim=1, keepdim=True))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16])
def test_a_wide_slot_is_the_sum_itself(served: Served, dtype: torch.dtype) -> None:
    x = served.normal(17, 33, dtype=dtype)
    slot = in_wider_rows(torch.full_like(x[:, :1], math.nan, dtype=wide(dtype)))
    s = ops.rms_stats(x, slot)
    assert torch.equal(slot, s)
    assert border_is_untouched(slot)
    assert torch.equal(ops.read_statistics(slot), s)


def test_slots_hold_sums_of_every_exponent(served: Served) -> None:
    """hi + mid + lo == S bit for bit wherever the last bit of S is a bf16 number, which is down to
    2⁻¹¹⁰; below, to half of bf16's smallest number for each of three slots' last bit. S whose `hi`
    is Inf decodes as NaN."""
    exponents = torch.arange(-75, 64).repeat_interleave(257)
    mantissas = 1 + torch.rand(len(exponents), generator=torch.Generator().manual_seed(0))
    mantissas[::257], mantissas[1::257] = 1.0, 2 - 2.0**-23
    x = torch.ldexp(mantissas, exponents).view(-1, 1).to(served.device)
    slots = torch.empty(len(x), 3, dtype=torch.bfloat16, device=served.device)
    s = ops.rms_stats(x, slots)
    found, whole = decoded(slots), exact(s)
    overflows = whole > 3.396e38
    assert overflows.any() and found[overflows].isnan().all()
    assert ops.read_statistics(slots)[overflows.to(served.device)].isnan().all()
    ordinary = ~overflows & (whole >= 2.0**-110)
    assert ordinary.sum() > 20_000
    assert torch.equal(found[ordinary], whole[ordinary])
    assert torch.equal(ops.read_statistics(slots)[ordinary], s[ordinary])
    tiny = whole < 2.0**-110
    assert tiny.any() and ((found - whole)[tiny].abs() <= 2.0**-134).all()


@FLOATS
@SIZED
def test_residual_gradient(served: Served, size: tuple[int, int], dtype: torch.dtype) -> None:
    n, _ = size
    dresidual, x = served.normal(*size, dtype=dtype), served.normal(*size, dtype=dtype, seed=1)
    ds = served.normal(n, 1, dtype=wide(dtype), seed=2)
    dx = ops.residual_gradient(dresidual, x, ds)
    tokens = leaf(exact(x))
    s = tokens.square().sum(dim=1, keepdim=True)
    (expected,) = torch.autograd.grad([tokens, s], tokens, [exact(dresidual), exact(ds)])
    assert_close(dx, expected)


# Kernel 2: the latent epilogue.


def epilogue(numbers: EpilogueNumbers) -> tuple[Tensor, Tensor | None]:
    case = numbers.case
    return ops.latent_epilogue(
        numbers.h,
        case.ranks,
        case.activation,
        gated=numbers.gated,
        dtype=numbers.dz.dtype,
        **numbers.settings,
    )


def check_epilogue(numbers: EpilogueNumbers) -> Tensor | None:
    z, v = epilogue(numbers)
    if numbers.gated is None:
        assert v is None
    else:
        assert v is not None
        assert_close(v, numbers.formula().v)
    assert z.dtype == numbers.dz.dtype and z.is_contiguous()
    members = numbers.formula(v).members
    parts = z.split([m.numel() for m in members])
    for part, member in zip(parts, members, strict=True):
        assert_close(part.view(member.shape), member)
    return v


def check_epilogue_backward(numbers: EpilogueNumbers, v: Tensor | None) -> None:
    case = numbers.case
    dh, dv, ds, dweight, dbias = ops.latent_epilogue_backward(
        numbers.dz,
        case.ranks,
        case.activation,
        h=numbers.h if v is None or case.statistics is not None else None,
        v=v,
        dv=numbers.dv,
        **numbers.settings,
    )
    formula = numbers.formula(v)
    assert formula.dh is not None
    h_dtype = numbers.h.dtype if v is None or case.statistics is not None else numbers.dz.dtype
    assert dh.dtype == h_dtype
    assert_close(dh, formula.dh, terms=formula.dh_terms)
    assert (dv is None) == (v is None)
    if dv is not None:
        assert formula.dv is not None and dv.dtype == numbers.dz.dtype
        assert_close(dv, formula.dv, terms=formula.dv_terms)
    for gradient, expected, terms in (
        (ds, formula.ds, formula.ds_terms),
        (dweight, formula.dweight, formula.dweight_terms),
        (dbias, formula.dbias, formula.dbias_terms),
    ):
        assert (gradient is None) == (expected is None)
        if gradient is not None and expected is not None:
            assert_close(gradient, expected, terms=terms)
    if ds is not None:
        assert ds.dtype == wide(numbers.dz.dtype)


@FLOATS
@pytest.mark.parametrize("case", EPILOGUES, ids=str)
def test_latent_epilogue(served: Served, case: Epilogue, dtype: torch.dtype) -> None:
    numbers = EpilogueNumbers(case, dtype, served.device)
    given = numbers.h.clone()
    check_epilogue_backward(numbers, check_epilogue(numbers))
    assert torch.equal(numbers.h, given)


@LAID_OUT
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_latent_epilogue_of_any_layout(
    served: Served, dtype: torch.dtype, layout: Callable[[Tensor], Tensor]
) -> None:
    case = Epilogue((17, 5, 33), "silu", "layernorm", statistics=2, gated=True)
    numbers = EpilogueNumbers(case, dtype, served.device, layout)
    v = check_epilogue(numbers)
    assert v is not None
    check_epilogue_backward(numbers, layout(v))


def test_the_latents_may_stand_between_others_in_the_message(served: Served) -> None:
    """h and its statistics as callers have them: columns of one reduced message."""
    case = Epilogue((17,), "silu", statistics=2, n=9)
    numbers = EpilogueNumbers(case, torch.bfloat16, served.device)
    assert numbers.statistics is not None
    message = torch.cat((numbers.h, numbers.h, numbers.statistics), dim=1)
    apart = epilogue(numbers)[0]
    numbers.h, numbers.statistics = message[:, 17:34], message[:, 34:]
    assert torch.equal(epilogue(numbers)[0], apart)


# Kernel 4's weights: γ folded into the down-projections.


@FLOATS
@pytest.mark.parametrize("k", [1, 17, 130])
@pytest.mark.parametrize("ranks", [(1,), (33,), (17, 1, 5)], ids=str)
def test_fold_gamma(served: Served, ranks: tuple[int, ...], k: int, dtype: torch.dtype) -> None:
    gamma = 1 + served.normal(k, dtype=dtype)
    weights = [served.normal(r, k, dtype=dtype, seed=r) for r in ranks]
    leaves = leaf(exact(gamma)), *(leaf(exact(a)) for a in weights)
    expected = torch.cat([a * leaves[0] for a in leaves[1:]])
    assert_close(ops.fold_gamma(gamma, weights), expected.detach())
    for m_dtype in {dtype, wide(dtype)}:
        m = served.normal(sum(ranks), k, dtype=m_dtype, seed=3)
        dgamma, *dweights = torch.autograd.grad(expected, leaves, exact(m), retain_graph=True)
        found, of_gamma = ops.fold_gamma_backward(m, gamma, weights)
        # The reference rounds M∘A to the dtype of M before it is added up.
        narrow = served.rounding(1 / 64 if m_dtype in HALVES else 0.0)
        assert of_gamma.dtype == dtype
        terms = (exact(m) * exact(torch.cat(weights))).abs().sum(dim=0).norm()
        assert_close(of_gamma, dgamma, terms=terms, rounding=narrow)
        for value, gradient in zip(found, dweights, strict=True):
            assert value.dtype == dtype
            assert_close(value, gradient)


@FLOATS
def test_fold_gamma_adds_to_main_gradients(served: Served, dtype: torch.dtype) -> None:
    gamma, ranks = 1 + served.normal(33, dtype=dtype), (17, 1, 5)
    weights = [served.normal(r, 33, dtype=dtype, seed=r) for r in ranks]
    for m_dtype in {dtype, wide(dtype)}:
        m = served.normal(sum(ranks), 33, dtype=m_dtype, seed=3)
        mains = [served.normal(r, 33, dtype=wide(dtype), seed=40 + r) for r in ranks]
        parts = exact(m).split(list(ranks))
        expected = [exact(g) + p * exact(gamma) for g, p in zip(mains, parts, strict=True)]
        dgamma = ops.fold_gamma_accumulate(m, gamma, weights, mains)
        for value, gradient in zip(mains, expected, strict=True):
            assert_close(value, gradient)
        _, alone = ops.fold_gamma_backward(m, gamma, weights)
        assert torch.equal(dgamma, alone)


@LAID_OUT
def test_fold_gamma_of_any_layout(served: Served, layout: Callable[[Tensor], Tensor]) -> None:
    gamma, weights = served.normal(17), [served.normal(5, 17), served.normal(3, 17)]
    m = served.normal(8, 17, seed=1)
    given = every_second(gamma), [layout(a) for a in weights]
    assert torch.equal(ops.fold_gamma(*given), ops.fold_gamma(gamma, weights))
    dweights, dgamma = ops.fold_gamma_backward(layout(m), *given)
    expected, of_gamma = ops.fold_gamma_backward(m, gamma, weights)
    assert all(torch.equal(a, b) for a, b in zip(dweights, expected, strict=True))
    assert_close(dgamma, exact(of_gamma))


# Kernel 3: up-projections.

UP_SHAPES = [
    ((1, 1),),
    ((33, 17),),
    ((17, 3), (17, 3), (17, 3)),
    ((130, 33), (17, 33), (17, 33)),
    ((5, 1), (3, 17)),
]


@FLOATS
@pytest.mark.parametrize("n", [0, 1, 33])
@pytest.mark.parametrize("shapes", UP_SHAPES, ids=str)
def test_up_projection(
    served: Served, shapes: tuple[tuple[int, int], ...], n: int, dtype: torch.dtype
) -> None:
    weights = [served.normal(*shape, dtype=dtype, seed=i) for i, shape in enumerate(shapes)]
    zs = [served.normal(n, r, dtype=dtype, seed=10 + i) for i, (_, r) in enumerate(shapes)]
    dys = [served.normal(n, o, dtype=dtype, seed=20 + i) for i, (o, _) in enumerate(shapes)]
    z = torch.cat([part.flatten() for part in zs])
    ys = ops.up_projection(z, weights)
    dz = ops.up_projection_dgrad([every_second(dy) for dy in dys], weights)
    ranks = [r for _, r in shapes]
    dweights = ops.up_projection_wgrad([in_wider_rows(dy) for dy in dys], z, ranks)
    dzs = [p.view(-1, r) for p, r in zip(dz.split([n * r for r in ranks]), ranks, strict=True)]
    for i, (y, part, weight, dy) in enumerate(zip(ys, zs, weights, dys, strict=True)):
        assert_product(y, part, weight.T)
        assert_product(dzs[i], dy, weight)
        assert_product(dweights[i], dy.T, part)
    start = 0
    for y in ys:
        assert y.is_contiguous() and y.storage_offset() == start, "one after the other"
        start += y.numel()


def test_up_projection_of_any_layout(served: Served) -> None:
    weights = [served.normal(5, 3, seed=1), served.normal(4, 2, seed=2)]
    z = served.normal(7 * 5)
    expected = ops.up_projection(z, weights)
    for layout in (in_wider_rows, transposed, every_second):
        given = [layout(b) for b in weights]
        for y, same in zip(ops.up_projection(z, given), expected, strict=True):
            assert_close(y, exact(same))
        dz = ops.up_projection_dgrad([layout(y) for y in expected], given)
        assert_close(dz, exact(ops.up_projection_dgrad(expected, weights)))


@FLOATS
@pytest.mark.parametrize("n", [0, 1, 33])
def test_up_projection_adds_to_main_gradients(served: Served, n: int, dtype: torch.dtype) -> None:
    widths, ranks = (17, 130), [33, 3]
    dys = [served.normal(n, o, dtype=dtype, seed=o) for o in widths]
    zs = [served.normal(n, r, dtype=dtype, seed=r) for r in ranks]
    mains = [
        served.normal(o, r, dtype=wide(dtype), seed=9) for o, r in zip(widths, ranks, strict=True)
    ]
    products = [exact(dy).T @ exact(part) for dy, part in zip(dys, zs, strict=True)]
    expected = [exact(main) + product for main, product in zip(mains, products, strict=True)]
    z = torch.cat([part.flatten() for part in zs])
    ops.up_projection_accumulate(dys, z, mains)
    for main, gradient, product in zip(mains, expected, products, strict=True):
        # The reference rounds the product before it is added.
        size = product.norm(dim=1, keepdim=True) / gradient.norm(dim=1, keepdim=True)
        rounding = served.rounding(1 / 128 if dtype in HALVES else 0.0)
        assert_close(main, gradient, rounding=rounding * size.max().item())


# Kernel 4: down-projections.

TOKENS = {
    "[n, k]": lambda x: x[:, 0],
    "[s, b, k]": contiguous,
    "[s, b, k] of [b, s, k]": batch_first,
    "wider rows": in_wider_rows,
    "wider rows of [b, s, k]": lambda x: batch_first(in_wider_rows(batch_first(x))),
}
TOKEN_LAYOUTS = pytest.mark.parametrize("tokens", TOKENS.values(), ids=TOKENS)


def as_matrix(x: Tensor) -> Tensor:
    return exact(x).reshape(-1, x.shape[-1])


@FLOATS
@TOKEN_LAYOUTS
@pytest.mark.parametrize("size", [(0, 2), (1, 1), (1, 3), (17, 1), (17, 2)], ids=str)
def test_down_projection(
    served: Served,
    size: tuple[int, int],
    tokens: Callable[[Tensor], Tensor],
    dtype: torch.dtype,
) -> None:
    (s, b), k, w = size, 33, 17
    x, weight = tokens(served.normal(s, b, k, dtype=dtype)), served.normal(w, k, dtype=dtype)
    for out_dtype in {dtype, wide(dtype)}:
        message = torch.full((*x.shape[:-1], w), math.nan, dtype=out_dtype, device=served.device)
        out = in_wider_rows(message)
        ops.down_projection(x, weight, out)
        assert_product(out, x, weight.T)
        assert border_is_untouched(out)


@FLOATS
@pytest.mark.parametrize(("n", "k", "w"), [(0, 3, 2), (1, 1, 1), (33, 130, 17), (17, 1, 3)])
def test_down_projections_input_gradient(
    served: Served, n: int, k: int, w: int, dtype: torch.dtype
) -> None:
    dh, weight = served.normal(n, w, dtype=dtype), served.normal(w, k, dtype=dtype, seed=1)
    expected = exact(dh) @ exact(weight)
    assert_product(ops.down_projection_dgrad(every_second(dh), weight), dh, weight)
    for layout in (contiguous, in_wider_rows):
        filled = served.normal(n, k, dtype=dtype, seed=2)
        dx = layout(filled.clone())
        assert ops.down_projection_dgrad(in_wider_rows(dh), transposed(weight), dx) is dx
        assert_close(dx, exact(filled) + expected)
        assert layout is contiguous or border_is_untouched(dx)


@FLOATS
@TOKEN_LAYOUTS
@pytest.mark.parametrize("size", [(0, 2), (3, 0), (1, 1), (17, 3)], ids=str)
def test_down_projections_weight_gradient(
    served: Served,
    size: tuple[int, int],
    tokens: Callable[[Tensor], Tensor],
    dtype: torch.dtype,
) -> None:
    (s, b), k, w = size, 33, 17
    if b == 0 and tokens is TOKENS["[n, k]"]:
        pytest.skip("a matrix has no batch")
    x = tokens(served.normal(s, b, k, dtype=dtype))
    dh = served.normal(s, b, w, dtype=dtype, seed=1)
    dh = dh[:, 0] if x.dim() == 2 else dh
    m = ops.down_projection_wgrad(dh, x)
    # Where the tokens of a batch are apart it is added up from one GEMM for each of its sequences.
    rounding = b / 128 if x.dim() == 3 and m.dtype in HALVES else 0.0
    assert_product(m, as_matrix(dh).T, as_matrix(x), rounding=rounding)

    main = served.normal(w, k, dtype=wide(dtype), seed=2)
    expected = exact(main) + as_matrix(dh).T @ as_matrix(x)
    ops.down_projection_accumulate(dh, x, main)
    # The reference rounds the product before it is added.
    assert_close(main, expected, rounding=served.rounding(1 / 128 if dtype in HALVES else 0.0))


# Kernel 5: the gated product, and rotary embedding.


@FLOATS
@SIZED
@pytest.mark.parametrize("kind", GATED)
def test_gated_product(
    served: Served, kind: str, size: tuple[int, int], dtype: torch.dtype
) -> None:
    gate = 2 * served.normal(*size, dtype=dtype)
    up, dm = (served.normal(*size, dtype=dtype, seed=i) for i in (1, 2))
    leaves = leaf(exact(gate)), leaf(exact(up))
    expected = GATED[kind](*leaves)
    gradients = torch.autograd.grad(expected, leaves, exact(dm))
    # The reference rounds SiLU, and dm∘up, by themselves.
    rounding = served.rounding(1 / 128 if kind == "swiglu" and dtype in HALVES else 0.0)
    assert_close(ops.gated_product(gate, up, kind), expected.detach(), rounding=rounding)
    found = ops.gated_product_backward(dm, gate, up, kind)
    for value, gradient in zip(found, gradients, strict=True):
        assert_close(value, gradient, rounding=rounding)


@LAID_OUT
@pytest.mark.parametrize("kind", GATED)
def test_gated_product_of_any_layout(
    served: Served, kind: str, layout: Callable[[Tensor], Tensor]
) -> None:
    gate, up, dm = (served.normal(5, 33, dtype=torch.float32, seed=i) for i in range(3))
    assert_close(
        ops.gated_product(layout(gate), layout(up), kind), exact(ops.gated_product(gate, up, kind))
    )
    found = ops.gated_product_backward(layout(dm), layout(gate), layout(up), kind)
    for value, same in zip(found, ops.gated_product_backward(dm, gate, up, kind), strict=True):
        assert_close(value, exact(same))


HEADS = [(6, 6), (10, 4), (2, 2), (64, 64), (70, 34), (5, 0)]


def turned(t: Tensor, angles: Tensor, interleaved: bool) -> Tensor:
    """Every pair of t `[s, b, h, e]` as a complex number, times exp(i·angle)."""
    p = 2 * angles.shape[1]
    rest = t[..., p:]
    if interleaved:
        pairs = torch.complex(t[..., 0:p:2], t[..., 1:p:2])
    else:
        pairs = torch.complex(t[..., : p // 2], t[..., p // 2 : p])
    pairs = pairs * torch.exp(1j * angles)[:, None, None, :]
    if interleaved:
        return torch.cat((torch.view_as_real(pairs).flatten(-2), rest), dim=-1)
    return torch.cat((pairs.real, pairs.imag, rest), dim=-1)


def heads_of(served: Served, s: int, b: int, e: int, dtype: torch.dtype) -> list[Tensor]:
    """q, k and v of grouped-query attention as their one up-projection leaves them, and k in the
    layout of `[b, s, h, e]`."""
    flat = served.normal(s, b, 5 * e, dtype=dtype)
    q, k, v = flat.split([3 * e, e, e], dim=-1)
    return [
        q.unflatten(-1, (3, e)),
        batch_first(k).unflatten(-1, (1, e)),
        v.unflatten(-1, (1, e)),
    ]


@FLOATS
@pytest.mark.parametrize("interleaved", [True, False], ids=["adjacent", "halves"])
@pytest.mark.parametrize(("e", "p"), HEADS)
@pytest.mark.parametrize(("s", "b"), [(0, 1), (1, 1), (5, 2)])
def test_rotary(
    served: Served, s: int, b: int, e: int, p: int, interleaved: bool, dtype: torch.dtype
) -> None:
    heads = heads_of(served, s, b, e, dtype)
    _, both = rotation(s, p, interleaved)
    cos, sin = both.cos().to(served.device, dtype), both.sin().to(served.device, dtype)
    # cos and sin are rounded when the op gets them: the formula takes the same.
    first, second = slice(0, p // 2), slice(p // 2, p)
    if interleaved:
        first, second = slice(0, p, 2), slice(1, p, 2)
    c, s_ = exact(cos)[:, None, None, first], exact(sin)[:, None, None, first]

    def expected(t: Tensor, sign: int) -> Tensor:
        out, x = exact(t), exact(t)
        out[..., first] = x[..., first] * c - sign * x[..., second] * s_
        out[..., second] = x[..., second] * c + sign * x[..., first] * s_
        return out

    # The reference rounds one of the two products.
    rounding = served.rounding(1 / 128 if dtype in HALVES else 0.0)
    rotated = [t.clone(memory_format=torch.preserve_format) for t in heads[:2]]
    ops.rotary_(rotated, cos, sin, interleaved=interleaved)
    for value, t in zip(rotated, heads, strict=False):
        assert_close(value, expected(t, 1), rounding=rounding)
    if dtype == torch.float64:
        angles, _ = rotation(s, p, interleaved)
        assert_close(rotated[0], turned(exact(heads[0]), angles, interleaved))

    back = ops.rotary_backward(heads, 2, cos, sin, interleaved=interleaved)
    start = 0
    for i, (value, t) in enumerate(zip(back, heads, strict=True)):
        assert_close(value, expected(t, -1) if i < 2 else exact(t), rounding=rounding)
        assert value.is_contiguous() and value.storage_offset() == start, "one after the other"
        start += value.numel()


@pytest.mark.parametrize("interleaved", [True, False], ids=["adjacent", "halves"])
def test_rotary_in_place_leaves_what_lies_around(served: Served, interleaved: bool) -> None:
    plain = served.normal(5, 2, 3, 10, dtype=torch.float32)
    around = plain.new_full((5, 2, 4, 13), BORDER)
    inside = around[:, :, 1:, 2:12]
    inside.copy_(plain)
    _, both = rotation(5, 6, interleaved)
    cos, sin = (f().to(served.device, torch.float32) for f in (both.cos, both.sin))
    ops.rotary_([inside], cos, sin, interleaved=interleaved)
    ops.rotary_([plain], every_second(cos), transposed(sin), interleaved=interleaved)
    assert torch.equal(inside, plain)
    inside.fill_(BORDER)
    assert (around == BORDER).all()


def test_rotary_of_a_rank_without_query_heads(served: Served) -> None:
    none, k = served.normal(5, 2, 0, 4), served.normal(5, 2, 1, 4)
    cos, sin = served.normal(5, 4, seed=1), served.normal(5, 4, seed=2)
    _, back = ops.rotary_backward([none, k], 2, cos, sin, interleaved=False)
    (expected,) = ops.rotary_backward([k], 1, cos, sin, interleaved=False)
    assert torch.equal(back, expected)
    both, alone = k.clone(), k.clone()
    ops.rotary_([none, both], cos, sin, interleaved=False)
    ops.rotary_([alone], cos, sin, interleaved=False)
    assert torch.equal(both, alone)


def test_rotary_of_asymmetric_tables_is_transposed_backward(served: Served) -> None:
    """Backward is the transpose of forward, even if a pair's two sines or cosines differ."""
    for interleaved in (True, False):
        t, dt = served.normal(3, 1, 2, 6), served.normal(3, 1, 2, 6, seed=1)
        cos, sin = served.normal(3, 4, seed=2), served.normal(3, 4, seed=3)
        (back,) = ops.rotary_backward([dt], 1, cos, sin, interleaved=interleaved)
        before = (t * back).sum(dim=(1, 2, 3))
        ops.rotary_([t], cos, sin, interleaved=interleaved)
        assert_close((t * dt).sum(dim=(1, 2, 3)), exact(before), terms=10.0)


# RMSNorm of whole tokens.


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


# One token's NaN or Inf.


def token_ops(n: int, k: int, device: str, dtype: torch.dtype) -> dict[str, TokenOp]:
    """Ops whose results have a row for each token, by name."""

    def t(*shape: int, seed: int = 0, dtype: torch.dtype = dtype) -> Tensor:
        return normal(*shape, dtype=dtype, device=device, seed=seed)

    def latents(z: Tensor) -> list[Tensor]:
        return [part.view(n, -1) for part in z.split([n * r for r in ranks])]

    def epilogue(h: Tensor, s: Tensor, gated: Tensor) -> list[Tensor]:
        settings = {"statistics": s, "hidden_size": 40, "eps": 1e-3, "gated": gated}
        found = []
        for norm, w, b in norms:
            for activation in ("silu", "gelu", "identity"):
                z, v = ops.latent_epilogue(
                    h, ranks, activation, norm=norm, weight=w, bias=b, **settings
                )
                assert v is not None
                found += [*latents(z), v]
        return found

    def epilogue_backward(
        dz0: Tensor, dz1: Tensor, h: Tensor, s: Tensor, v: Tensor, dv: Tensor
    ) -> list[Tensor]:
        dz = torch.cat((dz0.flatten(), dz1.flatten()))
        settings = {"h": h, "statistics": s, "hidden_size": 40, "eps": 1e-3, "v": v, "dv": dv}
        found = []
        for norm, w, b in norms:
            for activation in ("silu", "gelu", "identity"):
                dh, whole, ds, *_ = ops.latent_epilogue_backward(
                    dz, ranks, activation, norm=norm, weight=w, bias=b, **settings
                )
                assert whole is not None and ds is not None
                found += [dh, whole, ds]
        return found

    def down(x: Tensor) -> list[Tensor]:
        out = x.new_empty(n, 5)
        ops.down_projection(x, weight, out)
        return [out]

    def rotary(q: Tensor, cos: Tensor, sin: Tensor) -> list[Tensor]:
        found = []
        for interleaved in (True, False):
            heads = q.clone().view(n, 1, 1, k)
            ops.rotary_([heads], cos, sin, interleaved=interleaved)
            back = ops.rotary_backward([q.view(n, 1, 1, k)], 1, cos, sin, interleaved=interleaved)
            found += [heads.view(n, k), back[0].view(n, k)]
        return found

    def residual_add(x: Tensor, delta: Tensor) -> list[Tensor]:
        x, slots = x.clone(), x.new_empty(n, 6, dtype=torch.bfloat16)
        return [ops.residual_add_rms_stats(x, delta, slots, 1), x, slots[:, 3:]]

    ranks, gamma, beta, weight = [k - 3, 3], t(k), t(k, seed=1), t(5, k)
    norms = (("none", None, None), ("rmsnorm", gamma, None), ("layernorm", gamma, beta))
    ups = [t(4, k - 3), t(2, 3)]
    x, other, third = t(n, k), t(n, k, seed=1), t(n, k, seed=2)
    s = t(n, 1, dtype=wide(dtype)).abs() + 1
    dz = t(n, k - 3), t(n, 3)
    turn = t(n, k - k % 2), t(n, k - k % 2, seed=1)
    return {
        "rms_stats": TokenOp(lambda x: [ops.rms_stats(x)], [x]),
        "residual_add": TokenOp(residual_add, [x, other]),
        "read_statistics": TokenOp(
            lambda b: [ops.read_statistics(b)], [t(n, 6, dtype=torch.bfloat16)]
        ),
        "residual_gradient": TokenOp(lambda *a: [ops.residual_gradient(*a)], [x, other, s]),
        "epilogue": TokenOp(epilogue, [x, s, other], roots=1),
        "epilogue_backward": TokenOp(epilogue_backward, [*dz, x, s, other, third], roots=3),
        "up_projection": TokenOp(
            lambda *z: ops.up_projection(torch.cat([p.flatten() for p in z]), ups), [*dz]
        ),
        "up_dgrad": TokenOp(
            lambda *dys: latents(ops.up_projection_dgrad(dys, ups)), [t(n, 4), t(n, 2)]
        ),
        "down_projection": TokenOp(down, [x]),
        "down_dgrad": TokenOp(
            lambda dh, dx: [ops.down_projection_dgrad(dh, weight, dx.clone())], [t(n, 5), x]
        ),
        "swiglu": TokenOp(lambda *a: [ops.gated_product(*a, "swiglu")], [x, other]),
        "product": TokenOp(lambda *a: [ops.gated_product(*a, "product")], [x, other]),
        "swiglu_backward": TokenOp(
            lambda *a: [*ops.gated_product_backward(*a, "swiglu")], [x, other, third]
        ),
        "product_backward": TokenOp(
            lambda *a: [*ops.gated_product_backward(*a, "product")], [x, other, third]
        ),
        "rotary": TokenOp(rotary, [x, *turn]),
        "rms_norm": TokenOp(lambda x: [*ops.rms_norm(x, gamma, 1e-3)], [x]),
        "rms_norm_backward": TokenOp(
            lambda dy, x, r, d: [ops.rms_norm_backward(dy, x, gamma, r, d)[0]],
            [x, other, s, third],
            roots=2,
        ),
    }


@dataclass
class TokenOp:
    function: Callable[..., list[Tensor]]
    tokens: list[Tensor]
    roots: int | None = None
    """Which of `tokens` divides, so that its Inf makes zeros."""

    def __call__(self, *tokens: Tensor) -> list[Tensor]:
        return list(self.function(*(tokens or self.tokens)))


TOKEN_OPS = list(token_ops(2, 5, "cpu", torch.float32))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("name", TOKEN_OPS)
def test_not_a_number_stays_in_its_token(served: Served, name: str, dtype: torch.dtype) -> None:
    op = token_ops(5, 21, served.device, dtype)[name]
    clean, bad = op(), 2
    for result in clean:
        assert result.isfinite().all()
    others = [0, 1, 3, 4]
    for i in range(len(op.tokens)):
        moved = [x.clone() for x in op.tokens]
        moved[i][bad, -1] += 1
        depends = [a[bad] != b[bad] for a, b in zip(op(*moved), clean, strict=True)]
        assert any(there.any() for there in depends)
        for value in (math.nan, math.inf, -math.inf):
            if value == -math.inf and i == op.roots:
                continue  # no square root
            given = [x.clone() for x in op.tokens]
            given[i][bad, -1] = value
            results = op(*given)
            for result, expected in zip(results, clean, strict=True):
                assert torch.equal(result[others], expected[others]), f"{value} in argument {i}"
            if math.isnan(value):
                for result, there in zip(results, depends, strict=True):
                    assert result[bad][there].isnan().all(), f"{value} in argument {i}"
            elif i != op.roots:
                assert not all(r[bad].isfinite().all() for r in results), f"{value} in argument {i}"


def test_a_nan_reaches_every_sum_over_tokens(served: Served) -> None:
    n, k = 5, 21
    x, dy, h = (served.normal(n, k, dtype=torch.float32, seed=i) for i in range(3))
    gamma, rho = served.normal(k, dtype=torch.float32), torch.ones(n, 1, device=served.device)
    dy[3, 20] = math.nan
    *_, dweight, dbias = ops.latent_epilogue_backward(
        dy.flatten(), [k], "silu", h=h, norm="layernorm", weight=gamma, bias=gamma
    )
    assert dweight is not None and dbias is not None
    m = ops.down_projection_wgrad(dy, x)
    for found in (ops.rms_norm_backward(dy, x, gamma, rho)[1], dweight, dbias, m[:, 0]):
        assert found.isnan().tolist() == [False] * 20 + [True]


# Huge and tiny numbers.

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


# Threads.


@pytest.fixture
def threads() -> Iterator[Callable[[int], None]]:
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.mark.skipif(no_csrc is not None, reason=f"csrc: {no_csrc}")
@pytest.mark.parametrize("name", TOKEN_OPS)
def test_threads_share_the_tokens(threads: Callable[[int], None], name: str) -> None:
    op = token_ops(301, 257, "cpu", torch.float32)[name]
    with ops.use("csrc"):
        threads(1)
        alone = op()
        threads(2)
        for result, expected in zip(op(), alone, strict=True):
            assert_close(result, exact(expected))


@pytest.mark.skipif(no_csrc is not None, reason=f"csrc: {no_csrc}")
def test_threads_share_sums_over_tokens(threads: Callable[[int], None]) -> None:
    n, k = 301, 257
    x, dy, h = (normal(n, k, dtype=torch.float32, seed=i) for i in range(3))
    gamma, rho = normal(k, dtype=torch.float32), torch.ones(n, 1)

    def found() -> list[Tensor]:
        *_, dweight, dbias = ops.latent_epilogue_backward(
            dy.flatten(), [k], "silu", h=h, norm="layernorm", weight=gamma, bias=gamma
        )
        dweights, dgamma = ops.fold_gamma_backward(dy, gamma, [x])
        assert dweight is not None and dbias is not None
        dx, of_gamma = ops.rms_norm_backward(dy, x, gamma, rho)
        return [dweight, dbias, *dweights, dgamma, dx, of_gamma]

    with ops.use("csrc"):
        threads(1)
        alone = found()
        threads(2)
        for result, expected in zip(found(), alone, strict=True):
            assert_close(result, exact(expected))


# Gradients that autograd finds, of csrc's operators by themselves.


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


# Refusals.


def bad(sample: Sample, name: str, kind: str) -> dict[str, Any]:
    """The sample with its argument `name` (of a list, the last one) spoiled."""
    spoil: dict[str, Callable[[Tensor], Tensor]] = {
        "dtype": lambda t: t.to(torch.int32),
        "dimensions": lambda t: t[None, None].contiguous(),
        "device": lambda t: t.to("cpu" if t.is_cuda else "cuda"),
    }
    arguments = dict(sample.arguments)
    given = arguments[name]
    if isinstance(given, list):
        arguments[name] = [*given[:-1], spoil[kind](given[-1])]
    else:
        arguments[name] = spoil[kind](given)
    return arguments


def refusals(device: str) -> list[tuple[Sample, str]]:
    """Every operator with each of its tensors once."""
    found = {}
    for sample in operator_samples(device):
        for name in sample.tensor_names():
            found[sample.operator, name] = (sample, name)
    return list(found.values())


CPU_REFUSALS = [f"{sample.operator}-{name}" for sample, name in refusals("cpu")]


def assert_refused(operator_name: str, arguments: dict[str, Any], argument: str) -> None:
    with pytest.raises(ValueError) as refused:
        operator(operator_name)(**arguments)
    message = str(refused.value).splitlines()[0]
    assert message.startswith(f"{operator_name}: "), message
    words = {"tensors": "tensors?|heads?", "grads": "tensors?"}
    assert re.search(rf"\b({words.get(argument, argument)})\b", message), message


@pytest.mark.parametrize("kind", ["dtype", "dimensions"])
@pytest.mark.parametrize("which", range(len(CPU_REFUSALS)), ids=CPU_REFUSALS)
def test_what_does_not_fit_is_refused_by_name(csrc_device: str, which: int, kind: str) -> None:
    sample, name = refusals(csrc_device)[which]
    with pytest.raises(ValueError) as refused:
        operator(sample.operator)(**bad(sample, name, kind))
    message = str(refused.value).splitlines()[0]
    assert message.startswith(f"{sample.operator}: "), message
    # Where two disagree, either may be named.
    names = "|".join(["tensor", *sample.arguments])
    assert re.search(rf"\b({names})\b", message), message


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_tensors_elsewhere_are_refused() -> None:
    skip_if_not_there("csrc", "cuda")
    for sample, name in refusals("cuda"):
        alone = len(sample.tensor_names()) == 1 and not isinstance(sample.arguments[name], list)
        if alone:
            continue  # Nothing to disagree with.
        with pytest.raises(ValueError, match=f"^{sample.operator}: .* must be on "):
            operator(sample.operator)(**bad(sample, name, "device"))


def t(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.ones(shape, dtype=dtype)


MISFITS: list[tuple[str, str, dict[str, Any]]] = [
    ("sum_of_squares", "x", {"x": t(4)}),
    ("rms_stats", "slots", {"slots": t(3, 6, dtype=torch.bfloat16)}),
    ("rms_stats", "slots", {"slots": t(4, 5, dtype=torch.bfloat16)}),
    ("rms_stats", "slots", {"slots": t(4, 2), "tp_rank": 0}),
    ("rms_stats", "slots", {"slots": t(4, 1, dtype=torch.float16), "tp_rank": 0}),
    ("rms_stats", "slots", {"slots": t(6, 4, dtype=torch.bfloat16).t()}),
    ("rms_stats", "tp_rank", {"tp_rank": 2}),
    ("rms_stats", "tp_rank", {"tp_rank": -1}),
    ("residual_add_rms_stats", "delta", {"delta": t(4, 6)}),
    ("residual_add_rms_stats", "delta", {"delta": t(4, 5, dtype=torch.float64)}),
    ("residual_add_rms_stats", "x", {"x": t(5, 4).t()}),
    ("read_statistics", "block", {"block": t(4, 4, dtype=torch.bfloat16)}),
    ("read_statistics", "block", {"block": t(4, 0, dtype=torch.bfloat16)}),
    ("read_statistics", "block", {"block": t(4, 1, dtype=torch.float16)}),
    ("read_statistics", "block", {"block": t(4, 2)}),
    ("residual_gradient", "x", {"x": t(4, 6)}),
    ("residual_gradient", "ds", {"ds": t(4)}),
    ("residual_gradient", "ds", {"ds": t(4, 1, dtype=torch.float64)}),
    ("latent_epilogue", "ranks", {"ranks": [5, 2]}),
    ("latent_epilogue", "ranks", {"ranks": []}),
    ("latent_epilogue", "ranks", {"ranks": [2, 2, 2, 2]}),
    ("latent_epilogue", "activation", {"activation": "relu"}),
    ("latent_epilogue", "norm", {"norm": "batchnorm"}),
    ("latent_epilogue", "weight", {"norm": "rmsnorm"}),
    ("latent_epilogue", "weight", {"weight": t(8)}),
    ("latent_epilogue", "weight", {"weight": t(7), "norm": "rmsnorm"}),
    ("latent_epilogue", "bias", {"weight": t(8), "norm": "layernorm"}),
    ("latent_epilogue", "bias", {"weight": t(8), "bias": t(8), "norm": "rmsnorm"}),
    ("latent_epilogue", "gated", {"gated": t(4, 7)}),
    ("latent_epilogue", "gated", {"gated": t(4, 8, dtype=torch.bfloat16)}),
    ("latent_epilogue", "statistics", {"statistics": t(3, 1)}),
    ("latent_epilogue", "statistics", {"statistics": t(4, 1, dtype=torch.bfloat16)}),
    ("latent_epilogue", "statistics", {"statistics": t(4, 4, dtype=torch.bfloat16)}),
    ("latent_epilogue", "statistics", {"statistics": t(4, 3)}),
    ("latent_epilogue", "h", {"h": t(4, 8, dtype=torch.bfloat16)}),
    ("latent_epilogue", "h", {"h": t(4, 8, dtype=torch.float64)}),
    ("latent_epilogue_backward", "h", {"h": None}),
    ("latent_epilogue_backward", "dz", {"dz": t(31)}),
    ("latent_epilogue_backward", "h", {"h": t(4, 8, dtype=torch.float64)}),
    ("latent_epilogue_backward", "h", {"v": t(4, 8), "h": t(2, 8), "statistics": t(4, 1)}),
    ("latent_epilogue_backward", "h", {"h": None, "v": t(4, 8), "statistics": t(4, 1)}),
    ("latent_epilogue_backward", "dv", {"dv": t(4, 7)}),
    ("latent_epilogue_backward", "v", {"v": t(4, 8, dtype=torch.bfloat16)}),
    ("fold_gamma", "weights", {"weights": []}),
    ("fold_gamma", "weights", {"weights": [t(1, 5)] * 4}),
    ("fold_gamma", "weights", {"weights": [t(3, 5), t(2, 4)]}),
    ("fold_gamma", "gamma", {"gamma": t(1, 5)}),
    ("fold_gamma_backward", "m", {"m": t(4, 5)}),
    ("fold_gamma_backward", "m", {"m": t(5, 5, dtype=torch.float16)}),
    ("fold_gamma_accumulate", "main_grads", {"main_grads": [t(3, 5)]}),
    ("fold_gamma_accumulate", "main_grads", {"main_grads": [t(3, 5), t(5, 2).t()]}),
    ("fold_gamma_accumulate", "main_grads", {"main_grads": [t(3, 5), t(3, 5)]}),
    ("fold_gamma_accumulate", "main_grads", {"main_grads": [t(3, 5), t(2, 5).bfloat16()]}),
    ("up_projection", "z", {"z": t(21)}),
    ("up_projection", "z", {"z": t(4, 5)}),
    ("up_projection", "weights", {"weights": []}),
    ("up_projection_dgrad", "dys", {"dys": [t(4, 6)]}),
    ("up_projection_dgrad", "dys", {"dys": [t(4, 6), t(3, 4)]}),
    ("up_projection_dgrad", "dys", {"dys": [t(4, 6), t(4, 5)]}),
    ("up_projection_wgrad", "z", {"z": t(19)}),
    ("up_projection_wgrad", "dys", {"dys": [t(4, 6), t(3, 4)]}),
    ("up_projection_accumulate", "main_grads", {"main_grads": [t(6, 3)]}),
    ("up_projection_accumulate", "main_grads", {"main_grads": [t(6, 3), t(5, 2)]}),
    ("up_projection_accumulate", "main_grads", {"main_grads": [t(6, 3), t(4, 2).half()]}),
    ("down_projection", "out", {"out": t(4, 4)}),
    ("down_projection", "out", {"out": t(4, 3, dtype=torch.float16)}),
    ("down_projection", "weight", {"weight": t(3, 6)}),
    ("down_projection_dgrad", "weight", {"weight": t(4, 5)}),
    ("down_projection_add_dgrad", "dx", {"dx": t(4, 6)}),
    ("down_projection_add_dgrad", "dx", {"dx": t(4, 5, dtype=torch.float64)}),
    ("down_projection_wgrad", "dh", {"dh": t(3, 3)}),
    ("down_projection_wgrad", "dh", {"dh": t(4, 3, dtype=torch.float64)}),
    ("down_projection_wgrad", "dtype", {"dtype": torch.int64}),
    ("down_projection_accumulate", "main_grad", {"main_grad": t(3, 6)}),
    ("down_projection_accumulate", "main_grad", {"main_grad": t(3, 5).half()}),
    ("gated_product", "up", {"up": t(4, 6)}),
    ("gated_product", "kind", {"kind": "geglu"}),
    ("gated_product_backward", "dm", {"dm": t(3, 5)}),
    ("gated_product_backward", "kind", {"kind": "geglu"}),
    ("rotary_", "cos", {"cos": t(3, 4)}),
    ("rotary_", "cos", {"cos": t(4, 8), "sin": t(4, 8)}),
    ("rotary_", "cos", {"cos": t(4, 3), "sin": t(4, 3)}),
    ("rotary_", "sin", {"sin": t(4, 2)}),
    ("rotary_", "tensors", {"tensors": [t(4, 2, 3, 6), t(4, 2, 1, 5)]}),
    ("rotary_", "tensors", {"tensors": [t(4, 2, 6, 3).transpose(2, 3)]}),
    ("rotary_backward", "grads", {"grads": [t(4, 2, 6), t(4, 2, 6)]}),
    ("rms_norm", "gamma", {"gamma": t(4)}),
    ("rms_norm", "gamma", {"gamma": t(5, dtype=torch.float64)}),
    ("rms_norm_backward", "dy", {"dy": t(4, 6)}),
    ("rms_norm_backward", "rho", {"rho": t(4)}),
    ("rms_norm_backward", "rho", {"rho": t(4, 1, dtype=torch.float64)}),
    ("rms_norm_backward", "dresidual", {"dresidual": t(3, 5)}),
    # What once divided by zero or read a null pointer.
    ("up_projection", "weights", {"z": t(0), "weights": [t(3, 0)]}),
    ("up_projection_wgrad", "ranks", {"ranks": []}),
    ("fold_gamma_accumulate", "weights", {"weights": [], "main_grads": []}),
    ("latent_epilogue", "ranks", {"ranks": [10, -2]}),
    ("latent_epilogue_backward", "ranks", {"ranks": [10, -2]}),
]


def first_sample(name: str) -> Sample:
    return next(s for s in operator_samples() if s.operator == name)


@pytest.mark.skipif(no_csrc is not None, reason=f"csrc: {no_csrc}")
@pytest.mark.parametrize(
    ("name", "argument", "change"),
    MISFITS,
    ids=[f"{name}-{argument}-{i}" for i, (name, argument, _) in enumerate(MISFITS)],
)
def test_misfits_are_refused_by_name(name: str, argument: str, change: dict[str, Any]) -> None:
    assert_refused(name, first_sample(name).arguments | change, argument)


def test_lax_norms_eps_is_the_one_of_the_formulas() -> None:
    assert ops.LATENT_NORM_EPS == LATENT_NORM_EPS
