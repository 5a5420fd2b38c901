"""The Triton kernels in a process of their own, where Triton interprets them, and what the results
are compared with.

Whether Triton interprets is settled when it is imported, for the whole process. Tensors go there
and back as shared memory, so that what a kernel writes in place is seen here, strides and aliases
included.
"""

from __future__ import annotations

import inspect
import math
import multiprocessing
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import numpy
import torch
from torch import Tensor

from boost_layers.ops import reference

F32, F64, BF16, F16 = torch.float32, torch.float64, torch.bfloat16, torch.float16
FORWARD, GRADIENT = 1e-6, 1e-5
"""Relative errors allowed in fp32."""

DTYPES = [F32, F64, BF16, F16]

Run = Callable[..., Any]


@contextmanager
def process(**environment: str) -> Iterator[ProcessPoolExecutor]:
    """A fresh process with this environment."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=context) as executor:
        with mock.patch.dict(os.environ, environment, BOOST_OPS="reference"):
            executor.submit(prepare).result()
        yield executor


def prepare() -> None:
    torch.set_num_threads(1)
    numpy.seterr(all="ignore")


def run_there(name: str, args: Any, kwargs: Any, parts: int = 0) -> Any:
    from boost_layers.ops import triton_kernels

    op = getattr(triton_kernels, name)
    with ExitStack() as stack:
        if parts:
            stack.enter_context(mock.patch.dict(op.__globals__, PARTS=parts))
        return op(*args, **kwargs)


def names_there() -> dict[str, inspect.Signature | None]:
    from boost_layers.ops import triton_kernels

    return {name: signature_of(triton_kernels, name) for name in triton_kernels.__all__}


def signature_of(module: Any, name: str) -> inspect.Signature | None:
    op = getattr(module, name)
    return inspect.signature(op) if callable(op) else None


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
