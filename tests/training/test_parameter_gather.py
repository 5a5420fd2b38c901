"""The distributed optimiser's overlapped parameter all-gather reaches weights before their use.

Megatron waits for a bucket's all-gather in the forward pre-hook of the modules that own its
parameters, without recursion: a weight read as an attribute, of a module that is never called, is
last step's. One bucket for the whole model, as in every small run, hides that.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any
from unittest import mock

import pytest

from tests.support.distributed import RankFailure
from tests.support.runs import losses, relative_difference, train

MANY_BUCKETS = "--overlap-grad-reduce --overlap-param-gather --ddp-bucket-size 2000"
DISTRIBUTED = "--use-distributed-optimizer --global-batch-size 8"
ARCHES = {
    "btp": "--low-rank-arch cola",
    "vanilla": "--low-rank-arch cola --low-rank-tp vanilla",
    "dense": "--low-rank-arch dense",
}


def weights_read_as_attributes() -> AbstractContextManager[Any]:
    from boost_layers.parameters import ShardedWeights

    return mock.patch.object(ShardedWeights, "__call__", lambda weights: weights.forward())


@pytest.mark.parametrize(
    "arch", ["btp", *(pytest.param(a, marks=pytest.mark.slow) for a in ("vanilla", "dense"))]
)
def test_overlapped_gathers_in_many_buckets_change_nothing(arch: str) -> None:
    at_once = losses(train(f"{ARCHES[arch]} {DISTRIBUTED}", 2))
    overlapped = losses(train(f"{ARCHES[arch]} {DISTRIBUTED} {MANY_BUCKETS}", 2))
    # The gradient norm adds the buckets up in another order.
    assert relative_difference(overlapped, at_once) <= 2e-6


@pytest.mark.slow
def test_weights_read_past_their_modules_are_never_waited_for() -> None:
    with pytest.raises(RankFailure, match="assert self.param_gather_handle is None"):
        train(f"{ARCHES['btp']} {DISTRIBUTED} {MANY_BUCKETS}", 2, weights_read_as_attributes)
