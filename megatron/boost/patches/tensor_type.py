"""Optimizers and gradient clipping compare `Tensor.type()` with the names of CUDA's types.

`clip_grad_by_total_norm_fp32` asserts `torch.cuda.FloatTensor`; the float16 and the distributed
optimizer sort their parameters by such names and refuse any other.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from megatron.boost.patches import Patch
from megatron.boost.patches.replacement import replaced


def _type(tensor: torch.Tensor, dtype: Any = None, *args: Any, **kwargs: Any) -> Any:
    """`Tensor.type`, whose answer names CUDA's type of the same dtype."""
    if dtype is not None or args or kwargs:
        return torch._C.TensorBase.type(tensor, dtype, *args, **kwargs)
    name: str = torch._C.TensorBase.type(tensor)
    return name.replace("torch.", "torch.cuda.", 1) if not name.startswith("torch.cuda.") else name


@contextlib.contextmanager
def _apply() -> Iterator[None]:
    with replaced(torch.Tensor, "type", _type):
        yield


PATCH = Patch(
    name="tensor_type",
    reason="gradient clipping and two optimizers accept tensors of torch.cuda's types only",
    needs="cpu",
    apply=_apply,
)
