"""Every example runs: as it is given, or with fewer steps where it takes more than seconds."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.runs import DATA, MODEL, TRAINING

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"


def run_example(*words: str) -> str:
    """What a command in the checkout prints, with this Python."""
    done = subprocess.run(
        [sys.executable, *words],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_every_example_is_in_the_table_and_in_these_tests() -> None:
    table = (EXAMPLES / "README.md").read_text(encoding="utf-8")
    tests = Path(__file__).read_text(encoding="utf-8")
    for path in EXAMPLES.glob("*.py"):
        assert f"]({path.name})" in table
        assert f'"{path.name}"' in tests


@pytest.mark.program
@pytest.mark.parametrize("name", ["plain_gpt_model.py", "gated_latent.py"])
def test_a_plain_program_trains(name: str) -> None:
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    printed = run_example(*launcher, "-m", "megatron.boost.cpu", f"examples/{name}")
    shown = [float(loss) for loss in re.findall(r"^step \d+: loss (\S+)$", printed, re.M)]
    assert len(shown) > 3
    # Of 100 tokens, the padded ones have no share: ln 100 = 4.6.
    assert 4.4 < shown[0] < 5.2
    assert shown[-1] < 0.5 * shown[0]


@pytest.mark.program
def test_the_script_of_a_new_architectures_page_trains_it(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "new-architecture.md").read_text(encoding="utf-8")
    *_, script = re.findall(r"^```python\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    (tmp_path / "my_pretrain.py").write_text(script, encoding="utf-8")
    (tmp_path / "gated_latent.py").symlink_to(EXAMPLES / "gated_latent.py")
    flags = ("--low-rank-arch", "gated", "--train-iters", "2")
    printed = run_example(str(tmp_path / "my_pretrain.py"), *MODEL, *DATA, *TRAINING, *flags)
    assert len(re.findall(r"iteration +[12]/ +2 .* lm loss: \d\.\d+E\+0\d", printed)) == 2


@pytest.mark.program
def test_a_tour_is_printed_and_written(tmp_path: Path) -> None:
    """What it says is right is tests/distributed/test_tour.py's to see."""
    file = tmp_path / "tour.json"
    printed = run_example(str(EXAMPLES / "tour_of_a_block.py"), "--json", str(file))
    assert re.search(r"mlp.down_proj.B +\[64, 24\] +\[32, 24\] +split along axis 0", printed)
    assert "> all-reduce of 9,344 bytes: 73 numbers a token" in printed
    values = json.loads(file.read_text())
    assert values["forward_all_reduce_calls"] == values["backward_all_reduce_calls"] == 4


@pytest.mark.program
def test_a_tour_on_ranks_that_do_not_divide_is_refused_in_one_line() -> None:
    done = subprocess.run(
        [sys.executable, EXAMPLES / "tour_of_a_block.py", "--tp", "3"],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2 and done.stdout == ""
    assert re.fullmatch(r"error: --tp: .*3 .*1, 2, 4\)\n", done.stderr)


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
