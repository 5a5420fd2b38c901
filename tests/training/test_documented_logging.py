"""The recipes of the page about logs and curves run, command by command."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from boost_layers.config import PROJECTIONS
from tests.training.test_documented_commands import _RECIPE, ROOT

PAGE = (ROOT / "docs" / "logging.md").read_text(encoding="utf-8")
RECIPES = dict(_RECIPE.findall(PAGE.partition("## Recipes")[2]))
CUT = {
    "--train-iters 200": "--train-iters 20",
    "--eval-interval 100": "--eval-interval 10",
    "--low-rank-log-latents-interval 100": "--low-rank-log-latents-interval 10",
    "--num-layers 4": "--num-layers 2",
    "--vocab-size 4096": "--vocab-size 500",
    "--hidden-size 256 --ffn-hidden-size 688": "--hidden-size 64 --ffn-hidden-size 96",
}
FROM_LOGS, BOARD = RECIPES


def run(recipe: str, folder: Path) -> str:
    for name in ("tools", "pretrain_gpt.py"):
        (folder / name).symlink_to(ROOT / name)
    commands = RECIPES[recipe]
    for written, cut in CUT.items():
        commands = commands.replace(written, cut)
    programs = Path(sys.executable).parent
    done = subprocess.run(
        ["bash", "-e", "-o", "pipefail", "-c", commands],
        cwd=folder,
        env=os.environ | {"PATH": f"{programs}:{os.environ['PATH']}"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_test_cuts_what_stands_on_the_page() -> None:
    for written in CUT:
        assert any(written in commands for commands in RECIPES.values()), written


@pytest.mark.program
def test_two_trainings_become_a_picture_a_page_and_numbers(tmp_path: Path) -> None:
    said = run(FROM_LOGS, tmp_path)
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
@pytest.mark.skipif(
    importlib.util.find_spec("tensorboard") is None, reason="the extra `tensorboard` brings it"
)
def test_a_training_is_drawn_from_tensorboards_folder(tmp_path: Path) -> None:
    run(BOARD, tmp_path)
    assert "board: step 20, " in (tmp_path / "loss.html").read_text()
    assert all(f"layer-0.{name}".encode() in board(tmp_path) for name in PROJECTIONS)


def board(folder: Path) -> bytes:
    (file,) = (folder / "board").glob("events.out.tfevents.*")
    return file.read_bytes()
