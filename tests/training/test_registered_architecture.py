"""A registered architecture in `pretrain_gpt.py`'s training: it trains in any layout, saves, and is
loaded in another."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

from tests.support.distributed import run_ranks
from tests.support.runs import losses, relative_difference, train_here

FILE = Path(__file__).parents[2] / "examples" / "gated_latent.py"
GATED = "--low-rank-arch gated --log-throughput"
TP2 = f"{GATED} --tensor-model-parallel-size 2"


def train(flags: str, registered: bool = True) -> dict[str, Any]:
    """On a rank: as a script does that imports the example first."""
    if registered:
        spec = importlib.util.spec_from_file_location("gated_latent", FILE)
        assert spec is not None and spec.loader is not None
        spec.loader.exec_module(importlib.util.module_from_spec(spec))
    return train_here(flags.split())


def losses_of(ranks: int, flags: str) -> list[float]:
    return losses(run_ranks(train, ranks, flags, init_process_group=False))


@pytest.mark.slow
def test_a_registered_architecture_trains_and_changes_its_layout(tmp_path: Path) -> None:
    save = f"--save {tmp_path} --save-interval 2"
    unbroken = losses_of(2, f"{TP2} {save} --exit-interval 2 --train-iters 4")
    assert len(unbroken) == 2
    alone = losses_of(1, GATED)
    assert relative_difference(unbroken, alone[:2]) < 2e-6
    elsewhere = "--pipeline-model-parallel-size 2 --low-rank-tp vanilla"
    resumed = losses_of(2, f"{GATED} --load {tmp_path} {elsewhere}")
    assert relative_difference(resumed, alone[2:]) < 2e-6
    assert alone[-1] < alone[0]


def test_without_its_file_it_is_refused_by_name() -> None:
    with pytest.raises(AssertionError, match="--low-rank-arch gated: legal values are none, dense"):
        run_ranks(train, 1, GATED, registered=False, init_process_group=False)
