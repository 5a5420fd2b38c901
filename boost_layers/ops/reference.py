"""Every op in plain PyTorch: what a fast implementation is compared with, and the fallback.

Shapes: n tokens, k local width, w width of the (grouped) latent, r rank, T tensor-parallel size, d
the whole hidden size. Statistics are kept in fp32 whatever the input (fp64 for fp64 input).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor


def _statistics_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def sum_of_squares(x: Tensor) -> Tensor:
    """S = Σ x² per token: `[n, k]` → `[n, 1]` in fp32 (fp64 for fp64), also for bf16 input, whose
    own squares would be off by 0.8 %."""
    dtype = _statistics_dtype(x.dtype)
    return torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=dtype).square_()


def statistics_columns(dtype: torch.dtype, tp_size: int) -> int:
    """Columns that the statistics take in an all-reduce message of `dtype`: one in fp32 and fp64,
    where a sum may be rounded like any other; three for each rank in bf16 (see
    `write_statistics`)."""
    return 3 * tp_size if dtype == torch.bfloat16 else 1


def write_statistics(s: Tensor, block: Tensor, tp_rank: int) -> None:
    """Write this rank's S `[n, 1]` into the statistics block `[n, columns]` of a message.

    A bf16 all-reduce would round S at every hop. Each rank therefore owns a slot of three columns
    and writes S = hi + mid + lo, each the bf16 rounding of what is left; the other slots are zero.
    Sums with zero are exact, so after the all-reduce every rank holds every S bit for bit. S = Inf,
    or a finite S above 3.396e38 whose `hi` rounds to Inf, decodes as NaN.

    Never compiled, in a program that compiles the layers either: a compiler that keeps the
    intermediate in fp32 makes mid and lo wrong.
    """
    # What TorchDynamo cannot trace it leaves to Python. `torch.compiler.disable` would say so too,
    # for an import of TorchDynamo that adds a second to every start.
    if torch.compiler.is_compiling():
        raise RuntimeError("write_statistics: must not be compiled")
    if block.dtype != torch.bfloat16:
        block.copy_(s)
        return
    block.zero_()
    left = s
    for column in range(3 * tp_rank, 3 * tp_rank + 3):
        part = left.to(torch.bfloat16)
        block[:, column : column + 1] = part
        left = left - part.float()


def read_statistics(block: Tensor) -> Tensor:
    """The whole S `[n, 1]` from the reduced statistics block `[n, columns]`: the slots are put
    together exactly and added up in fp32, in the same order on every rank."""
    if block.dtype != torch.bfloat16:
        return block
    hi, mid, lo = block.float().unflatten(1, (-1, 3)).unbind(dim=-1)
    return ((hi + mid) + lo).sum(dim=-1, keepdim=True)


def message_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which partial sums of a tensor that is not normalised yet are all-reduced: its
    own, but fp32 for fp16, whose 65504 they may pass."""
    return torch.float32 if dtype == torch.float16 else dtype


def project_down(x: Tensor, folded: Tensor, out: Tensor) -> None:
    """H = x·(γ∘A)ᵀ into `out`: `[n, k]`, `[w, k]` → `[n, w]`, in the dtype of `out`, which for fp16
    input is fp32."""
    if out.dtype == x.dtype:
        torch.mm(x, folded.t(), out=out)
    elif x.is_cuda:
        torch.mm(x, folded.t(), out_dtype=out.dtype, out=out)
    else:
        torch.mm(x.to(out.dtype), folded.t().to(out.dtype), out=out)


def normalise_latent(
    h: Tensor, s: Tensor, hidden_size: int, eps: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """u = H/ρ and ρ = sqrt(S/d + ε): `[n, w]`, `[n, 1]` → u `[n, w]` in `dtype`, ρ `[n, 1]`.

    ρ stays in fp32; the division is done in fp32 and rounded once, in place where `dtype` is that
    of H.
    """
    rho = torch.sqrt(s / hidden_size + eps)
    return divide_latent(h, rho, dtype), rho


def divide_latent(h: Tensor, rho: Tensor, dtype: torch.dtype) -> Tensor:
    """u = H/ρ in `dtype`, in place where that is H's: `[n, w]`, `[n, 1]` → `[n, w]`."""
    if h.dtype == rho.dtype == dtype:
        return h.div_(rho)
    return h.copy_(h / rho) if h.dtype == dtype else (h / rho).to(dtype)


def normalise_latent_backward(
    du: Tensor, u: Tensor, rho: Tensor, hidden_size: int
) -> tuple[Tensor, Tensor]:
    """dH = du/ρ `[n, w]` and this group's share of c = −(du·u)/(ρ²·d) `[n, 1]`, the coefficient of
    x in dx. The dot product is in fp32; over several groups the c add up."""
    wide = rho.dtype
    c = (du.to(wide) * u.to(wide)).sum(dim=-1, keepdim=True)
    return (du / rho).to(du.dtype), c.div_(rho.square().mul_(-hidden_size))


def fold_gamma(gamma: Tensor | None, weights: Sequence[Tensor]) -> Tensor:
    """γ∘A of grouped down-projections: γ `[k]`, A_i `[r_i, k]` → `[Σ r_i, k]`."""
    if gamma is None:
        return weights[0] if len(weights) == 1 else torch.cat(list(weights))
    folded = weights[0].new_empty(sum(a.shape[0] for a in weights), weights[0].shape[1])
    row = 0
    for a in weights:
        torch.mul(a, gamma, out=folded[row : row + a.shape[0]])
        row += a.shape[0]
    return folded


def apply_activation(u: Tensor, activation: str) -> Tensor:
    """z = φ(u) for φ "silu", "gelu" (exact) or "identity"; any shape."""
    if activation == "silu":
        return F.silu(u)
    if activation == "gelu":
        return F.gelu(u)
    return u


def apply_activation_backward(dz: Tensor, u: Tensor, activation: str) -> Tensor:
    """du = dz∘φ′(u); any shape."""
    if activation == "silu":
        return torch.ops.aten.silu_backward(dz, u)
    if activation == "gelu":
        return torch.ops.aten.gelu_backward(dz, u)
    return dz


LATENT_NORM_EPS = 1e-6
"""ε of LaX's norm over a latent, as in its released configurations."""


def activate_latent(
    w: Tensor,
    ranks: Sequence[int],
    activation: str,
    norm: str = "none",
    weight: Tensor | None = None,
    bias: Tensor | None = None,
) -> Tensor:
    """z = φ(Norm(w)) of latents side by side: `[n, Σ r_i]` → the same.

    `norm` "layernorm" or "rmsnorm" is taken over each r_i of `ranks` apart, with γ `weight` and,
    for layernorm, β `bias`, `[Σ r_i]`; its arithmetic is in fp32. "none": z = φ(w).
    """
    if norm == "none":
        return apply_activation(w, activation)
    v = [member for member, *_ in _normed_members(w, ranks, norm, weight, bias)]
    return apply_activation(torch.cat(v, dim=1), activation)


def activate_latent_backward(
    dz: Tensor,
    w: Tensor,
    ranks: Sequence[int],
    activation: str,
    norm: str = "none",
    weight: Tensor | None = None,
    bias: Tensor | None = None,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """dw `[n, Σ r_i]`, and dγ and dβ `[Σ r_i]` (None where there is none) of `activate_latent`; the
    norm is computed again. With g = dv∘γ: dw = (g − mean(g) − ŵ·mean(g∘ŵ))/σ, without mean(g) for
    rmsnorm."""
    if norm == "none":
        return apply_activation_backward(dz, w, activation), None, None
    members = _normed_members(w, ranks, norm, weight, bias)
    v = torch.cat([member for member, *_ in members], dim=1)
    dv = apply_activation_backward(dz, v, activation)
    grads = []
    for dmember, (_, x, gamma, beta, *statistics) in zip(
        dv.split(list(ranks), dim=1), members, strict=True
    ):
        if norm == "layernorm":
            grads.append(
                torch.ops.aten.native_layer_norm_backward(
                    dmember.contiguous(), x, [x.shape[1]], *statistics, gamma, beta, [True] * 3
                )
            )
        else:
            grads.append((*rms_norm_backward(dmember, x, gamma, *statistics), None))
    dw, dweight, dbias = zip(*grads, strict=True)
    return (
        torch.cat(dw, dim=1),
        torch.cat(dweight),
        torch.cat(dbias) if norm == "layernorm" else None,
    )


def _normed_members(
    w: Tensor, ranks: Sequence[int], norm: str, weight: Tensor | None, bias: Tensor | None
) -> list[tuple[Tensor, ...]]:
    """Of each member: Norm(w_i), w_i itself `[n, r_i]`, contiguous, its γ and β, and the statistics
    that its backward needs."""
    assert weight is not None
    widths = list(ranks)
    betas = [None] * len(widths) if bias is None else bias.split(widths)
    found: list[tuple[Any, ...]] = []
    for x, gamma, beta in zip(w.split(widths, dim=1), weight.split(widths), betas, strict=True):
        x = x.contiguous()
        if norm == "layernorm":
            v, *statistics = torch.native_layer_norm(x, [x.shape[1]], gamma, beta, LATENT_NORM_EPS)
        else:
            v, *statistics = rms_norm(x, gamma, LATENT_NORM_EPS)
        found.append((v, x, gamma, beta, *statistics))
    return found


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


def project_up(z: Tensor, weights: Sequence[Tensor], *, batched: bool) -> tuple[Tensor, ...]:
    """y_i = z_i·B_iᵀ for the groups z_i side by side in z: `[n, Σ r_i]`, B_i `[o_i, r_i]` →
    `[n, o_i]` each. Weights of one shape are one batched GEMM when `batched` says so."""
    n = z.shape[0]
    shape = weights[0].shape
    if batched and len(weights) > 1 and all(b.shape == shape for b in weights):
        grouped_z = z.view(n, len(weights), shape[1]).transpose(0, 1)
        return torch.bmm(grouped_z, torch.stack(list(weights)).transpose(1, 2)).unbind(0)
    parts = z.split([b.shape[1] for b in weights], dim=1)
    return tuple(torch.mm(part, b.t()) for part, b in zip(parts, weights, strict=True))


def gated_product(gate: Tensor, up: Tensor, kind: str) -> Tensor:
    """m = SiLU(gate)∘up ("swiglu") or gate∘up ("product"); any shape."""
    return F.silu(gate).mul_(up) if kind == "swiglu" else gate * up


def gated_product_backward(
    dm: Tensor, gate: Tensor, up: Tensor, kind: str
) -> tuple[Tensor, Tensor]:
    """The gradients of gate and up from that of m; SiLU(gate) is recomputed."""
    if kind == "product":
        return dm * up, dm * gate
    return torch.ops.aten.silu_backward(dm * up, gate), F.silu(gate).mul_(dm)


def rms_norm(x: Tensor, gamma: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """γ∘x/ρ and ρ = sqrt(mean(x²) + ε) over the last, whole dimension: `[n, d]`, `[d]` →
    `[n, d]`, `[n, 1]`; the arithmetic is in fp32."""
    rho = torch.sqrt(sum_of_squares(x).div_(x.shape[-1]).add_(eps))
    return (x / rho).mul_(gamma).to(x.dtype), rho


def rms_norm_backward(dy: Tensor, x: Tensor, gamma: Tensor, rho: Tensor) -> tuple[Tensor, Tensor]:
    """dx `[n, d]` and dγ `[d]` of `rms_norm` from dy `[n, d]`: with t = dy∘x/ρ in fp32, dγ = Σ_n t
    and dx = (dy∘γ − x·(t·γ)/(ρ·d))/ρ."""
    inverse = rho.reciprocal()
    wide_dy = dy.to(rho.dtype)
    t = (wide_dy * x).mul_(inverse)
    c = torch.mv(t, gamma.to(t.dtype)).unsqueeze(1).mul_(inverse).div_(-x.shape[-1])
    dx = (wide_dy * gamma).addcmul_(x.to(t.dtype), c).mul_(inverse)
    return dx.to(x.dtype), t.sum(dim=0).to(gamma.dtype)


def rotate_half(t: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool) -> Tensor:
    """Rotary embedding: t `[s, b, h, e]`, cos and sin `[s, 1, 1, p]` with p ≤ e; what lies beyond p
    passes through. Pairs are (i, i + p/2), or (2i, 2i + 1) if interleaved. The result is laid out
    `[b, h, s, e]` in memory, as attention reads it, and returned as `[s, b, h, e]`."""
    s, b, h, e = t.shape
    rotated = t.new_empty(b, h, s, e).permute(2, 0, 1, 3)
    width = cos.shape[-1]
    first, second = _pairs(width, interleaved)
    x1, x2 = t[..., first], t[..., second]
    torch.mul(x1, cos[..., first], out=rotated[..., first]).addcmul_(x2, sin[..., first], value=-1)
    torch.mul(x2, cos[..., second], out=rotated[..., second]).addcmul_(x1, sin[..., second])
    if width < e:
        rotated[..., width:] = t[..., width:]
    return rotated


def rotate_half_backward(dt: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool) -> Tensor:
    """The gradient of `rotate_half`'s input, `[s, b, h, e]` contiguous."""
    width = cos.shape[-1]
    first, second = _pairs(width, interleaved)
    g1, g2 = dt[..., first], dt[..., second]
    grad = torch.empty(dt.shape, dtype=dt.dtype, device=dt.device)
    torch.mul(g1, cos[..., first], out=grad[..., first]).addcmul_(g2, sin[..., second])
    torch.mul(g2, cos[..., second], out=grad[..., second]).addcmul_(g1, sin[..., first], value=-1)
    if width < dt.shape[-1]:
        grad[..., width:] = dt[..., width:]
    return grad


def _pairs(width: int, interleaved: bool) -> tuple[slice, slice]:
    """Where the two members of each rotated pair stand in the last dimension."""
    if interleaved:
        return slice(0, width, 2), slice(1, width, 2)
    return slice(0, width // 2), slice(width // 2, width)
