"""Checkpoints that are written in the background, or not to the end; and what a run may leave out
when it loads one."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from tests.support.distributed import RankFailure
from tests.support.runs import losses, train, weight_differences, whole_weights

COLA = "--low-rank-arch cola --train-iters 4"
ASYNC = "--async-save"
TP2 = "--tensor-model-parallel-size 2"
DISTRIBUTED = "--use-distributed-optimizer"


def iterations(folder: Path) -> tuple[str, list[str]]:
    """What the tracker names, and the iterations whose checkpoint is complete."""
    complete = sorted(path.parent.name for path in folder.glob("iter_*/metadata.json"))
    return (folder / "latest_checkpointed_iteration.txt").read_text(), complete


@contextlib.contextmanager
def slow_first_writer() -> Iterator[None]:
    """Context in which the first checkpoint is written while the training goes on: only after two
    more steps of the optimizer, which change all weights in place."""
    from megatron.core.dist_checkpointing.strategies.async_utils import TemporalAsyncCaller
    from megatron.training import training

    upstream_start, upstream_step = TemporalAsyncCaller.schedule_async_call, training.train_step
    held: list[int] = []
    steps = [0]

    def start(self: Any, request: Any) -> None:
        if steps[0] > 2:
            upstream_start(self, request)
            return
        read_end, write_end = os.pipe()

        def write_when_told(*args: Any, **kwargs: Any) -> None:
            os.close(write_end)
            os.read(read_end, 1)
            request.async_fn(*args, **kwargs)

        upstream_start(self, request._replace(async_fn=write_when_told))
        held.append(write_end)

    def step(*args: Any, **kwargs: Any) -> Any:
        result = upstream_step(*args, **kwargs)
        steps[0] += 1
        if steps[0] == 4:
            os.close(held.pop())
        return result

    with (
        mock.patch.object(TemporalAsyncCaller, "schedule_async_call", start),
        mock.patch.object(training, "train_step", step),
    ):
        yield


@pytest.mark.slow
@pytest.mark.parametrize("flags", [TP2, f"{DISTRIBUTED} --bf16"], ids=["tp2", "distributed-bf16"])
def test_a_checkpoint_written_in_the_background_is_the_state_when_it_was_saved(
    flags: str, tmp_path: Path
) -> None:
    common = f"{COLA} {flags}"
    saving = f"{common} {ASYNC} --save {tmp_path} --save-interval 2"
    unbroken = train(saving, 2, slow_first_writer)
    assert iterations(tmp_path) == ("4", ["iter_0000002", "iter_0000004"])
    resumed = train(f"{common} --load {tmp_path} --ckpt-step 2", 2)
    assert losses(resumed) == losses(unbroken)[2:]
    differences = weight_differences(whole_weights(resumed), whole_weights(unbroken))
    assert set(differences.values()) == {0.0}


def die() -> None:
    """Ends this rank and what it has started at once, as the end of a job does."""
    for child in multiprocessing.active_children():
        child.kill()
    os.kill(os.getpid(), signal.SIGKILL)


@contextlib.contextmanager
def killed_after_second_save() -> Iterator[None]:
    """Context in which the rank dies as soon as its second background save has begun, with the
    first one complete."""
    from megatron.training import async_utils, checkpointing

    upstream = checkpointing.schedule_async_save
    saves: list[Any] = []

    def schedule(request: Any) -> None:
        async_utils.maybe_finalize_async_save(blocking=True)
        upstream(request)
        saves.append(request)
        if len(saves) == 2:
            die()

    with mock.patch.object(checkpointing, "schedule_async_save", schedule):
        yield


@contextlib.contextmanager
def killed_before_second_checkpoint_is_complete() -> Iterator[None]:
    """Context in which the rank dies when it has written its second checkpoint's tensors."""
    from megatron.core.dist_checkpointing import serialization

    upstream = serialization.save_config
    saves: list[Any] = []

    def save_config(*args: Any, **kwargs: Any) -> None:
        saves.append(args)
        if len(saves) == 2:
            die()
        upstream(*args, **kwargs)

    with mock.patch.object(serialization, "save_config", save_config):
        yield


@pytest.mark.slow
@pytest.mark.parametrize(
    ("flags", "death"),
    [(ASYNC, killed_after_second_save), ("", killed_before_second_checkpoint_is_complete)],
    ids=["async", "sync"],
)
def test_a_save_that_is_cut_off_leaves_the_former_checkpoint(
    flags: str, death: Any, tmp_path: Path
) -> None:
    with pytest.raises(RankFailure, match="SIGKILL"):
        train(f"{COLA} {flags} --save {tmp_path} --save-interval 1", 1, death)
    assert iterations(tmp_path) == ("1", ["iter_0000001"])
    assert (tmp_path / "iter_0000002").is_dir()
    resumed = train(f"{COLA} --load {tmp_path} --save {tmp_path} --save-interval 1")
    assert losses(resumed) == losses(train(COLA))[1:]
    assert iterations(tmp_path) == ("4", [f"iter_000000{number}" for number in (1, 2, 3, 4)])


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    """After two of four iterations, of the distributed optimizer; and the run's results."""
    folder = tmp_path_factory.mktemp("checkpoint")
    results = train(f"{COLA} {DISTRIBUTED} --save {folder} --save-interval 2", 2)
    return folder, results


@pytest.mark.slow
@pytest.mark.parametrize("flags", ["--ckpt-fully-parallel-load", "--no-load-rng"])
def test_loading_otherwise_is_the_unbroken_run(
    flags: str, checkpoint: tuple[Path, list[dict[str, Any]]]
) -> None:
    folder, unbroken = checkpoint
    resumed = train(f"{COLA} {DISTRIBUTED} --load {folder} --ckpt-step 2 {flags}", 2)
    assert losses(resumed) == losses(unbroken)[2:]


@pytest.mark.slow
@pytest.mark.parametrize("flags", ["--no-load-optim", "--finetune"])
def test_loading_the_weights_alone(
    flags: str, checkpoint: tuple[Path, list[dict[str, Any]]]
) -> None:
    """The first loss is the loaded model's, and the optimizer starts anew."""
    folder, unbroken = checkpoint
    resumed = train(f"{COLA} {DISTRIBUTED} --load {folder} --ckpt-step 2 {flags}", 2)
    if flags == "--finetune":
        # From the first sample on, with the weights of the second iteration.
        assert len(losses(resumed)) == 4
        assert losses(resumed)[0] != losses(unbroken)[0]
        assert sorted(resumed[0]["sample_ids"]) == sorted(unbroken[0]["sample_ids"])
    else:
        assert losses(resumed)[0] == losses(unbroken)[2]
        assert losses(resumed)[1] != losses(unbroken)[3]
