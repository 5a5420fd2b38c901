"""Rotary embedding, and the layout of heads between projections and attention."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor


def rotary_(tensors: Sequence[Tensor], cos: Tensor, sin: Tensor, *, interleaved: bool) -> None:
    """Rotary embedding of q and k in place: t `[s, b, h, e]`, cos and sin `[s, p]` with p ≤ e; what
    lies beyond p stays. Pairs are (i, i + p/2), or (2i, 2i + 1) if interleaved."""
    for t in tensors:
        _rotate(t, t, cos, sin, interleaved)


def rotary_backward(
    grads: Sequence[Tensor], rotated: int, cos: Tensor, sin: Tensor, *, interleaved: bool
) -> list[Tensor]:
    """The gradients of q, k and v from those of the attention's input: `[s, b, h, e]` each, in any
    layout; the first `rotated` are turned back, the others only moved. The results are contiguous
    and lie one after the other, so that members of equal shape make a batched GEMM."""
    buffer = grads[0].new_empty(sum(t.numel() for t in grads))
    found = []
    parts = buffer.split([t.numel() for t in grads])
    for i, (t, part) in enumerate(zip(grads, parts, strict=True)):
        out = part.view(t.shape)
        if i < rotated:
            _rotate(t, out, cos, -sin, interleaved, transposed=True)
        else:
            out.copy_(t)
        found.append(out)
    return found


def _rotate(
    t: Tensor,
    out: Tensor,
    cos: Tensor,
    sin: Tensor,
    interleaved: bool,
    *,
    transposed: bool = False,
) -> None:
    """out = t∘cos + rotated(t)∘sin; `transposed`: the sines of a pair change places."""
    width = cos.shape[-1]
    first, second = _pairs(width, interleaved)
    cos, sin = cos[:, None, None, :], sin[:, None, None, :]
    sin1, sin2 = sin[..., first], sin[..., second]
    if transposed:
        sin1, sin2 = sin2, sin1
    x1, x2 = t[..., first], t[..., second]
    turned = torch.addcmul(x1 * cos[..., first], x2, sin1, value=-1)
    out[..., second] = torch.addcmul(x2 * cos[..., second], x1, sin2)
    out[..., first] = turned
    if out is not t and width < t.shape[-1]:
        out[..., width:] = t[..., width:]


def _pairs(width: int, interleaved: bool) -> tuple[slice, slice]:
    """Where the two members of each rotated pair stand in the last dimension."""
    if interleaved:
        return slice(0, width, 2), slice(1, width, 2)
    return slice(0, width // 2), slice(width // 2, width)
