"""φ and its slope."""

# Triton evaluates annotations: its functions can have those that it knows, and no others.
# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra import libdevice

from boost_layers.ops.triton_kernels.common import INTERPRETED


@triton.jit
def activated(x, ACTIVATION: tl.constexpr):
    """φ(x): "silu", "gelu" (exact) or "identity"."""
    if ACTIVATION == "silu":
        return x / (1.0 + exp(-x))
    elif ACTIVATION == "gelu":
        return 0.5 * x * erfc(x * -0.70710678118654752440)
    else:
        return x


@triton.jit
def with_slope(grad, x, ACTIVATION: tl.constexpr):
    """grad·φ′(x)."""
    if ACTIVATION == "silu":
        s = sigmoid(x)
        return grad * (s * (1.0 + x * (1.0 - s)))
    elif ACTIVATION == "gelu":
        cumulative = 0.5 * erfc(x * -0.70710678118654752440)
        return grad * (cumulative + x * (exp(x * x * -0.5) * 0.39894228040143267794))
    else:
        return grad


@triton.jit
def exp(x):
    """e^x: not Triton's own, whose error grows with |x| (2^(x·log₂e) with a rounded exponent)."""
    if INTERPRETED:
        return tl.exp(x)
    else:
        return libdevice.exp(x)


@triton.jit
def erfc(x):
    """1 − erf(x), without the cancellation that it has for large x."""
    if INTERPRETED:
        # The interpreter has erf alone: in fp64, whose cancellation begins where erfc is below
        # 1e-10, for the sake of fp32.
        return (1.0 - tl.erf(x.to(tl.float64))).to(x.dtype)
    else:
        return libdevice.erfc(x)


@triton.jit
def sigmoid(x):
    """1/(1 + e^−x)."""
    return 1.0 / (1.0 + exp(-x))
