"""Megatron compiles its fused elementwise functions with `torch.compile`: not on CPU.

Compiling takes a C++ toolchain and seconds per function and process, and changes the rounding.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch

from megatron.boost.patches import Patch
from megatron.boost.patches.replacement import replaced


def _not_compiled(model: Callable[..., Any] | None = None, **_options: Any) -> Callable[..., Any]:
    """`torch.compile` that gives back what it gets, as a function or as a decorator."""
    return (lambda function: function) if model is None else model


@contextlib.contextmanager
def _apply() -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        # For modules imported from here on; it also spares them the import of TorchDynamo.
        stack.enter_context(replaced(torch, "compile", _not_compiled))
        # For modules imported before, whose functions are wrapped already.
        if "torch._dynamo" in sys.modules:
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        yield


PATCH = Patch(
    name="eager_jit_fuser",
    reason="jit_fuser compiles every small function on CPU: slow to start and no gain",
    needs="cpu",
    apply=_apply,
)
