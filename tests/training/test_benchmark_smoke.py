"""The benchmarks run and give their keys. No time is judged here."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]


def run(*arguments: str, script: str = "iteration") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, f"benchmarks/{script}.py", *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )


@pytest.mark.slow
def test_quick_run_gives_the_keys_and_leaves_the_table(tmp_path: Path) -> None:
    done = run("--quick", "--json", str(tmp_path / "result.json"), "--results", str(tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads((tmp_path / "result.json").read_text())
    for key in (
        "full_rank_over_btp",
        "vanilla_over_btp",
        "btp_ms",
        "btp_tokens_per_second",
        "btp_exposed_communication_seconds",
        "tp1_full_rank_over_plain",
        "tp1_low_rank_over_plain",
    ):
        assert key in result
    assert result["cuda"] == "not measured"
    assert result["machine_commit"]
    (page,) = tmp_path.glob("iteration-*.md")
    assert page.read_text() in done.stdout
    (steps,) = tmp_path.glob("iteration-*.csv")
    assert len(steps.read_text().splitlines()) == 1 + 2 * 9
    assert done.stderr == ""


@pytest.mark.slow
def test_the_memory_benchmark_measures_what_layers_keep(tmp_path: Path) -> None:
    """A tiny layer's tensors, with up to 32 KiB of Python's own objects beside them."""
    done = run("--quick", "--json", str(tmp_path / "result.json"), script="memory")
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads((tmp_path / "result.json").read_text())
    n, d, r = 2 * 32, 64, 16
    for key, numbers in (
        ("btp_latent", 2 * n * d / 2 + 7 * n * r + 2 * n),
        ("btp_latent_residual", n * d / 2 + 7 * n * r + 2 * n),
        ("btp_latent_residual_shard", n * d / 2 + 7 * n * r / 2 + 2 * n),
    ):
        kib = result[f"{key}_kept_mib_per_layer"] * 1024
        assert numbers * 4 / 1024 <= kib <= numbers * 4 / 1024 + 32, key
    kept = {
        key: result[f"{key}_kept_mib_per_layer"] for key in ("btp_latent", "btp_latent_residual")
    }
    assert kept["btp_latent_residual"] < kept["btp_latent"]
    assert result["btp_kept_mib_per_layer"] > 2 * kept["btp_latent"]
    assert result["btp_latent_recompute_collective_calls_per_layer"] == 0
    assert result["btp_latent_shard_recompute_collective_calls_per_layer"] == 4
    assert result["btp_full_recompute_recompute_collective_calls_per_layer"] == 4
    assert result["btp_latent_time_over_btp"] > 0


def test_impossible_settings_are_refused_in_one_line() -> None:
    done = run("--tp", "3")
    assert done.returncode == 2
    assert done.stderr == (
        "error: --tp 3: does not divide every size of the model; nearest legal value: 2\n"
    )


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_device_that_is_not_there_is_refused() -> None:
    done = run("--device", "cuda", "--tp", "1")
    assert done.returncode == 2
    assert done.stderr.startswith("error: --device cuda: --tp 1 needs as many GPUs")
