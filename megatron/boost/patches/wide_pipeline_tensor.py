"""Megatron's pipeline schedules expect `[s/T, b, d]` between stages; LaX's latents make it wider.

`variable_seq_lengths` would have every stage send its shape ahead, at the price of a message and a
`torch.cuda.synchronize()` for every tensor. The width is known, so the receiver is told instead.
Not in the list of patches: it belongs to a run, and takes its width from it.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

from megatron.boost.patches.replacement import replaced


@contextlib.contextmanager
def wide_pipeline_tensor(columns: int) -> Iterator[None]:
    """Context in which a stage receives `[s/T, b, d + columns]` where Megatron's schedule says
    `[s/T, b, d]`; with 0 columns nothing changes."""
    if columns == 0:
        yield
        return
    from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator

    upstream = P2PCommunicator._communicate

    @functools.wraps(upstream)
    def communicate(self: Any, *, tensor_shape: Any, **others: Any) -> Any:
        if tensor_shape:
            *rows, hidden = tensor_shape
            assert hidden == self.config.hidden_size, "upstream sends another tensor now"
            tensor_shape = (*rows, hidden + columns)
        return upstream(self, tensor_shape=tensor_shape, **others)

    with replaced(P2PCommunicator, upstream.__name__, communicate):
        yield
