"""RMSNorm of whole tokens."""

from __future__ import annotations

import torch
from torch import Tensor

from boost_layers.ops.reference.statistics import rms_stats


def rms_norm(x: Tensor, gamma: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """γ∘x/ρ and ρ = sqrt(mean(x²) + ε) over the last, whole dimension: `[n, d]`, `[d]` →
    `[n, d]`, `[n, 1]`; the arithmetic is in fp32."""
    rho = torch.sqrt(rms_stats(x).div_(x.shape[-1]).add_(eps))
    return (x / rho).mul_(gamma).to(x.dtype), rho


def rms_norm_backward(
    dy: Tensor, x: Tensor, gamma: Tensor, rho: Tensor, dresidual: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """dx `[n, d]` and dγ `[d]` of `rms_norm` from dy `[n, d]`: with t = dy∘x/ρ in fp32, dγ = Σ_n t
    and dx = (dy∘γ − x·(t·γ)/(ρ·d))/ρ, to which `dresidual` `[n, d]` is added before rounding."""
    inverse = rho.reciprocal()
    wide_dy = dy.to(rho.dtype)
    t = (wide_dy * x).mul_(inverse)
    c = torch.mv(t, gamma.to(t.dtype)).unsqueeze(1).mul_(inverse).div_(-x.shape[-1])
    dx = (wide_dy * gamma).addcmul_(x.to(t.dtype), c).mul_(inverse)
    if dresidual is not None:
        dx += dresidual
    return dx.to(x.dtype), t.sum(dim=0).to(gamma.dtype)
