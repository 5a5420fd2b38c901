"""The distributed optimizer cannot describe a torch Adam that has made no step yet.

`DistributedOptimizer.state_dict()` looks the step up in Adam's per-parameter state and asserts that
it finds one. Loading a checkpoint asks a fresh optimizer, whose state is empty, and stops there;
with Transformer Engine's or apex's Adam the step is elsewhere and nothing is asserted.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import torch

from megatron.boost.patches import Patch
from megatron.boost.patches.replacement import replaced


@contextlib.contextmanager
def _apply() -> Iterator[None]:
    from megatron.core.optimizer import distrib_optimizer

    upstream = distrib_optimizer.DistributedOptimizer.state_dict

    @functools.wraps(upstream)
    def state_dict(self: Any) -> dict[str, Any]:
        state = self.optimizer.state
        if state or distrib_optimizer.HAVE_APEX_OR_TE:
            return upstream(self)
        # Only the step is read; the per-parameter state is no part of the result.
        state["before the first step"] = {"step": torch.zeros(())}
        try:
            return upstream(self)
        finally:
            del state["before the first step"]

    with replaced(distrib_optimizer.DistributedOptimizer, "state_dict", state_dict):
        yield


PATCH = Patch(
    name="distrib_optimizer_empty_state",
    reason="loading a checkpoint asserts on the empty state of a torch Adam before its first step",
    needs="always",
    apply=_apply,
)
