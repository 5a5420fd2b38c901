"""Without a GPU, writing a checkpoint in the background fails, or would write a later state.

The writer is a process of its own that asks for its CUDA device at once. It gets the tensors
through shared memory and copies them to the CPU: there that copies nothing, and the training would
go on changing what is being written. A fork of the rank, upstream's other kind of writer, needs no
device and keeps the memory as it was.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

from megatron.boost.patches import Patch
from megatron.boost.patches.replacement import replaced


@contextlib.contextmanager
def _apply() -> Iterator[None]:
    from megatron.core.dist_checkpointing.strategies.async_utils import AsyncCallsQueue

    upstream = AsyncCallsQueue.__init__

    @functools.wraps(upstream)
    def forking(self: Any, persistent: bool = False) -> None:
        upstream(self, persistent=False)

    def start_nothing(*_: Any, **__: Any) -> None:
        """A fork is made when there is something to write."""

    with (
        replaced(AsyncCallsQueue, "__init__", forking),
        replaced(AsyncCallsQueue, "warmup_persistent_caller", staticmethod(start_nothing)),
    ):
        yield


PATCH = Patch(
    name="forked_checkpoint_writer",
    reason="the background writer of checkpoints asks for a CUDA device, and shares live tensors",
    needs="cpu",
    apply=_apply,
)
