"""The benchmarks run and give their keys. No time is judged here."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from boost_layers.ops.dispatch import problem_of_csrc

ROOT = Path(__file__).parents[2]


def run(*arguments: str, script: str = "iteration") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, f"benchmarks/{script}.py", *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )


@pytest.mark.program
def test_quick_run_gives_the_keys_and_leaves_the_table(tmp_path: Path) -> None:
    done = run("--quick", "--json", str(tmp_path / "result.json"), "--results", str(tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads((tmp_path / "result.json").read_text())
    for key in (
        "full_rank_over_btp",
        "vanilla_over_btp",
        "full_rank_over_btp_layers",
        "vanilla_over_btp_layers",
        "full_rank_over_btp_at_the_rate_of_products",
        "attention_ms",
        "btp_ms",
        "btp_tokens_per_second",
        "btp_exposed_communication_seconds",
        "tp1_full_rank_over_plain",
        "tp1_low_rank_over_plain",
        "tp1_btp_over_plain",
    ):
        assert key in result
    assert result["cuda"] == "not measured"
    assert result["machine_commit"]
    (page,) = tmp_path.glob("iteration-*.md")
    assert page.read_text() in done.stdout
    (steps,) = tmp_path.glob("iteration-*.csv")
    assert len(steps.read_text().splitlines()) == 1 + 2 * 17
    assert done.stderr == ""


@pytest.mark.program
def test_the_attention_benchmark_judges_by_the_products(tmp_path: Path) -> None:
    done = run("--quick", "--json", str(tmp_path / "result.json"), script="attention")
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads((tmp_path / "result.json").read_text())
    b, h, s, e = 2, 2, 32, 16
    flop = 2 * (b * h * s * (s + 1) / 2) * e * 2
    products_ms = flop / result["large_mm_gflop_per_second"] / 1e6
    for key in ("flash_by_tokens", "flash_by_heads", "math_by_tokens", "math_by_heads"):
        for passes, products in (("forward", 1.0), ("forward_backward", 3.5)):
            over = result[f"{key}_{passes}_ms"] / (products * products_ms)
            assert result[f"{key}_{passes}_over_its_products"] == pytest.approx(over)
    # One sequence of b·s tokens has (b·s + 1)/(s + 1) times as many pairs.
    long_ms = 3.5 * products_ms * (b * s + 1) / (s + 1)
    over = result["flash_by_tokens_forward_backward_one_sequence_ms"] / long_ms
    found = result["flash_by_tokens_forward_backward_one_sequence_over_its_products"]
    assert found == pytest.approx(over)


@pytest.mark.program
def test_predictions_stand_beside_what_was_measured(tmp_path: Path) -> None:
    done = run(
        "--quick",
        "--json",
        str(tmp_path / "result.json"),
        "--results",
        str(tmp_path),
        script="planner",
    )
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads((tmp_path / "result.json").read_text())
    errors = []
    for key in ("btp", "full_rank", "vanilla_sliced", "tp1_full_rank", "tp1_low_rank", "tp1_btp"):
        error = 100.0 * (result[f"{key}_predicted_ms"] / result[f"{key}_ms"] - 1)
        assert result[f"{key}_predicted_error_percent"] == pytest.approx(error)
        assert result[f"{key}_preset_ms"] > 0
        errors.append(abs(error))
    assert result["predicted_worst_error_percent"] >= max(errors)
    assert result["ranks_2_node.bus_gb_per_s.2"] > 0
    assert result["ranks_1_gpus_per_node"] == 1
    (page,) = tmp_path.glob("planner-*.md")
    assert page.read_text() in done.stdout
    assert done.stderr == ""


@pytest.mark.program
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


@pytest.mark.program
def test_the_cost_of_looking_at_latents_is_that_of_single_steps(tmp_path: Path) -> None:
    done = run("--quick", "--json", str(tmp_path / "result.json"), script="latents")
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads((tmp_path / "result.json").read_text())
    for key in ("btp", "vanilla_sliced"):
        over = result[f"{key}_looking_ms"] / result[f"{key}_ms"]
        assert result[f"{key}_looking_over_{key}"] == pytest.approx(over)
        assert result[f"{key}_cost_percent_every_100_steps"] == pytest.approx(over - 1)
    assert result["effective_rank_of_1024_ms"] > result["effective_rank_of_256_ms"] > 0
    assert done.stderr == ""


@pytest.mark.program
@pytest.mark.skipif(problem_of_csrc() is not None, reason="csrc is not built")
def test_the_race_of_ops_gives_the_keys_and_leaves_the_table(tmp_path: Path) -> None:
    done = run(
        "--quick",
        "--dtype=bf16",
        "--json",
        str(tmp_path / "result.json"),
        "--results",
        str(tmp_path),
        script="kernels",
    )
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads((tmp_path / "result.json").read_text())
    for key in (
        "copy_gb_per_second",
        "residual_add_rms_stats_reference_over_csrc",
        "latent_epilogue_backward_lax_norm_csrc_gb_per_second",
        "rotary_backward_csrc_share_of_copy",
        "up_projection_accumulate_gate_up_csrc_gflop_per_second",
    ):
        assert result[key] is None or result[key] > 0, key
    assert result["threads"] == 1
    assert result["machine_commit"]
    (page,) = tmp_path.glob("kernels-*.md")
    assert page.read_text() in done.stdout
    (steps,) = tmp_path.glob("kernels-*.csv")
    assert len(steps.read_text().splitlines()) == 1 + 2 * (1 + 3 * 23 + 2 * 17)
    assert done.stderr == ""


@pytest.mark.program
def test_what_runs_on_a_gpu_runs_on_a_cpu_too(tmp_path: Path) -> None:
    done = run("--device=cpu", "--quick", "--json", str(tmp_path / "result.json"), script="gpu/run")
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads((tmp_path / "result.json").read_text())
    assert {key: result[f"{key}_outcome"] for key in ("build", "kernels", "gemms", "layers")} == {
        "build": "not run",
        "kernels": "measured",
        "gemms": "measured",
        "layers": "measured",
    }
    for key in (
        "copy_gb_per_second",
        "matrix_peak_tflop_per_second",
        "rms_norm_micro_batch_4_reference_share_of_copy",
        "up_projection_qkv_micro_batch_1_reference_share_of_peak",
        "gate_up_ungrouped_over_grouped_micro_batch_1_reference",
        "btp_micro_batch_1_reference_ms_of_iteration_of_2_layers",
    ):
        assert result[key] > 0, key
    assert result["rms_norm_micro_batch_4_triton_ms"] is None
    assert result["cuda_graph_capture"] is None
    assert result["csrc_share_of_copy_target"] is None
    assert not list(tmp_path.glob("gpu-*"))


@pytest.mark.program
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_the_result_says_not_measured(tmp_path: Path) -> None:
    arguments = ("--results", str(tmp_path), "--skip-build")
    done = run(*arguments, script="gpu/run")
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: nothing was measured: torch ")
    (page,) = tmp_path.glob("gpu-*.md")
    assert "| rms_stats | 1 | 8.5 | not measured |" in page.read_text()
    (figures,) = tmp_path.glob("gpu-*.json")
    assert json.loads(figures.read_text())["measured"] is False
    allowed = run(*arguments, "--allow-missing-gpu", script="gpu/run")
    assert (allowed.returncode, allowed.stderr) == (0, "")


def test_impossible_settings_are_refused_in_one_line() -> None:
    done = run("--tp", "3")
    assert done.returncode == 2
    assert done.stderr == (
        "error: --tp 3: does not divide every size of the model; nearest legal value: 2\n"
    )


@pytest.mark.program
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_device_that_is_not_there_is_refused() -> None:
    done = run("--device", "cuda", "--tp", "1")
    assert done.returncode == 2
    assert done.stderr.startswith("error: --device cuda: --tp 1 needs as many GPUs")


@pytest.mark.program
def test_the_conversions_are_measured(tmp_path: Path) -> None:
    done = run("--quick", "--json", str(tmp_path / "result.json"), script="convert")
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads((tmp_path / "result.json").read_text())
    for conversion in ("import", "export", "export_low_rank", "export_merged", "copy"):
        assert result[f"{conversion}_mb_per_second"] > 0
        assert result[f"{conversion}_peak_mib"] >= 0
    assert result["machine_commit"]
    assert done.stderr == ""
