"""The examples that are programs of several commands run, with fewer steps."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.program
def test_a_llama_becomes_low_rank_and_comes_back(tmp_path: Path) -> None:
    done = subprocess.run(
        [
            *(sys.executable, ROOT / "examples" / "llama_to_low_rank.py"),
            *("--folder", tmp_path / "run", "--json", tmp_path / "losses.json"),
            *("--source-steps", "20", "--iterations", "4"),
        ],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    losses = json.loads((tmp_path / "losses.json").read_text())
    assert losses["imported_by_SVD_loss"] == pytest.approx(losses["dense_LLaMA_loss"], rel=0.02)
    assert losses["trained_on_with_BTP_loss"] < losses["dense_LLaMA_loss"]
    trained = losses["trained_on_with_BTP_loss"]
    assert losses["exported_loss"] == pytest.approx(trained, rel=1e-6)
    assert "def __init__(self" in done.stdout
