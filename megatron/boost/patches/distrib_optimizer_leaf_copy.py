"""Loading parameter state copies into parameters that require a gradient, outside `no_grad`.

Of the ways to load, `DistributedOptimizer.load_parameter_state_from_dp_reshardable()` alone lacks
the decorator.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from megatron.boost.patches import Patch
from megatron.boost.patches.replacement import replaced


@contextlib.contextmanager
def _apply() -> Iterator[None]:
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    upstream = DistributedOptimizer.load_parameter_state_from_dp_reshardable
    with replaced(DistributedOptimizer, upstream.__name__, torch.no_grad()(upstream)):
        yield


PATCH = Patch(
    name="distrib_optimizer_leaf_copy",
    reason="a load copies in place into a leaf that requires a gradient, which autograd refuses",
    needs="always",
    apply=_apply,
)
