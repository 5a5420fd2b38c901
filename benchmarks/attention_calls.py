"""Attention as one rank computes it, outside of any model, and what its matrix products amount to.

Beside it stands a large `torch.mm`, whose rate no kernel can beat by much: attention at that rate
is what the best kernel for it could give.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import product

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.op_cases import RankSizes

BACKENDS = {"flash": SDPBackend.FLASH_ATTENTION, "math": SDPBackend.MATH}
LAYOUTS = {"by_tokens": (1, 2, 0, 3), "by_heads": (0, 1, 2, 3)}
"""Where `[b, h, s, e]` comes from: `[s, b, h, e]`, as the up-projections leave it, or its own
contiguous copy."""
LARGE_MM = "large_mm"
"""The key of the large product."""
ATTENTION = "attention"
"""The key of all layers' attention."""


@dataclass(frozen=True, kw_only=True)
class AttentionCall:
    """One way to call PyTorch's `scaled_dot_product_attention`."""

    backend: str | None
    """A key of BACKENDS, or PyTorch's choice."""
    layout: str
    backward: bool
    one_sequence: bool = False
    """Whether the micro-batch's tokens are one long sequence."""

    @property
    def key(self) -> str:
        """Its name in results."""
        passes = "forward_backward" if self.backward else "forward"
        length = ["one_sequence"] if self.one_sequence else []
        return "_".join([self.backend or "chosen", self.layout, passes, *length])

    def flop(self, sizes: RankSizes) -> int:
        """Of its products (two forward, five backward), the upper triangle left out: b·h·s·(s+1)·e
        each."""
        b, h, s, e = self._shape(sizes)
        return (7 if self.backward else 2) * b * h * s * (s + 1) * e

    def prepared(
        self, sizes: RankSizes, dtype: torch.dtype, device: torch.device
    ) -> Callable[[], object]:
        """The call, on random q, k and v."""
        shape, order = self._shape(sizes), LAYOUTS[self.layout]
        in_memory = [shape[order.index(place)] for place in range(4)]
        random = partial(torch.randn, in_memory, dtype=dtype, device=device)
        qkv = [random().permute(order).requires_grad_() for _ in range(3)]
        return partial(self._run, qkv, torch.randn_like(qkv[0]))

    def _shape(self, sizes: RankSizes) -> tuple[int, int, int, int]:
        if self.one_sequence:
            return 1, sizes.heads, sizes.tokens, sizes.head
        return sizes.batch, sizes.heads, sizes.sequence, sizes.head

    def _run(self, qkv: Sequence[Tensor], dout: Tensor) -> None:
        chosen = nullcontext() if self.backend is None else sdpa_kernel(BACKENDS[self.backend])
        with chosen, torch.set_grad_enabled(self.backward):
            q, k, v = qkv
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            if self.backward:
                torch.autograd.grad(out, qkv, dout)


CALLS = [
    *(
        AttentionCall(backend=backend, layout=layout, backward=backward)
        for backend, layout, backward in product(BACKENDS, LAYOUTS, (False, True))
    ),
    AttentionCall(backend="flash", layout="by_tokens", backward=True, one_sequence=True),
]
"""What `attention.py` times."""

AS_IN_LAYERS = AttentionCall(backend=None, layout="by_tokens", backward=True)
"""What a layer calls in an iteration."""


def large_mm(sizes: RankSizes, dtype: torch.dtype, device: torch.device) -> Callable[[], object]:
    """A square product of twice the hidden size."""
    side = 2 * sizes.hidden
    matrices = [torch.randn(side, side, dtype=dtype, device=device) for _ in range(2)]
    return partial(torch.mm, *matrices)


def large_mm_flop(sizes: RankSizes) -> int:
    """Of `large_mm`."""
    side: int = 2 * sizes.hidden
    return 2 * side**3


def of_an_iteration(
    sizes: RankSizes, layers: int, dtype: torch.dtype, device: torch.device
) -> dict[str, Callable[[], object]]:
    """The attention of `layers` layers, forward and backward, and the large product, by key."""
    calls = [AS_IN_LAYERS.prepared(sizes, dtype, device) for _ in range(layers)]

    def attend() -> None:
        for call in calls:
            call()

    return {ATTENTION: attend, LARGE_MM: large_mm(sizes, dtype, device)}
