"""After a checkpoint load the parameters of a torch Adam share one `step` tensor.

`DistributedOptimizer.load_state_dict()` puts the same tensor into every parameter's state. Adam
advances it once per parameter, so bias correction runs away: a silently wrong resume.
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
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    upstream = DistributedOptimizer.load_state_dict

    @functools.wraps(upstream)
    def load_state_dict(self: Any, state_dict: dict[str, Any]) -> None:
        upstream(self, state_dict)
        for state in self.optimizer.state.values():
            if isinstance(state.get("step"), torch.Tensor):
                state["step"] = state["step"].clone()

    with replaced(DistributedOptimizer, "load_state_dict", load_state_dict):
        yield


PATCH = Patch(
    name="distrib_optimizer_shared_step",
    reason="after a load all parameters of a torch Adam advance one shared step, N times a step",
    needs="always",
    apply=_apply,
)
