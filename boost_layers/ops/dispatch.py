"""Which implementation of the ops serves which device."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import inspect
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any, Literal, NamedTuple, get_args

from torch import Tensor

Implementation = Literal["csrc", "triton", "reference"]

_ENVIRONMENT = "BOOST_OPS"
_EXTENSION = "boost_layers.ops._C"
_MODULES: dict[Implementation, str] = {
    "csrc": "boost_layers.ops.csrc",
    "triton": "boost_layers.ops.triton_kernels",
    "reference": "boost_layers.ops.reference",
}


class _Serving(NamedTuple):
    name: Implementation
    module: ModuleType


_serving: dict[str, _Serving] = {}
"""By device type; other devices (meta among them) are served by the reference."""


def dispatched[**P, R](op: Callable[P, R]) -> Callable[P, R]:
    """The op of the same name that serves the device of its first tensor."""
    name = op.__name__
    first_name = next(iter(inspect.signature(op).parameters))

    @functools.wraps(op)
    def on_its_device(*args: P.args, **kwargs: P.kwargs) -> R:
        first: Any = args[0] if args else kwargs[first_name]
        tensor = first if isinstance(first, Tensor) else first[0]
        serving = _serving.get(tensor.device.type)
        function = op if serving is None else getattr(serving.module, name)
        result: R = function(*args, **kwargs)
        return result

    return on_its_device


def in_use() -> dict[str, Implementation]:
    """What serves each device type."""
    return {device: _serving[device].name for device in ("cpu", "cuda")}


@contextmanager
def use(implementation: Implementation, device: str = "cpu") -> Iterator[None]:
    """Let an implementation serve a device type for a while; for tests and benchmarks.

    Raises:
        ImportError: if it is not there.
    """
    before = _serving[device]
    _serve(device, implementation)
    try:
        yield
    finally:
        _serving[device] = before


def choose() -> None:
    """Choose for every device type: csrc where it is built for it, else Triton (CUDA), else the
    reference. The environment variable BOOST_OPS (`csrc`, `triton` or `reference`) overrules that.

    Warns once, on the first rank, if csrc is not there.

    Raises:
        ValueError: for another value of BOOST_OPS.
        ImportError: if it names csrc, and that is not there.
    """
    asked = os.environ.get(_ENVIRONMENT, "")
    if asked not in ("", *get_args(Implementation)):
        raise ValueError(f"{_ENVIRONMENT}={asked}: must be csrc, triton or reference")
    for device in ("cpu", "cuda"):
        _serve(device, "reference")
    if asked == "reference":
        return
    if asked != "csrc" and importlib.util.find_spec("triton") is not None:
        _serve("cuda", "triton")
    if asked == "triton":
        return
    problem = problem_of_csrc()
    if problem is None:
        _serve("cpu", "csrc")
        if cuda_architectures():
            _serve("cuda", "csrc")
    elif asked == "csrc":
        raise ImportError(f"{_ENVIRONMENT}=csrc: {problem}")
    elif os.environ.get("RANK", "0") == "0":
        warnings.warn(
            f"BOOST works without its extension, and slower: {problem} (`make ext` builds it)",
            stacklevel=2,
        )


def problem_of_csrc() -> str | None:
    """Why csrc cannot serve any device, or None."""
    if importlib.util.find_spec(_EXTENSION) is None:
        return "it is not built for this Python"
    try:
        importlib.import_module(_EXTENSION)
    except ImportError as error:
        return f"it does not load ({error})"
    return None


def cuda_architectures() -> str:
    """Those that csrc is built for, as in TORCH_CUDA_ARCH_LIST; empty without its CUDA kernels."""
    architectures: str = importlib.import_module(_EXTENSION).cuda_architectures
    return architectures


def _serve(device: str, implementation: Implementation) -> None:
    name = _MODULES[implementation]
    if implementation == "csrc":
        importlib.import_module(_EXTENSION)
    module = sys.modules.get(name)
    if module is None:
        module = (
            _imported_when_used(name)
            if implementation == "triton"
            else importlib.import_module(name)
        )
    _serving[device] = _Serving(implementation, module)


def _imported_when_used(name: str) -> ModuleType:
    """Most programs never ask for Triton's kernels."""
    spec = importlib.util.find_spec(name)
    assert spec is not None and spec.loader is not None
    spec.loader = importlib.util.LazyLoader(spec.loader)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module
