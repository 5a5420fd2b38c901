"""tools/plan.py as a command: what it prints, its JSON, its refusals."""

import json
import shlex

import pytest
from transformers import LlamaConfig

from boost_layers.config import LowRankConfig
from megatron.boost.planner.launch_flags import launch_flags, launch_lines
from megatron.boost.planner.layouts import Workload, fastest, find_plans
from megatron.boost.planner.models import load_model
from tests.support.distributed import run_ranks
from tests.support.planned import A100
from tests.support.tools import load_tool
from tests.unit.test_arguments import ACCEPTED, answers

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
    parts = [v for k, v in flat.items() if k.startswith("btp_") and k.endswith("_seconds")]
    assert sum(parts) == pytest.approx(flat["btp_seconds_per_iteration"])
    assert not any(isinstance(value, dict | list) for value in flat.values())


def test_nodes_can_have_other_sizes_than_the_cluster_s(capsys):
    """Tensor parallelism stays within a node, and torchrun starts one."""
    arguments = ["--gpus", "8", "--gpu", "h100", "--strategies", "btp", "--top", "100", *SMALL]
    assert "torchrun --nproc-per-node 8" in _run(capsys, *arguments)
    out = _run(capsys, *arguments, "--gpus-per-node", "2")
    assert "torchrun --nproc-per-node 2" in out
    assert "--nnodes 4" in out
    assert "8 x NVIDIA H100 SXM, nodes of eight, but in nodes of 2" in " ".join(out.split())


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
    assert "16,384" in out and "the paper says about 5.7" in out.replace("\n", " ")


def test_a_strategy_that_does_not_divide_is_left_out_of_the_analysis_by_name(capsys):
    out = _run(capsys, "--model", "7B", "--rank", "1001", "--gpus", "4", "--analyse")
    assert "vanilla, sliced heads is left out: --" in out
    assert "BTP: forward products" in out and "full-rank: forward products" in out


def test_where_full_rank_is_fastest_the_low_rank_flags_are_given_too(capsys):
    out = _run(capsys, "--model", "1B", "--gpus", "1", "--ratio", "1", *SMALL)
    assert "At this rank the low-rank model is slower" in out
    assert "--low-rank-arch dense" in out and "--low-rank-arch cola" in out


def test_no_figure_is_cut_in_a_narrow_terminal(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "60")
    out = _run(capsys, "--model", "1B", "--gpus", "8", *SMALL)
    assert "\u2026" not in out and "tokens/s/GPU" in out


def test_scaling_goes_on_where_one_strategy_never_fits(capsys):
    arguments = ["--model", "40B", "--gpus", "8", "--scaling", "strong"]
    out = _run(capsys, *arguments, "--global-batch-size", "16")
    assert "The full-rank model has no layout: --gpus 8" in out
    assert "Strong scaling of the cola model" in out


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
        rope_theta=500000.0,
        architectures=["LlamaForCausalLM"],
    )
    config.save_pretrained(tmp_path)
    out = _run(capsys, "--model", str(tmp_path), "--gpus", "2", "--gpu", "h100", *SMALL)
    assert "d 512, f 1408, 4 layers" in out
    assert "--group-query-attention --num-query-groups 4" in out
    assert "--untie-embeddings-and-output-weights" not in out
    assert "--norm-epsilon 1e-06 --rotary-base 500000" in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model", "9B"], "--model 9B: .* nearest legal value: 7B"),
        (["--model", "README.md"], "--model README.md: README.md is no JSON"),
        (["--ratio", "1.5"], "--ratio 1.5: .* nearest legal value: 1.0"),
        (["--rank", "5000"], "--rank 5000: .* nearest legal value: 4096"),
        (["--analyse", "--gpus", "3"], "--gpus 3: .* divides no strategy; .* value: 2"),
        (["--analyse", "--gpus", "8"], "--gpus 8: .* a node of 4; nearest legal value: 4"),
        (["--gpus", "6", "--gpus-per-node", "4"], "--gpus 6: .* of 4; nearest legal value: 8"),
        (
            ["--gpu", "cpu", "--gpus-per-node", "4", "--analyse"],
            "--gpus-per-node 4: .* nearest legal value: 2",
        ),
        (["--analyse", "--top", "3"], "--top 3: with --analyse it has no meaning"),
        (["--validate", "--model", "1B"], "--model 1B: with --validate it has no meaning"),
        (["--micro-batch-size", "2"], "--micro-batch-size 2: without a mode it has no meaning"),
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
    over_ranks = next(p for p in plans if p.layout.tensor_parallel > 1)
    assert launch_lines(over_ranks, workload)[0].startswith("CUDA_DEVICE_MAX_CONNECTIONS=1 ")


@pytest.mark.slow
def test_pretrain_gpt_takes_the_flags_of_every_kind_of_plan():
    """By its own validation, with what is left to the user added."""
    yours = shlex.split(
        "--mock-data --tokenizer-type NullTokenizer --vocab-size 31999 --lr 1e-3 "
        "--train-iters 10 --eval-interval 5 --eval-iters 1"
    )
    command_lines = []
    for arch in ("cola", "svd", "lax"):
        model = load_model("7B", LowRankConfig(arch=arch))
        workload = Workload(model=model, global_batch=64)
        plans, _ = find_plans(workload, A100, 8, ["btp", "vanilla", "full-rank"])
        kinds = {}
        for plan in plans:
            layout = plan.layout
            interleaved = layout.virtual_stages > 1
            tp, pp = layout.tensor_parallel > 1, layout.pipeline_parallel > 1
            kinds.setdefault((plan.strategy, tp, pp, interleaved, plan.recompute), plan)
        assert len(kinds) > 15
        command_lines += [
            (8, [*sum(launch_flags(plan, workload), []), *yours]) for plan in kinds.values()
        ]
    (found,) = run_ranks(answers, 1, command_lines, init_process_group=False)
    answered = zip(command_lines, found, strict=True)
    refused = [(line, answer) for line, (answer, _) in answered if answer != ACCEPTED]
    assert not refused
