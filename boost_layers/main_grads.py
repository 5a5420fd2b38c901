"""Weight gradients added straight to Megatron's main gradients.

Megatron's `DistributedDataParallel` keeps a buffer in fp32 (or the dtype that it reduces in) for
every parameter, `main_grad`, and adds `grad` to it in a hook. A GEMM that adds to it itself saves
that pass and the tensor between, and rounds nothing. The parameter is told so by
`grad_added_to_main_grad`, as Megatron's own fused linear layers do.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor


def main_grads(weights: Sequence[Any]) -> list[Tensor] | None:
    """The main gradients of `weights`, of their shapes, if every one has one that is to be added
    to; else None, and gradients are to be returned to autograd."""
    parameters = [_parameter(weight) for weight in weights]
    if not all(
        getattr(weight, "main_grad", None) is not None
        and hasattr(weight, "grad_added_to_main_grad")
        and not getattr(weight, "zero_out_wgrad", False)
        for weight in parameters
    ):
        return None
    return [weight.main_grad for weight in parameters]


def stand_ins(weights: Sequence[Any]) -> list[Tensor]:
    """What autograd gets for gradients that are in the main gradients already: Megatron's hook
    wants a `grad`, but does not read it. Zeros, since in a program that never clears `grad` that is
    the main gradient itself after a step of Megatron's fp32 optimizer, and is added to."""
    for weight in weights:
        _parameter(weight).grad_added_to_main_grad = True
    return [torch.zeros_like(weight) for weight in weights]


def leaf_for(weight: Any, requires_grad: bool) -> Tensor:
    """A leaf of a graph of its own with the values of `weight`, whose main gradient is that of
    `weight`."""
    leaf: Any = weight.detach().requires_grad_(requires_grad)
    leaf.stands_for = weight
    return leaf


def _parameter(weight: Any) -> Any:
    return getattr(weight, "stands_for", weight)
