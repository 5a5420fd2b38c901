"""Upstream's stock GPT and training loop on gloo ranks: every layout that must be carried.

One model, trained on one rank and saved, goes on in every layout. So the layouts have the same
weights, which their initialisation alone would not give them.
"""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.distributed import run_ranks
from tests.support.stock_gpt import History, train_stock_gpt

LAYERS = "--num-layers 4"
TP = "--tensor-model-parallel-size 2"
PP = "--pipeline-model-parallel-size 2"
INTERLEAVED = f"{PP} --num-layers-per-virtual-pipeline-stage 1"
OVERLAP = "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather"
RESHARDABLE = "--dist-ckpt-optim-fully-reshardable --ckpt-fully-parallel-save"
DROPOUT = "--hidden-dropout 0.1 --attention-dropout 0.1"


def _train(world_size: int, flags: str) -> list[History]:
    return run_ranks(train_stock_gpt, world_size, flags.split(), init_process_group=False)


def _one_rank(flags: str) -> History:
    return _train(1, flags)[0]


def _whole(histories: list[History]) -> History:
    """The run's history from that of its ranks: the last stage has the loss, all the norm."""
    assert all(history["grad_norm"] == histories[0]["grad_norm"] for history in histories)
    losses = [history["loss"] for history in histories if history["loss"]]
    assert all(loss == losses[0] for loss in losses)
    return {"loss": losses[0], "grad_norm": histories[0]["grad_norm"]}


def _assert_agree(found: History, expected: History, relative: float = 2e-6) -> None:
    assert len(found["loss"]) == len(expected["loss"]) > 0
    assert found["loss"] == pytest.approx(expected["loss"], rel=relative)
    # torch's fp32 norm on CPU is off by some 5e-6.
    assert found["grad_norm"] == pytest.approx(expected["grad_norm"], rel=10 * relative)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, History]:
    """A one-rank run's checkpoint after two iterations, and the history of the two that follow."""
    folder = tmp_path_factory.mktemp("one-rank")
    history = _one_rank(f"{LAYERS} --save {folder} --save-interval 2")
    return folder, {name: values[2:] for name, values in history.items()}


@pytest.mark.parametrize(
    ("world_size", "layout"),
    [
        (2, TP),
        (2, f"{TP} --sequence-parallel"),
        (2, PP),
        (2, INTERLEAVED),
        (2, "--overlap-grad-reduce"),
        pytest.param(4, f"{TP} {INTERLEAVED}", marks=pytest.mark.slow),
    ],
    ids=["tp", "sequence-parallel", "pp", "interleaved", "dp", "tp-interleaved"],
)
def test_layouts_go_on_from_one_checkpoint(
    checkpoint: tuple[Path, History], world_size: int, layout: str
) -> None:
    folder, expected = checkpoint
    histories = _train(world_size, f"{LAYERS} {layout} --load {folder} --ckpt-step 2")
    _assert_agree(_whole(histories), expected)


@pytest.fixture(scope="module")
def one_rank() -> History:
    """The history of a run on one rank, in fp32."""
    return _one_rank("")


def test_distributed_optimizer_with_both_overlaps(one_rank: History) -> None:
    _assert_agree(_whole(_train(2, OVERLAP)), one_rank)


def test_bf16_with_distributed_optimizer(one_rank: History) -> None:
    in_bf16 = _one_rank("--bf16")
    _assert_agree(_whole(_train(2, f"--bf16 {OVERLAP}")), in_bf16, 2e-4)
    assert in_bf16["loss"] != one_rank["loss"]
    assert in_bf16["loss"] == pytest.approx(one_rank["loss"], rel=3e-3)


@pytest.fixture(scope="module")
def with_dropout() -> list[History]:
    """The histories of a run with dropout on two tensor-parallel ranks, by rank."""
    histories = _train(2, f"{TP} {DROPOUT}")
    assert histories[0]["loss"] != _train(2, TP)[0]["loss"]
    return histories


@pytest.mark.parametrize(
    "recompute",
    [
        pytest.param(
            "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
            marks=pytest.mark.slow,
        ),
        "--recompute-granularity selective",
    ],
    ids=["full", "selective"],
)
def test_recompute_repeats_the_dropout_masks(with_dropout: list[History], recompute: str) -> None:
    assert _train(2, f"{TP} {DROPOUT} {recompute}") == with_dropout


@pytest.mark.slow
@pytest.mark.parametrize(
    "layout",
    [f"{TP} {DROPOUT}", OVERLAP, f"--bf16 {OVERLAP} {RESHARDABLE}"],
    ids=["tp-dropout", "distributed-optimizer", "bf16-reshardable"],
)
def test_a_resumed_run_equals_the_unbroken_one(tmp_path: Path, layout: str) -> None:
    unbroken = _train(2, f"{layout} --save {tmp_path} --save-interval 2")
    resumed = _train(2, f"{layout} --load {tmp_path} --ckpt-step 2")
    assert resumed == [
        {name: values[2:] for name, values in history.items()} for history in unbroken
    ]


SCRIPT = """
import sys, warnings
import helper
import torch
torch.distributed.init_process_group("gloo")
total = torch.ones(1, device="cuda")
torch.distributed.all_reduce(total)
warnings.warn("Apex is not installed")
print(f"rank {torch.distributed.get_rank()}: {total.item()} {sys.argv} {__name__}")
"""


@pytest.mark.slow
def test_any_script_runs_under_torchrun(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    (tmp_path / "helper.py").write_text("")
    run = subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"),
            *("-m", "megatron.boost.cpu", str(script), "--lr", "1e-3"),
        ],
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert run.returncode == 0, run.stderr
    lines = [line for line in run.stdout.splitlines() if line.startswith("rank")]
    assert sorted(line.split()[:3] for line in lines) == [
        ["rank", "0:", "2.0"],
        ["rank", "1:", "2.0"],
    ]
    assert all("'--lr', '1e-3', '--transformer-impl', 'local'" in line for line in lines)
    assert all(line.endswith("__main__") for line in lines)
    # A world that is not destroyed aborts at exit, or torch warns of it.
    for unwanted in ("terminate called", "destroy_process_group", "Apex"):
        assert unwanted not in run.stderr + run.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "error: SCRIPT '': there is no such file\n"),
        (["none.py"], "error: SCRIPT 'none.py': there is no such file\n"),
        (
            [__file__, "--distributed-backend", "nccl"],
            "error: --distributed-backend nccl: does not run on CPU; nearest legal value: gloo\n",
        ),
    ],
)
def test_bad_input_is_one_line(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    from megatron.boost.cpu import main

    assert main(arguments) == 2
    assert capsys.readouterr().err == message
