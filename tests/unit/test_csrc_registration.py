"""What torch knows of csrc's operators: schemas, fake implementations, gradients; and that csrc
has the reference's ops under their signatures.
"""

from __future__ import annotations

import gc
import inspect
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from boost_layers import ops
from boost_layers.ops import dispatch, reference
from tests.support.op_cases import Sample, leaf, normal, operator, operator_samples

no_csrc = dispatch.problem_of_csrc()
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(no_csrc is not None, reason=f"csrc: {no_csrc}"),
]

DIFFERENTIABLE = {
    "fold_gamma",
    "gated_product",
    "latent_epilogue",
    "residual_gradient",
    "rms_norm",
    "sum_of_squares",
    "up_projection",
}
LABELS = [sample.label for sample in operator_samples()]
NARROW = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])


@pytest.fixture(autouse=True)
def served() -> Iterator[None]:
    with ops.use("csrc"):
        yield


def sample_named(label: str, dtype: torch.dtype = torch.float32) -> Sample:
    return next(s for s in operator_samples(dtype=dtype) if s.label == label)


def tensors_of(results: Any) -> list[Tensor]:
    if isinstance(results, Tensor):
        return [results]
    return [t for each in results or () for t in tensors_of(each)]


def test_every_operator_has_samples() -> None:
    names = {n for n in torch._C._dispatch_get_all_op_names() if n.startswith("boost::")}
    assert names == {f"boost::{s.operator}" for s in operator_samples()}


@pytest.mark.parametrize("label", LABELS)
def test_opcheck(label: str) -> None:
    """Schema, autograd registration, fake implementation, and compilation with dynamic shapes."""
    sample = sample_named(label)
    arguments = sample.arguments
    if sample.operator in DIFFERENTIABLE:
        arguments = sample.with_tensors(
            lambda _, t: t.detach().requires_grad_() if t.dtype == torch.float32 else t
        )
    torch.library.opcheck(operator(sample.operator), (), arguments)


@NARROW
@pytest.mark.parametrize("label", LABELS)
def test_results_on_meta_are_as_the_real_ones(label: str, dtype: torch.dtype) -> None:
    sample = sample_named(label, dtype)
    run = operator(sample.operator)
    on_meta = run(**sample.with_tensors(lambda _, t: t.to("meta")))
    real = run(**sample.arguments)
    described = [
        [(t.shape, t.dtype, t.stride()) for t in tensors_of(results)] for results in (on_meta, real)
    ]
    assert described[0] == described[1]


@pytest.mark.parametrize("label", LABELS)
def test_only_what_the_schema_names_is_written(label: str) -> None:
    sample = sample_named(label)
    run = operator(sample.operator)
    written = {
        a.name for a in run._schema.arguments if a.alias_info is not None and a.alias_info.is_write
    }
    untouched = sample.with_tensors(lambda _, t: t.clone())
    run(**sample.arguments)

    def check(name: str, now: Any, before: Any) -> None:
        if isinstance(now, Tensor) and name not in written:
            assert torch.equal(now, before), name
        elif isinstance(now, list):
            for pair in zip(now, before, strict=True):
                check(name, *pair)

    for name, now in sample.arguments.items():
        check(name, now, untouched[name])


def block(x: Tensor, s: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    """A bottleneck with statistics: its latents, two up-projections, their gated product."""
    n = x.shape[0]
    z, _ = ops.latent_epilogue(
        x @ down, [3, 3], "silu", statistics=s, hidden_size=x.shape[1], eps=1e-3
    )
    first, second = ops.up_projection(z, [gate, up])
    assert first.shape == (n, gate.shape[0])
    return ops.gated_product(first, second, "swiglu")


def block_inputs() -> list[Tensor]:
    x = normal(5, 4)
    s = x.square().sum(dim=1, keepdim=True)
    return [leaf(t) for t in (x, s, normal(7, 3), normal(7, 3, seed=1), normal(4, 6))]


def gradients_of(
    function: Callable[..., Tensor], inputs: list[Tensor]
) -> tuple[Tensor, tuple[Tensor, ...]]:
    y = function(*inputs)
    return y.detach(), torch.autograd.grad(y, inputs, normal(*y.shape, seed=9))


def assert_same(first: Any, second: Any) -> None:
    for a, b in zip(tensors_of(first), tensors_of(second), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


def test_a_compiled_block_has_the_gradients_of_eager() -> None:
    inputs = block_inputs()
    compiled = torch.compile(block, fullgraph=True, backend="aot_eager")
    assert_same(gradients_of(compiled, inputs), gradients_of(block, inputs))


def test_one_compilation_serves_every_number_of_tokens() -> None:
    compiled = torch.compile(block, fullgraph=True, backend="aot_eager", dynamic=True)
    for n in (5, 9, 2):
        inputs = block_inputs()
        x, s = normal(n, 4, seed=n), normal(n, 1, seed=n).square()
        inputs[:2] = leaf(x), leaf(s)
        with torch.compiler.set_stance("fail_on_recompile" if n != 5 else "default"):
            found = gradients_of(compiled, inputs)
        assert_same(found, gradients_of(block, inputs))


def lax(h: Tensor, s: Tensor, gated: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    z, v = ops.latent_epilogue(
        h,
        [4, 2],
        "gelu",
        statistics=s,
        hidden_size=6,
        eps=1e-3,
        gated=gated,
        norm="layernorm",
        weight=weight,
        bias=bias,
    )
    assert v is not None
    return z + v.sin().flatten()


def lax_inputs() -> list[Tensor]:
    h, gated, weight, bias = normal(5, 6), normal(5, 6, seed=1), normal(6), normal(6, seed=1)
    s = 1 + normal(5, 1).square()
    return [leaf(t) for t in (h, s, gated, weight, bias)]


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_a_checkpointed_epilogue_has_the_same_gradients(use_reentrant: bool) -> None:
    inputs = lax_inputs()

    def checkpointed(*inputs: Tensor) -> Tensor:
        return checkpoint(lax, *inputs, use_reentrant=use_reentrant)

    y = checkpointed(*inputs)
    gradient = normal(*y.shape, seed=9)
    y.backward(gradient)
    found = [x.grad for x in inputs]
    assert_same(found, torch.autograd.grad(lax(*inputs), inputs, gradient))


def test_what_an_operator_keeps_is_freed_with_its_results() -> None:
    """Nothing hangs on itself: without the garbage collector, all goes with the last result."""
    h, s, gated, weight, bias = lax_inputs()
    gc.disable()
    try:
        z, v = torch.ops.boost.latent_epilogue(
            h, s, gated, weight, bias, [4, 2], "gelu", "layernorm", 6, 1e-3, h.dtype
        )
        alive = weakref.ref(z.grad_fn)
        del z, v
        assert alive() is None
    finally:
        gc.enable()


def test_what_an_operator_keeps_is_seen_by_saved_tensor_hooks() -> None:
    """Checkpointing and offloading see what backward needs as saved tensors, v among them."""
    h, s, gated, weight, bias = lax_inputs()
    saved: list[Tensor] = []

    def pack(t: Tensor) -> Tensor:
        saved.append(t)
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        _, v = torch.ops.boost.latent_epilogue(
            h, s, gated, weight, bias, [4, 2], "gelu", "layernorm", 6, 1e-3, h.dtype
        )
    assert any(t.shape == v.shape and torch.equal(t, v) for t in saved)


def test_results_without_a_gradient_say_so() -> None:
    x, gamma = leaf(normal(3, 4)), leaf(normal(4))
    y, rho = torch.ops.boost.rms_norm(x, gamma, 1e-3)
    assert y.requires_grad and not rho.requires_grad
    z, v = torch.ops.boost.latent_epilogue(
        x, None, None, None, None, [4], "silu", "none", 1, 0.0, x.dtype
    )
    assert z.requires_grad and not v.requires_grad


SERVED = [
    name for name in ops.__all__ if hasattr(getattr(ops, name), "__wrapped__") and name != "use"
]


def test_every_op_that_csrc_has_is_dispatched() -> None:
    from boost_layers.ops import csrc

    functions = inspect.getmembers(csrc, inspect.isfunction)
    own = {name for name, f in functions if f.__module__ == csrc.__name__}
    assert own == set(SERVED)


def test_an_ops_first_argument_may_be_named() -> None:
    x = normal(3, 4)
    assert torch.equal(ops.rms_stats(x=x), ops.rms_stats(x))


@pytest.mark.parametrize("name", SERVED)
def test_csrc_has_the_references_signature(name: str) -> None:
    from boost_layers.ops import csrc

    signature = inspect.signature(getattr(csrc, name))
    assert signature == inspect.signature(getattr(reference, name))
    assert signature == inspect.signature(getattr(ops, name))
