"""LaX's gates on the latent that crosses over from the layer before."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor


def apply_gate(z: Tensor, gate: str, weights: Sequence[Tensor]) -> Tensor:
    """G(z) of LaX for one projection's latent, `[n, r]` → `[n, r]`.

    "identity": z, no weights. "linear": z·Wᵀ + b, `[r, r]` and `[r]`. "tensor": E₁ᵀ·Z·E₂ with
    each token's z seen as Z `[p, q]`, and E₁ `[p, p]`, E₂ `[q, q]`.
    """
    if gate == "identity":
        return z
    if gate == "linear":
        weight, bias = weights
        return torch.addmm(bias, z, weight.t())
    left, right = weights
    return torch.matmul(left.t(), _on_the_right(z, left, right)).view(z.shape)


def apply_gate_backward(
    dg: Tensor, z: Tensor, gate: str, weights: Sequence[Tensor]
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """dz `[n, r]` and the gradients of the gate's weights, from that of G(z)."""
    if gate == "identity":
        return dg, ()
    if gate == "linear":
        weight, _ = weights
        return torch.mm(dg, weight), (torch.mm(dg.t(), z), dg.sum(dim=0))
    left, right = weights
    p, q = left.shape[0], right.shape[0]
    grad = dg.view(-1, p, q)
    product = _on_the_right(z, left, right)
    dleft = torch.mm(
        product.transpose(0, 1).reshape(p, -1), grad.transpose(0, 1).reshape(p, -1).t()
    )
    dproduct = torch.matmul(left, grad)
    dright = torch.mm(z.reshape(-1, q).t(), dproduct.view(-1, q))
    return torch.matmul(dproduct, right.t()).view(z.shape), (dleft, dright)


def _on_the_right(z: Tensor, left: Tensor, right: Tensor) -> Tensor:
    """Z·E₂ of every token, `[n, p, q]`."""
    p, q = left.shape[0], right.shape[0]
    return torch.mm(z.reshape(-1, q), right).view(-1, p, q)
