"""The recipes of the page about logs and curves run, command by command."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from boost_layers.config import PROJECTIONS
from tests.support.documents import assert_written, cut, recipes, run_commands

RECIPES = recipes("docs/logging.md")
CUT = {
    "--train-iters 200": "--train-iters 20",
    "--eval-interval 100": "--eval-interval 10",
    "--low-rank-log-latents-interval 100": "--low-rank-log-latents-interval 10",
    "--num-layers 4": "--num-layers 2",
    "--vocab-size 4096": "--vocab-size 500",
    "--hidden-size 256 --ffn-hidden-size 688": "--hidden-size 64 --ffn-hidden-size 96",
}
FROM_LOGS, BOARD = RECIPES


def test_the_test_cuts_what_stands_on_the_page() -> None:
    assert_written(CUT, RECIPES.values())


@pytest.mark.program
def test_two_trainings_become_a_picture_a_page_and_numbers(tmp_path: Path) -> None:
    said = run_commands(cut(RECIPES[FROM_LOGS], CUT), tmp_path)
    assert "dense-equivalent TFLOP/s/GPU" in said
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert "btp: step 20, " in (tmp_path / "loss.html").read_text()
    numbers = json.loads((tmp_path / "loss.json").read_text())
    for run_ in ("btp", "full_rank"):
        assert numbers[f"{run_}_points"] == 3
        assert numbers[f"{run_}_validation_step"] == 20
        assert 0 < numbers[f"{run_}_last_loss"] < 10
        assert numbers[f"{run_}_tokens"] == 20 * 8 * 256


@pytest.mark.program
def test_a_training_is_drawn_from_tensorboards_folder(tmp_path: Path) -> None:
    run_commands(cut(RECIPES[BOARD], CUT), tmp_path)
    assert "board: step 20, " in (tmp_path / "loss.html").read_text()
    assert all(f"layer-0.{name}".encode() in board(tmp_path) for name in PROJECTIONS)


def board(folder: Path) -> bytes:
    (file,) = (folder / "board").glob("events.out.tfevents.*")
    return file.read_bytes()
