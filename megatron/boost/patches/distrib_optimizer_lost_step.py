"""Loading parameter state ruins the `step` of a torch Adam that was loaded just before.

`DistributedOptimizer._set_main_param_and_optimizer_states()` copies every tensor of the parameter's
state from the checkpoint's. The step is not among those: the fully reshardable format leaves it
out (KeyError), the other one has the value from before the load in its place, which is 0.
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
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    upstream = DistributedOptimizer._set_main_param_and_optimizer_states

    @functools.wraps(upstream)
    def set_all_but_step(self: Any, model_param: Any, tensors: dict[str, Any]) -> None:
        # What is no tensor is skipped.
        upstream(self, model_param, {**tensors, "step": None})

    with replaced(DistributedOptimizer, upstream.__name__, set_all_but_step):
        yield


PATCH = Patch(
    name="distrib_optimizer_lost_step",
    reason="a load raises KeyError 'step', or resets the step of a torch Adam to 0",
    needs="always",
    apply=_apply,
)
