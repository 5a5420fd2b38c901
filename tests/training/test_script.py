"""`pretrain_gpt.py` as a user starts it: whole runs in processes of their own."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.support.programs import finished_python
from tests.support.runs import DATA, MODEL, TRAINING

FLAGS = [*MODEL, *DATA, *TRAINING, "--train-iters", "2", "--low-rank-arch", "cola"]
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]


def logged_losses(output: str) -> list[str]:
    return re.findall(r"iteration +\d+/ +2 \|.*lm loss: (\S+)", output)


@pytest.mark.slow
def test_under_torchrun_it_trains_logs_reports_and_ends_quietly(tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    output, errors = finished_python(
        [*TORCHRUN, "pretrain_gpt.py", *FLAGS, "--tensor-model-parallel-size", "2"]
        + ["--low-rank-comm-report", str(report)]
    )

    assert len(logged_losses(output)) == 2
    assert output.count("> device: cpu") == 1
    assert output.count("> dropout: 0") == 1
    assert "collectives of this rank" in output
    assert json.loads(report.read_text())["forward_all_reduce_calls_per_layer"] == 4
    # Of upstream's warnings and its 800 arguments nothing, of torchrun at most its own notice.
    assert "arguments ---" not in output
    assert [line for line in errors.splitlines() if "torch/distributed/run.py" not in line] == []


@pytest.mark.slow
def test_alone_and_without_a_launcher_it_trains_to_the_same_losses() -> None:
    alone, errors = finished_python(["pretrain_gpt.py", *FLAGS])
    pair, _ = finished_python(
        [*TORCHRUN, "pretrain_gpt.py", *FLAGS, "--pipeline-model-parallel-size", "2"]
    )

    assert len(logged_losses(alone)) == 2
    assert logged_losses(alone) == logged_losses(pair)
    assert errors == ""
