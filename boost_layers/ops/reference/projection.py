"""The GEMMs of the down- and up-projections, and γ folded into the former."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from boost_layers.ops.reference.statistics import wide

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor


def fold_gamma(gamma: Tensor, weights: Sequence[Tensor]) -> Tensor:
    """γ∘A of grouped down-projections: γ `[k]`, A_i `[r_i, k]` → `[Σ r_i, k]`."""
    folded = weights[0].new_empty(sum(a.shape[0] for a in weights), weights[0].shape[1])
    for a, rows in zip(weights, folded.split([a.shape[0] for a in weights]), strict=True):
        torch.mul(a, gamma, out=rows)
    return folded


def fold_gamma_backward(
    m: Tensor, gamma: Tensor, weights: Sequence[Tensor]
) -> tuple[list[Tensor], Tensor]:
    """From M = dHᵀ·x `[Σ r_i, k]`: dA_i = M_i∘γ `[r_i, k]` and dγ = Σ_r M∘A `[k]`. M may be wider
    than the weights."""
    parts = m.split([a.shape[0] for a in weights])
    dweights = [(part * gamma).to(a.dtype) for part, a in zip(parts, weights, strict=True)]
    return dweights, _dgamma(parts, gamma, weights)


def fold_gamma_accumulate(
    m: Tensor, gamma: Tensor, weights: Sequence[Tensor], main_grads: Sequence[Tensor]
) -> Tensor:
    """`fold_gamma_backward` with the dA_i added to `main_grads`, which may be wider than the
    weights; → dγ `[k]`."""
    parts = m.split([a.shape[0] for a in weights])
    for grad, part in zip(main_grads, parts, strict=True):
        grad.addcmul_(part.to(grad.dtype), gamma)
    return _dgamma(parts, gamma, weights)


def _dgamma(parts: Sequence[Tensor], gamma: Tensor, weights: Sequence[Tensor]) -> Tensor:
    dgamma = torch.zeros_like(gamma, dtype=wide(gamma.dtype))
    for part, a in zip(parts, weights, strict=True):
        dgamma += torch.sum(part * a, dim=0, dtype=dgamma.dtype)
    return dgamma.to(gamma.dtype)


def up_projection(z: Tensor, weights: Sequence[Tensor]) -> list[Tensor]:
    """y_i = z_i·B_iᵀ of flat z with members `[n, r_i]` one after the other, B_i `[o_i, r_i]` →
    `[n, o_i]` each, one after the other in memory. Weights of one shape are one batched GEMM on
    CUDA."""
    n = z.numel() // sum(b.shape[1] for b in weights)
    y = z.new_empty(n * sum(b.shape[0] for b in weights))
    outputs = split_members(y, n, [b.shape[0] for b in weights])
    if z.is_cuda and len(weights) > 1 and all(b.shape == weights[0].shape for b in weights):
        count, (size_out, rank) = len(weights), weights[0].shape
        stacked = torch.stack(list(weights)).transpose(1, 2)
        torch.bmm(z.view(count, n, rank), stacked, out=y.view(count, n, size_out))
        return outputs
    for part, b, out in zip(
        split_members(z, n, [b.shape[1] for b in weights]), weights, outputs, strict=True
    ):
        torch.mm(part, b.t(), out=out)
    return outputs


def up_projection_dgrad(dys: Sequence[Tensor], weights: Sequence[Tensor]) -> Tensor:
    """dz_i = dy_i·B_i, flat as z is: dy_i `[n, o_i]`, B_i `[o_i, r_i]` → n·Σ r_i elements."""
    n = dys[0].shape[0]
    dz = dys[0].new_empty(n * sum(b.shape[1] for b in weights))
    parts = split_members(dz, n, [b.shape[1] for b in weights])
    for part, dy, b in zip(parts, dys, weights, strict=True):
        torch.mm(dy, b, out=part)
    return dz


def up_projection_wgrad(dys: Sequence[Tensor], z: Tensor, ranks: Sequence[int]) -> list[Tensor]:
    """dB_i = dy_iᵀ·z_i `[o_i, r_i]`."""
    parts = split_members(z, dys[0].shape[0], ranks)
    return [torch.mm(dy.t(), part) for dy, part in zip(dys, parts, strict=True)]


def up_projection_accumulate(
    dys: Sequence[Tensor], z: Tensor, main_grads: Sequence[Tensor]
) -> None:
    """`up_projection_wgrad` with the dB_i added to `main_grads`, which may be wider."""
    parts = split_members(z, dys[0].shape[0], [grad.shape[1] for grad in main_grads])
    for grad, dy, part in zip(main_grads, dys, parts, strict=True):
        _add_product(grad, dy, part)


def split_members(flat: Tensor, n: int, widths: Sequence[int]) -> list[Tensor]:
    """The members `[n, widths[i]]` of a flat tensor."""
    parts = flat.split([n * width for width in widths])
    return [part.view(n, width) for part, width in zip(parts, widths, strict=True)]


def down_projection(x: Tensor, weight: Tensor, out: Tensor) -> None:
    """H = x·Aᵀ into `out`, which may be fp32 for narrower x: x `[n, k]` or `[s, b, k]`, in any
    layout with whole rows; A `[w, k]`; out `[n, w]` or `[s, b, w]`."""
    for tokens, place in _token_matrices(x, out):
        if place.dtype == x.dtype:
            torch.mm(tokens, weight.t(), out=place)
        elif x.is_cuda:
            torch.mm(tokens, weight.t(), out_dtype=place.dtype, out=place)
        else:
            torch.mm(tokens.to(place.dtype), weight.t().to(place.dtype), out=place)


def down_projection_dgrad(dh: Tensor, weight: Tensor, dx: Tensor | None = None) -> Tensor:
    """dx = dH·A `[n, k]` from dH `[n, w]` and A `[w, k]`; added to `dx` if that is given."""
    return torch.mm(dh, weight) if dx is None else dx.addmm_(dh, weight)


def down_projection_wgrad(dh: Tensor, x: Tensor) -> Tensor:
    """M = dHᵀ·x `[w, k]` from dH `[n, w]` or `[s, b, w]` and x `[n, k]` or `[s, b, k]`; it may be
    wider than they are."""
    (first, *others) = _token_matrices(dh, x)
    m = torch.mm(first[0].t(), first[1])
    for grads, tokens in others:
        m.addmm_(grads.t(), tokens)
    return m


def down_projection_accumulate(dh: Tensor, x: Tensor, main_grad: Tensor) -> None:
    """`down_projection_wgrad` with M added to `main_grad`, which may be wider."""
    for grads, tokens in _token_matrices(dh, x):
        _add_product(main_grad, grads, tokens)


def _add_product(grad: Tensor, dy: Tensor, x: Tensor) -> None:
    """grad += dyᵀ·x, in the dtype of grad."""
    if grad.dtype == dy.dtype:
        grad.addmm_(dy.t(), x)
    else:
        grad.add_(torch.mm(dy.t(), x))


def _token_matrices(a: Tensor, b: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Both as matrices of tokens: the whole, or one pair for each element of the batch where a copy
    would be needed."""
    if a.dim() == 2:
        return [(a, b)]
    try:
        return [(a.view(-1, a.shape[-1]), b.view(-1, b.shape[-1]))]
    except RuntimeError:
        return [(a[:, i], b[:, i]) for i in range(a.shape[1])]
