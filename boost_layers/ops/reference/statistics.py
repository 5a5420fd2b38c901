"""The residual's sum, Σx² per token, and the statistics' slots of an all-reduce message."""

from __future__ import annotations

import torch
from torch import Tensor


def wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype of statistics and arithmetic: fp32, and fp64 for fp64."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def message_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which partial sums of a tensor that is not normalised yet are all-reduced: its
    own, but fp32 for fp16, whose 65504 they may pass."""
    return torch.float32 if dtype == torch.float16 else dtype


def statistics_columns(dtype: torch.dtype, tp_size: int) -> int:
    """Columns that the statistics take in an all-reduce message of `dtype`: one in fp32 and fp64,
    where a sum may be rounded like any other; three for each rank in bf16 (see `rms_stats`)."""
    return 3 * tp_size if dtype == torch.bfloat16 else 1


def rms_stats(x: Tensor, slots: Tensor | None = None, tp_rank: int = 0) -> Tensor:
    """S = Σ x² per token: `[n, k]` → `[n, 1]` in fp32 (fp64 for fp64), also for bf16 input, whose
    own squares would be off by 0.8 %. With `slots` it is written into an all-reduce message too.

    A bf16 all-reduce would round S at every hop. Each rank therefore owns a slot of three of the
    columns of `slots` `[n, 3·T]` and writes S = hi + mid + lo, each the bf16 rounding of what is
    left; the other slots are zero. Sums with zero are exact, so after the all-reduce every rank
    holds every S bit for bit (below 2^-110 within 2^-134, bf16's smallest number). S = Inf, or a
    finite S above 3.396e38 whose `hi` rounds to Inf, decodes as NaN. In fp32 and fp64 `slots` is
    `[n, 1]`, S itself.

    Never compiled, in a program that compiles the layers either: a compiler that keeps the
    intermediate in fp32 makes mid and lo wrong.
    """
    dtype = wide(x.dtype)
    s = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=dtype).square_()
    if slots is not None:
        _write_slots(s, slots, tp_rank)
    return s


def residual_add_rms_stats(
    x: Tensor, delta: Tensor, slots: Tensor | None = None, tp_rank: int = 0
) -> Tensor:
    """x += Δ in place, and `rms_stats` of the sum: `[n, k]` twice → `[n, 1]`."""
    return rms_stats(x.add_(delta), slots, tp_rank)


def _write_slots(s: Tensor, slots: Tensor, tp_rank: int) -> None:
    # What TorchDynamo cannot trace it leaves to Python. `torch.compiler.disable` would say so too,
    # for an import of TorchDynamo that adds a second to every start.
    if torch.compiler.is_compiling():
        raise RuntimeError("rms_stats: the statistics' slots must not be written by compiled code")
    if slots.dtype != torch.bfloat16:
        slots.copy_(s)
        return
    slots.zero_()
    left = s
    for column in range(3 * tp_rank, 3 * tp_rank + 3):
        part = left.to(torch.bfloat16)
        slots[:, column : column + 1] = part
        left = left - part.float()


def read_statistics(block: Tensor) -> Tensor:
    """The whole S `[n, 1]` from the reduced statistics block `[n, columns]`: the slots are put
    together exactly and added up in fp32, in the same order on every rank."""
    if block.dtype != torch.bfloat16:
        return block.clone()
    hi, mid, lo = block.float().unflatten(1, (-1, 3)).unbind(dim=-1)
    return ((hi + mid) + lo).sum(dim=-1, keepdim=True)


def residual_gradient(dresidual: Tensor, x: Tensor, ds: Tensor) -> Tensor:
    """dx = dresidual + 2·dS∘x: `[n, k]` twice and `[n, 1]` → `[n, k]`. The gradient of x through
    the residual branch and S; the sum is in fp32 and rounded once."""
    return torch.addcmul(dresidual.to(ds.dtype), x, ds, value=2).to(x.dtype)
