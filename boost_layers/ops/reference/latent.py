"""From reduced latents to the input of the up-projections, and LaX's norm and gates."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F

from boost_layers.ops.reference.rms_norm import rms_norm, rms_norm_backward
from boost_layers.ops.reference.statistics import read_statistics, wide

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

LATENT_NORM_EPS = 1e-6
"""ε of LaX's norm over a latent, as in its released configurations."""


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
    """z = φ(Norm(v)), v = h/ρ (+ gated), of latents side by side, and split into its members.

    Args:
        h: the reduced latents `[n, w]`, w = Σ r_i; in the result's dtype, or in fp32.
        ranks: r_i of each member.
        activation: φ, "silu", "gelu" (exact) or "identity".
        statistics: S of each token `[n, 1]`, or the slots of an all-reduce message `[n, 3·T]`;
            ρ = sqrt(S/d + ε). Without, ρ = 1.
        hidden_size: d of the whole model.
        eps: ε.
        gated: LaX's gated latent of the layer before, `[n, w]`.
        norm: "layernorm" or "rmsnorm" over each member apart; "none".
        weight: γ `[w]` of the norm.
        bias: β `[w]` of "layernorm".
        dtype: of the results, if not that of h.

    Returns:
        z, flat: each member a contiguous `[n, r_i]`, one after the other; and v `[n, w]` where it
        is not h/ρ alone, for what needs it later. The arithmetic is in fp32, and v is rounded
        before it is normalised if it is returned.
    """
    dtype = dtype or h.dtype
    v = _value(h, statistics, hidden_size, eps)
    kept = None
    if gated is not None:
        kept = (v + gated).to(dtype)
        v = kept
    members = _normed_members(v, ranks, norm, weight, bias)
    z = [_activated(y, activation).to(dtype).flatten() for y, *_ in members]
    return z[0] if len(z) == 1 else torch.cat(z), kept


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
    """The gradients of `latent_epilogue` from that of z, flat as z is.

    Args:
        dz: in the dtype of z.
        ranks, activation, statistics, hidden_size, eps, norm, weight, bias: as forward.
        h: as forward; needed unless `v` is given and there are no statistics.
        v: what forward returned, where it did.
        dv: the gradient of v that comes from elsewhere, `[n, w]`.

    Returns:
        dh `[n, w]` in the dtype of h; dv `[n, w]`, whole, with `v` (it is the gradient of `gated`);
        dS `[n, 1]` with statistics: −(dv·h)/(2·ρ³·d), the dot product over all of w, in fp32; dγ
        and dβ `[w]` with a norm. With g = dy∘γ, its own gradient is
        (g − mean(g) − x̂·mean(g∘x̂))/σ, without mean(g) for rmsnorm.
    """
    value = v
    if value is None:
        assert h is not None
        value = _value(h, statistics, hidden_size, eps)
    n = value.shape[0]
    sizes = [n * rank for rank in ranks]
    parts: list[Tensor] = []
    norms: list[tuple[Tensor, ...]] = []
    members = _normed_members(value, ranks, norm, weight, bias)
    for flat, (y, x, gamma, beta, *moments) in zip(dz.split(sizes), members, strict=True):
        dy = _activated_backward(flat.view(n, y.shape[1]).to(y.dtype), y, activation)
        if norm == "layernorm":
            part, *of_norm = torch.ops.aten.native_layer_norm_backward(
                dy, x, [x.shape[1]], *moments, gamma, beta, [True] * 3
            )
            norms.append(tuple(of_norm))
        elif norm == "rmsnorm":
            part, dgamma = rms_norm_backward(dy, x, gamma, *moments)
            norms.append((dgamma,))
        else:
            part = dy
        parts.append(part)
    whole = parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)
    if dv is not None:
        whole = whole + dv
    dh, ds = whole, None
    if statistics is not None:
        assert h is not None
        rho = _rho(statistics, hidden_size, eps)
        dot = (whole * h).sum(dim=-1, keepdim=True)
        # One factor after the other: their product may be beyond fp32 where dS is not.
        ds = dot.div_(rho).div_(rho).div_(rho).div_(-2 * hidden_size)
        dh = whole / rho
    dweight = torch.cat([each[0] for each in norms]).to(dz.dtype) if norms else None
    dbias = torch.cat([each[1] for each in norms]).to(dz.dtype) if norm == "layernorm" else None
    return (
        dh.to(dz.dtype if h is None else h.dtype),
        whole.to(dz.dtype) if v is not None else None,
        ds,
        dweight,
        dbias,
    )


def _rho(statistics: Tensor, hidden_size: int, eps: float) -> Tensor:
    s = statistics if statistics.shape[1] == 1 else read_statistics(statistics)
    return torch.sqrt(s / hidden_size + eps)


def _value(h: Tensor, statistics: Tensor | None, hidden_size: int, eps: float) -> Tensor:
    """h/ρ in fp32 (fp64)."""
    v = h.to(wide(h.dtype))
    return v if statistics is None else v / _rho(statistics, hidden_size, eps)


def _activated(y: Tensor, activation: str) -> Tensor:
    if activation == "silu":
        return F.silu(y)
    if activation == "gelu":
        # By erfc, which does not cancel far below zero as 1 + erf does.
        return 0.5 * y * torch.erfc(y * -(0.5**0.5))
    return y


def _activated_backward(dz: Tensor, y: Tensor, activation: str) -> Tensor:
    if activation == "silu":
        return torch.ops.aten.silu_backward(dz, y)
    if activation == "gelu":
        return torch.ops.aten.gelu_backward(dz, y)
    return dz


def _normed_members(
    v: Tensor, ranks: Sequence[int], norm: str, weight: Tensor | None, bias: Tensor | None
) -> list[tuple[Any, ...]]:
    """Of each member, in fp32: Norm(v_i), v_i itself `[n, r_i]`, its γ and β, and the statistics
    that the norm's gradient needs."""
    v = v.to(wide(v.dtype))
    widths = list(ranks)
    if norm == "none":
        return [(part, part, None, None) for part in v.split(widths, dim=1)]
    assert weight is not None
    gammas = weight.to(v.dtype).split(widths)
    betas = [None] * len(widths) if bias is None else bias.to(v.dtype).split(widths)
    found: list[tuple[Any, ...]] = []
    for x, gamma, beta in zip(v.split(widths, dim=1), gammas, betas, strict=True):
        x = x.contiguous()
        if norm == "layernorm":
            y, *moments = torch.native_layer_norm(x, [x.shape[1]], gamma, beta, LATENT_NORM_EPS)
        else:
            y, *moments = rms_norm(x, gamma, LATENT_NORM_EPS)
        found.append((y, x, gamma, beta, *moments))
    return found
