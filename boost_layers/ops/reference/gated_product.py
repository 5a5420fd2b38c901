"""The gated product of the MLP."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def gated_product(gate: Tensor, up: Tensor, kind: str) -> Tensor:
    """m = SiLU(gate)∘up ("swiglu") or gate∘up ("product"): `[n, f]` twice → `[n, f]`."""
    return F.silu(gate).mul_(up) if kind == "swiglu" else gate * up


def gated_product_backward(
    dm: Tensor, gate: Tensor, up: Tensor, kind: str
) -> tuple[Tensor, Tensor]:
    """The gradients of gate and up from that of m, `[n, f]` each; SiLU(gate) is recomputed."""
    if kind == "product":
        return dm * up, dm * gate
    return torch.ops.aten.silu_backward(dm * up, gate), F.silu(gate).mul_(dm)
