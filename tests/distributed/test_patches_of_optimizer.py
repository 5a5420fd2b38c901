"""The distributed optimizer with torch's Adam: each patch left out of a resumed run in turn.

A test that fails because the run goes well without a patch says that the patch can go.
"""

from pathlib import Path

import pytest

from tests.support.distributed import RankFailure, run_ranks
from tests.support.stock_gpt import History, train_stock_gpt

pytestmark = pytest.mark.slow

FLAGS = "--use-distributed-optimizer"
RESHARDABLE = f"{FLAGS} --dist-ckpt-optim-fully-reshardable"


def _train(flags: str, *without: str) -> History:
    [history] = run_ranks(train_stock_gpt, 1, flags.split(), without, init_process_group=False)
    return history


def _saved(folder: Path, flags: str) -> History:
    history = _train(f"{flags} --save {folder} --save-interval 2")
    return {name: values[2:] for name, values in history.items()}


def _resumed(folder: Path, flags: str, *without: str) -> History:
    return _train(f"{flags} --load {folder} --ckpt-step 2", *without)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, History]:
    """A checkpoint of the default format, and the two iterations that followed it."""
    folder = tmp_path_factory.mktemp("checkpoint")
    return folder, _saved(folder, FLAGS)


@pytest.fixture(scope="module")
def reshardable_checkpoint(
    tmp_path_factory: pytest.TempPathFactory,
) -> tuple[Path, History]:
    """The same in the format that any layout can load."""
    folder = tmp_path_factory.mktemp("reshardable")
    return folder, _saved(folder, RESHARDABLE)


def test_with_all_patches_the_resumed_run_equals_the_unbroken_one(
    checkpoint: tuple[Path, History], reshardable_checkpoint: tuple[Path, History]
) -> None:
    assert _resumed(checkpoint[0], FLAGS) == checkpoint[1]
    assert _resumed(reshardable_checkpoint[0], RESHARDABLE) == reshardable_checkpoint[1]


def test_empty_state(checkpoint: tuple[Path, History]) -> None:
    with pytest.raises(RankFailure, match=r"assert len\(steps\) == 1"):
        _resumed(checkpoint[0], FLAGS, "distrib_optimizer_empty_state")


def test_leaf_copy(checkpoint: tuple[Path, History]) -> None:
    with pytest.raises(RankFailure, match="requires grad is being used in an in-place operation"):
        _resumed(checkpoint[0], FLAGS, "distrib_optimizer_leaf_copy")


def test_lost_step(
    checkpoint: tuple[Path, History], reshardable_checkpoint: tuple[Path, History]
) -> None:
    with pytest.raises(RankFailure, match="KeyError: 'step'"):
        _resumed(reshardable_checkpoint[0], RESHARDABLE, "distrib_optimizer_lost_step")
    _assert_adam_is_wrong(checkpoint, FLAGS, "distrib_optimizer_lost_step")


def test_shared_step(reshardable_checkpoint: tuple[Path, History]) -> None:
    _assert_adam_is_wrong(reshardable_checkpoint, RESHARDABLE, "distrib_optimizer_shared_step")


@pytest.fixture(scope="module")
def plain_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, History]:
    """A checkpoint saved without the distributed optimizer."""
    folder = tmp_path_factory.mktemp("plain")
    return folder, _saved(folder, "")


def test_optimizer_of_another_kind(
    plain_checkpoint: tuple[Path, History], reshardable_checkpoint: tuple[Path, History]
) -> None:
    for (folder, unbroken), flags in (
        (plain_checkpoint, RESHARDABLE),
        (reshardable_checkpoint, ""),
    ):
        found = _resumed(folder, flags)
        assert found["loss"] == unbroken["loss"]
        # The sum of squares has another order.
        assert found["grad_norm"] == pytest.approx(unbroken["grad_norm"], rel=1e-6)
    without = "optimizer_of_another_kind"
    with pytest.raises(RankFailure, match="KeyError|CheckpointingException"):
        _resumed(plain_checkpoint[0], RESHARDABLE, without)
    with pytest.raises(RankFailure, match="Could not find parameter group"):
        _resumed(reshardable_checkpoint[0], "", without)


def test_a_state_that_only_the_distributed_optimizer_can_read_is_refused(
    checkpoint: tuple[Path, History],
) -> None:
    with pytest.raises(RankFailure, match="ValueError: --load: .*--use-distributed-optimizer"):
        _resumed(checkpoint[0], "")


def _assert_adam_is_wrong(checkpoint: tuple[Path, History], flags: str, without: str) -> None:
    """The weights are loaded right, and the first step from them is not."""
    folder, unbroken = checkpoint
    found = _resumed(folder, flags, without)
    assert found["loss"][0] == unbroken["loss"][0]
    assert found["loss"][1] != pytest.approx(unbroken["loss"][1], rel=1e-4)
