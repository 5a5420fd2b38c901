"""tools/plan.py as a command: what it prints, its JSON, its refusals."""

import json

import pytest
from transformers import LlamaConfig

from boost_layers.config import LowRankConfig
from megatron.boost.planner.launch_flags import launch_flags
from megatron.boost.planner.layouts import Workload, fastest, find_plans
from megatron.boost.planner.models import load_model
from tests.support.planned import A100
from tests.support.tools import load_tool

TOOL = load_tool("plan")
SMALL = ["--global-batch-size", "64"]


def _run(capsys, *arguments):
    TOOL.main([*arguments])
    return capsys.readouterr().out


def test_it_ranks_breaks_down_concludes_and_gives_the_flags(capsys, tmp_path):
    result = tmp_path / "plan.json"
    out = _run(capsys, "--model", "7B", "--gpus", "8", *SMALL, "--json", str(result))
    assert "Data parallelism without tensor parallelism is faster here" in out
    for part in ("gemm", "tensor parallel", "bubble", "optimiser", "activations"):
        assert part in out
    assert "torchrun --nproc-per-node 4 --nnodes 2" in out
    assert "--use-distributed-optimizer" in out
    flat = json.loads(result.read_text())
    assert flat["tensor_model_parallel_size"] == 1
    assert flat["data_parallel_size"] == 8
    parts = [v for k, v in flat.items() if k.startswith("btp_") and "per_iteration" not in k]
    assert sum(parts) == pytest.approx(flat["btp_seconds_per_iteration"])
    assert not any(isinstance(value, dict | list) for value in flat.values())


def test_it_validates(capsys, tmp_path):
    result = tmp_path / "validation.json"
    out = _run(capsys, "--validate", "--json", str(result))
    flat = json.loads(result.read_text())
    assert 0 < flat["mean_error_percent"] <= 5
    assert flat["mean_error_percent"] < flat["worst_error_percent"] <= 10
    assert "30B, micro-batch 1 x 4, vanilla" in out and "full recompute" in out


def test_it_analyses_a_block(capsys, tmp_path):
    result = tmp_path / "analysis.json"
    out = _run(capsys, "--model", "7B", "--gpus", "4", "--analyse", "--json", str(result))
    flat = json.loads(result.read_text())
    # numbers.md, and 7·n·r with the statistics' columns.
    assert flat["full_rank_forward_mib"] == 256
    assert flat["vanilla_replicated_attention_forward_mib"] == 1328
    assert flat["btp_forward_mib"] == pytest.approx(224 + 4096 * 4 * 6 * 4 * 2 / 2**20)
    assert flat["vanilla_over_btp_forward_volume"] == pytest.approx(1328 / 224.75)
    assert flat["btp_largest_micro_batch"] > flat["full_rank_largest_micro_batch"]
    assert "16,384" in out and "the paper says about 5.7" in out


def test_it_scales(capsys):
    out = _run(capsys, "--model", "1B", "--gpus", "16", "--scaling", "weak", *SMALL)
    assert "Weak scaling of the cola model" in out
    assert "Weak scaling of the full-rank model" in out


def test_it_draws(capsys, tmp_path):
    prefix = tmp_path / "made" / "figure"
    _run(capsys, "--model", "1B", "--gpus", "2", "--plot", str(prefix))
    assert (tmp_path / "made" / "figure.png").read_bytes().startswith(b"\x89PNG")
    page = (tmp_path / "made" / "figure.html").read_text()
    assert "<svg" in page and "rank / hidden" in page
    assert not any(word in page for word in ("<script", "<link", "src=", "@import"))
    assert len(list((tmp_path / "made").iterdir())) == 2


def test_a_hugging_face_configuration_is_a_model(capsys, tmp_path):
    config = LlamaConfig(
        hidden_size=512,
        intermediate_size=1408,
        num_attention_heads=8,
        num_key_value_heads=4,
        num_hidden_layers=4,
        vocab_size=1000,
        tie_word_embeddings=True,
        architectures=["LlamaForCausalLM"],
    )
    config.save_pretrained(tmp_path)
    out = _run(capsys, "--model", str(tmp_path), "--gpus", "2", "--gpu", "h100", *SMALL)
    assert "d 512, f 1408, 4 layers" in out
    assert "--group-query-attention --num-query-groups 4" in out
    assert "--untie-embeddings-and-output-weights" not in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model", "9B"], "--model 9B: .* nearest legal value: 7B"),
        (["--model", "README.md"], "--model README.md: README.md is no JSON"),
        (["--ratio", "1.5"], "--ratio 1.5: .* nearest legal value: 1.0"),
        (["--rank", "5000"], "--rank 5000: .* nearest legal value: 4096"),
        (["--analyse", "--gpus", "3"], "--num-attention-heads 32: .*-size 3; nearest"),
        (["--validate", "--gpu", "h100"], "--gpu h100: .* nearest legal value: a100-80"),
        (["--dtype", "fp32"], "--dtype fp32: .* nearest legal value: bf16"),
        (["--scaling", "strong", "--gpus", "9999"], "--gpus 9999: .* nearest legal value: 7168"),
        (["--plot", "/proc/nowhere/figure"], "--plot /proc/nowhere/figure: cannot be written"),
    ],
)
def test_bad_input_is_refused_by_flag_value_and_nearest_legal_value(arguments, message):
    with pytest.raises(ValueError, match=message):
        TOOL.main(arguments)


@pytest.mark.parametrize(
    "arguments", [["--strategies", "fast"], ["--gpus", "0"], ["--modle", "7B"]]
)
def test_so_is_what_the_parser_refuses(arguments, capsys):
    with pytest.raises(SystemExit) as stop:
        TOOL.main(arguments)
    assert stop.value.code == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_the_flags_say_everything_that_the_layout_is():
    workload = Workload(
        model=load_model("13B", LowRankConfig(arch="svd", rank=1000)), global_batch=64
    )
    plans, _ = find_plans(workload, A100, 16)
    interleaved = next(p for p in plans if p.layout.virtual_stages == 2)
    words = sum(launch_flags(interleaved, workload), [])
    chunks = interleaved.layout.pipeline_parallel * 2
    position = words.index("--num-layers-per-virtual-pipeline-stage")
    assert words[position + 1] == str(40 // chunks)
    latents = next(p for p in plans if p.recompute == "latents")
    assert "--low-rank-recompute" in sum(launch_flags(latents, workload), [])
    full = next(p for p in plans if p.recompute == "full")
    assert full.layout.recompute == "full"
    assert "--recompute-granularity" in sum(launch_flags(full, workload), [])
    dense = fastest(plans, "full-rank")
    assert ["--low-rank-arch", "dense"] in launch_flags(dense, workload)
