"""The recipes' scripts start training runs, on CPU and with the sizes cut."""

from __future__ import annotations

import os
import re
import socket
import sys
from pathlib import Path

import pytest

from tests.support.programs import ROOT, finished

SLURM = ROOT / "tests" / "support" / "slurm"
CUT = (
    "--num-layers 4 --hidden-size 64 --ffn-hidden-size 96 --num-attention-heads 4 "
    "--seq-length 32 --max-position-embeddings 32 --micro-batch-size 1 --global-batch-size 4 "
    "--vocab-size 256 --train-iters 3 --lr-warmup-iters 1 --log-interval 1 --eval-iters 1 "
    "--num-workers 0"
).split()


def logged_losses(output: str) -> list[float]:
    return [float(loss) for loss in re.findall(r"iteration +\d+/ +3 \|.*lm loss: (\S+)", output)]


@pytest.mark.program
def test_the_command_for_a_machine_without_gpus_runs() -> None:
    command = documented("On a machine without GPUs")
    output, _ = finished(["bash", "-c", command], {"MASTER_PORT": str(free_port())})
    assert len(re.findall(r"lm loss: \S+ \|", output)) == 4


@pytest.mark.parametrize(
    "heading", ["Recipes for clusters", "CoLA's own training", "On a machine without GPUs"]
)
def test_the_documented_commands_are_recipes(heading: str) -> None:
    """They are printed rather than run, without a plan; a shell stands in for sbatch."""
    commands = re.sub(r"^sbatch.*?examples", "bash examples", documented(heading), flags=re.M)
    commands = commands.replace("DRY_RUN=1 ", "")
    output, errors = finished(["bash", "-e", "-c", commands], {"DRY_RUN": "command"})
    assert output.count("pretrain_gpt.py") == commands.count("examples/train.") and not errors


def documented(heading: str) -> str:
    """The commands under a heading of the examples' README."""
    page = (ROOT / "examples" / "README.md").read_text(encoding="utf-8")
    found = re.search(rf"^#+ {heading}\n.*?^```sh\n(.*?)^```", page, re.M | re.S)
    assert found is not None
    return found[1]


@pytest.mark.program
@pytest.mark.parametrize(
    "recipe, training, cut",
    [
        # Interleaved, and with LaX's latents between the stages.
        ("7B full-rank", "llama2", "--num-virtual-stages-per-pipeline-rank 2"),
        ("30B btp lax", "llama2", "--tensor-model-parallel-size 1 --low-rank-rank 16"),
        ("60M no-tp cola", "cola", "--low-rank-rank 16"),
    ],
)
def test_a_recipe_runs(recipe: str, training: str, cut: str) -> None:
    output, _ = finished(
        ["bash", "examples/train.sh", *recipe.split(), *CUT, *cut.split()],
        {"DEVICE": "cpu", "GPUS_PER_NODE": "2", "TRAINING": training}
        | {"MASTER_PORT": str(free_port())},
    )
    assert len(logged_losses(output)) == 3


@pytest.mark.program
def test_a_job_runs_on_its_nodes() -> None:
    """Two nodes of one rank each, which are this machine; `scontrol` and `srun` stand in."""
    job = {
        "SLURM_JOB_ID": str(free_port() - 20000),
        "SLURM_JOB_NODELIST": "here,here",
        "SLURM_JOB_NUM_NODES": "2",
        "SLURM_GPUS_ON_NODE": "1",
        "SLURM_SUBMIT_DIR": str(ROOT),
        "DEVICE": "cpu",
    }
    layout = "--tensor-model-parallel-size 2 --low-rank-rank 16".split()
    output, _ = finished(
        ["bash", "examples/train.sbatch", "7B", "btp", "cola", *CUT, *layout],
        job | {"PATH": f"{SLURM}:{Path(sys.executable).parent}:{os.environ['PATH']}"},
    )
    assert len(logged_losses(output)) == 3
    assert output.count("> device: cpu") == 1


def free_port() -> int:
    """A port from 20000 to 39999, as the job's script picks one, that nobody listens at."""
    for port in range(20000, 40000):
        with socket.socket() as taken:
            try:
                taken.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise AssertionError("no free port")
