"""What a checkpoint says of our models: canonical names, whole shapes, the right shard, and weights
that survive a save and a load in another layout."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from tests.distributed.test_parity import BTP, DENSE, DENSE_PLAIN, PLAIN, VANILLA
from tests.support.distributed import run_ranks
from tests.support.parallel_gpt import Case, parallel_gpt, tensor_parallel_state
from tests.support.plain_llama import random_canonical
from tests.support.resharding import load, save

COLA = replace(PLAIN, heads=8, kv_heads=4, head_dim=6)
FULL_RANK = replace(DENSE_PLAIN, heads=8, kv_heads=4, head_dim=6)
CASES = {
    "btp": Case(plain=COLA, low_rank=BTP, tp=2, dtype=torch.float32),
    "btp-ungrouped": Case(
        plain=COLA, low_rank=replace(BTP, grouping=False), tp=2, dtype=torch.float32
    ),
    "vanilla": Case(plain=COLA, low_rank=VANILLA, tp=2, dtype=torch.float32),
    "dense": Case(plain=FULL_RANK, low_rank=DENSE, tp=2, dtype=torch.float32),
    "dense-sequence-parallel": Case(
        plain=FULL_RANK, low_rank=DENSE, tp=2, dtype=torch.float32, sequence_parallel=True
    ),
}


class Shard(NamedTuple):
    """What a checkpoint is told of one tensor on one rank."""

    shape: tuple[int, ...]
    """Of the whole tensor."""
    offset: tuple[int, ...]
    replica: Any
    """Which of several equal copies this is."""
    data: Tensor


def shards(cases: Mapping[str, Case]) -> dict[str, dict[str, dict[str, Shard]]]:
    """On a rank: by case and by what Megatron is asked for, layers "apart" or "stacked" along an
    axis of their own, by name in the checkpoint."""
    from megatron.core.dist_checkpointing.mapping import ShardedTensor

    found: dict[str, dict[str, dict[str, Shard]]] = {}
    with tensor_parallel_state(2):
        for name, case in cases.items():
            tensors = random_canonical(case.plain, seed=1, dtype=torch.float32)
            with parallel_gpt(case, tensors) as model:
                found[name] = {
                    kind: {
                        t.key: Shard(t.global_shape, t.global_offset, t.replica_id, t.data.detach())
                        for t in model.sharded_state_dict(metadata=metadata).values()
                        if isinstance(t, ShardedTensor)
                    }
                    for kind, metadata in (
                        ("apart", {"non_homogeneous_layers": True}),
                        ("stacked", {"non_homogeneous_layers": False}),
                    )
                }
    return found


@pytest.fixture(scope="module")
def by_rank() -> list[dict[str, dict[str, dict[str, Shard]]]]:
    return run_ranks(shards, 2, CASES)


@pytest.mark.parametrize("name", CASES)
def test_names_shapes_and_offsets_are_those_of_the_whole_tensors(
    by_rank: list[dict[str, dict[str, dict[str, Shard]]]], name: str
) -> None:
    """Whatever the strategy and the grouping."""
    tensors = random_canonical(CASES[name].plain, seed=1, dtype=torch.float32)
    first, second = (found[name]["apart"] for found in by_rank)
    assert first.keys() == second.keys() == tensors.keys()
    for key, whole in tensors.items():
        for shard in (first[key], second[key]):
            assert shard.shape == tuple(whole.shape), key
            ends = zip(shard.offset, shard.data.shape, strict=True)
            window = tuple(slice(offset, offset + size) for offset, size in ends)
            assert torch.equal(shard.data, whole[window]), key
        # The second rank has the other half, or another copy of the same.
        copied = first[key].data.shape == whole.shape
        assert (first[key].offset == second[key].offset) == copied, key
        assert (first[key].replica != second[key].replica) == copied, key


@pytest.mark.parametrize("name", CASES)
def test_layers_are_never_stacked(
    by_rank: list[dict[str, dict[str, dict[str, Shard]]]], name: str
) -> None:
    """Their ranks and their architecture may differ."""
    for found in by_rank:
        apart, stacked = found[name]["apart"], found[name]["stacked"]
        assert {key: shard.shape for key, shard in stacked.items()} == {
            key: shard.shape for key, shard in apart.items()
        }


@pytest.mark.parametrize(
    ("saved", "loaded"),
    [
        ("btp", {"btp": 1, "vanilla": 1}),
        pytest.param("dense", {"dense": 1}, marks=pytest.mark.slow),
    ],
)
def test_weights_survive_a_change_of_layout(
    saved: str, loaded: dict[str, int], tmp_path: Path
) -> None:
    case = CASES[saved]
    tensors = random_canonical(case.plain, seed=1, dtype=torch.float32)
    loss = run_ranks(save, 2, case, tensors, str(tmp_path))[0]
    (tp,) = set(loaded.values())
    cases = {name: replace(CASES[name], tp=tp) for name in loaded}
    for found in run_ranks(load, tp, cases, str(tmp_path)):
        for weights, reloaded_loss in found.values():
            assert weights.keys() == tensors.keys()
            assert all(torch.equal(weights[name], tensors[name]) for name in tensors)
            torch.testing.assert_close(reloaded_loss, loss, rtol=2e-6, atol=0)
