"""The ops as csrc has them: `torch.ops.boost` under the names and signatures of the reference."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from boost_layers.ops import flop_formulas as flop_formulas
from boost_layers.ops import registrations as registrations
from boost_layers.ops.reference import split_members

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

_boost = torch.ops.boost

_MOST_WEIGHTS = 3
"""That csrc folds γ into, its `kMaxGroups`; more are put together first."""


def rms_stats(x: Tensor, slots: Tensor | None = None, tp_rank: int = 0) -> Tensor:
    return _boost.sum_of_squares(x) if slots is None else _boost.rms_stats(x, slots, tp_rank)


def residual_add_rms_stats(
    x: Tensor, delta: Tensor, slots: Tensor | None = None, tp_rank: int = 0
) -> Tensor:
    return _boost.residual_add_rms_stats(x, delta, slots, tp_rank)


def read_statistics(block: Tensor) -> Tensor:
    return _boost.read_statistics(block)


def residual_gradient(dresidual: Tensor, x: Tensor, ds: Tensor) -> Tensor:
    return _boost.residual_gradient(dresidual, x, ds)


def latent_epilogue(
    h: Tensor,
    ranks: Sequence[int],
    activation: str,
    *,
    statistics: Tensor | None = None,
    hidden_size: int = 1,
    eps: float = 0.0,
    gated: Tensor | None = None,
    norm: str = "none",
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor | None]:
    z, v = _boost.latent_epilogue(
        h,
        statistics,
        gated,
        weight,
        bias,
        ranks,
        activation,
        norm,
        hidden_size,
        eps,
        dtype or h.dtype,
    )
    return z, None if gated is None else v


def latent_epilogue_backward(
    dz: Tensor,
    ranks: Sequence[int],
    activation: str,
    *,
    h: Tensor | None = None,
    v: Tensor | None = None,
    dv: Tensor | None = None,
    statistics: Tensor | None = None,
    hidden_size: int = 1,
    eps: float = 0.0,
    norm: str = "none",
    weight: Tensor | None = None,
    bias: Tensor | None = None,
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
    dh, dv_whole, ds, dweight, dbias = _boost.latent_epilogue_backward(
        dz, dv, h, v, statistics, weight, bias, ranks, activation, norm, hidden_size, eps
    )
    return (
        dh,
        None if v is None else dv_whole,
        None if statistics is None else ds,
        None if weight is None else dweight,
        None if bias is None else dbias,
    )


def fold_gamma(gamma: Tensor, weights: Sequence[Tensor]) -> Tensor:
    if len(weights) > _MOST_WEIGHTS:
        weights = [torch.cat(list(weights))]
    return _boost.fold_gamma(gamma, weights)


def fold_gamma_backward(
    m: Tensor, gamma: Tensor, weights: Sequence[Tensor]
) -> tuple[list[Tensor], Tensor]:
    if len(weights) <= _MOST_WEIGHTS:
        return _boost.fold_gamma_backward(m, gamma, weights)
    (dwhole,), dgamma = _boost.fold_gamma_backward(m, gamma, [torch.cat(list(weights))])
    return list(dwhole.split([a.shape[0] for a in weights])), dgamma


def fold_gamma_accumulate(
    m: Tensor, gamma: Tensor, weights: Sequence[Tensor], main_grads: Sequence[Tensor]
) -> Tensor:
    if len(weights) <= _MOST_WEIGHTS:
        return _boost.fold_gamma_accumulate(m, gamma, weights, main_grads)
    whole = torch.cat(list(weights))
    added = torch.zeros_like(whole, dtype=main_grads[0].dtype)
    dgamma = _boost.fold_gamma_accumulate(m, gamma, [whole], [added])
    for grad, part in zip(main_grads, added.split([a.shape[0] for a in weights]), strict=True):
        grad.add_(part)
    return dgamma


def up_projection(z: Tensor, weights: Sequence[Tensor]) -> list[Tensor]:
    n = z.numel() // sum(b.shape[1] for b in weights)
    return split_members(_boost.up_projection(z, weights), n, [b.shape[0] for b in weights])


def up_projection_dgrad(dys: Sequence[Tensor], weights: Sequence[Tensor]) -> Tensor:
    return _boost.up_projection_dgrad(dys, weights)


def up_projection_wgrad(dys: Sequence[Tensor], z: Tensor, ranks: Sequence[int]) -> list[Tensor]:
    return _boost.up_projection_wgrad(dys, z, ranks)


def up_projection_accumulate(
    dys: Sequence[Tensor], z: Tensor, main_grads: Sequence[Tensor]
) -> None:
    _boost.up_projection_accumulate(dys, z, main_grads)


def down_projection(x: Tensor, weight: Tensor, out: Tensor) -> None:
    _boost.down_projection(x, weight, out)


def down_projection_dgrad(dh: Tensor, weight: Tensor, dx: Tensor | None = None) -> Tensor:
    if dx is None:
        return _boost.down_projection_dgrad(dh, weight)
    _boost.down_projection_add_dgrad(dx, dh, weight)
    return dx


def down_projection_wgrad(dh: Tensor, x: Tensor) -> Tensor:
    # On CUDA, M is as exact as the GEMM's accumulator; the CPU's GEMM rounds it anyway.
    wide = torch.float32 if x.is_cuda and x.dtype != torch.float64 else x.dtype
    return _boost.down_projection_wgrad(dh, x, wide)


def down_projection_accumulate(dh: Tensor, x: Tensor, main_grad: Tensor) -> None:
    _boost.down_projection_accumulate(dh, x, main_grad)


def gated_product(gate: Tensor, up: Tensor, kind: str) -> Tensor:
    return _boost.gated_product(gate, up, kind)


def gated_product_backward(
    dm: Tensor, gate: Tensor, up: Tensor, kind: str
) -> tuple[Tensor, Tensor]:
    dgate, dup = _boost.gated_product_backward(dm, gate, up, kind).unbind(0)
    return dgate, dup


def rotary_(tensors: Sequence[Tensor], cos: Tensor, sin: Tensor, *, interleaved: bool) -> None:
    _boost.rotary_(tensors, cos, sin, interleaved)


def rotary_backward(
    grads: Sequence[Tensor], rotated: int, cos: Tensor, sin: Tensor, *, interleaved: bool
) -> list[Tensor]:
    flat = _boost.rotary_backward(grads, rotated, cos, sin, interleaved)
    parts = flat.split([t.numel() for t in grads])
    return [part.view(t.shape) for part, t in zip(parts, grads, strict=True)]


def rms_norm(x: Tensor, gamma: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    return _boost.rms_norm(x, gamma, eps)


def rms_norm_backward(
    dy: Tensor, x: Tensor, gamma: Tensor, rho: Tensor, dresidual: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    return _boost.rms_norm_backward(dy, x, gamma, rho, dresidual)
