"""What `torch.utils.flop_counter` must know of csrc's GEMMs, which it cannot see into: a multiply
and an add are two FLOPs, as everywhere in torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.utils.flop_counter import register_flop_formula

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

_boost = torch.ops.boost


@register_flop_formula(_boost.up_projection, get_raw=True)
def _up_projection(z: Tensor, weights: Sequence[Tensor], **_: Any) -> int:
    tokens = z.numel() // sum(b.shape[1] for b in weights)
    return 2 * tokens * sum(b.numel() for b in weights)


@register_flop_formula(_boost.up_projection_dgrad, get_raw=True)
def _up_projection_dgrad(dys: Sequence[Tensor], weights: Sequence[Tensor], **_: Any) -> int:
    return sum(2 * dy.numel() * b.shape[1] for dy, b in zip(dys, weights, strict=True))


@register_flop_formula(_boost.up_projection_wgrad, get_raw=True)
def _up_projection_wgrad(dys: Sequence[Tensor], z: Tensor, ranks: Sequence[int], **_: Any) -> int:
    return sum(2 * dy.numel() * rank for dy, rank in zip(dys, ranks, strict=True))


@register_flop_formula(_boost.up_projection_accumulate, get_raw=True)
def _up_projection_accumulate(
    dys: Sequence[Tensor], z: Tensor, main_grads: Sequence[Tensor], **_: Any
) -> int:
    return sum(2 * dy.numel() * grad.shape[1] for dy, grad in zip(dys, main_grads, strict=True))


@register_flop_formula([_boost.down_projection, _boost.down_projection_dgrad], get_raw=True)
def _down_projection(x: Tensor, weight: Tensor, *_: Any, **__: Any) -> int:
    return 2 * (x.numel() // x.shape[-1]) * weight.numel()


@register_flop_formula(_boost.down_projection_add_dgrad, get_raw=True)
def _down_projection_add_dgrad(dx: Tensor, dh: Tensor, weight: Tensor, **_: Any) -> int:
    return 2 * dh.shape[0] * weight.numel()


@register_flop_formula(
    [_boost.down_projection_wgrad, _boost.down_projection_accumulate], get_raw=True
)
def _down_projection_wgrad(dh: Tensor, x: Tensor, *_: Any, **__: Any) -> int:
    return 2 * dh.numel() * x.shape[-1]
