"""The demo with real trainings: two ranks, three strategies, few steps."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.support.tools import TOOLS

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

REPOSITORY = TOOLS.parent


def demo(*flags):
    return [sys.executable, str(TOOLS / "demo.py"), "--steps", "20", *map(str, flags)]


def processes_with(word):
    """The ids of running processes that have `word` on their command line."""
    found = []
    for command in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if word.encode() in command.read_bytes():
                found.append(int(command.parent.name))
        except OSError:
            continue
    return found


@pytest.mark.program
def test_demo_trains_compares_and_reports(tmp_path):
    run = subprocess.run(
        demo("--out", tmp_path / "demo", "--json", tmp_path / "demo.json"),
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
    )

    assert run.returncode == 0, run.stdout + run.stderr
    result = json.loads((tmp_path / "demo.json").read_text())
    # BTP and vanilla are one model; 20 steps of fp32 rounding lie between them.
    assert result["cola_vanilla_loss"] == pytest.approx(result["cola_btp_loss"], rel=1e-4)
    assert result["cola_vanilla_validation_loss"] == pytest.approx(
        result["cola_btp_validation_loss"], rel=1e-4
    )
    for key in ("cola_btp", "full_rank", "cola_vanilla"):
        # ln 4096 = 8.3 is what an untrained model has.
        assert result[f"{key}_loss"] < 7.5
        assert result[f"{key}_validation_loss"] < 7.5
    # btp.md's table, n = 1024 tokens of fp32: 7r and 3 statistics columns' worth less than 1 %.
    token_mib = 1024 * 4 / 2**20
    assert result["cola_btp_forward_all_reduce_calls_per_layer"] == 4
    assert result["cola_btp_backward_all_reduce_calls_per_layer"] == 4
    assert result["cola_btp_backward_mib_per_layer"] == pytest.approx(7 * 128 * token_mib)
    assert result["full_rank_forward_all_reduce_calls_per_layer"] == 2
    assert result["full_rank_forward_mib_per_layer"] == pytest.approx(2 * 512 * token_mib)
    assert result["cola_vanilla_forward_all_reduce_calls_per_layer"] == 7
    embedding_and_head, norms = 2 * 4096 * 512, 9 * 512
    projections = 4 * (4 * 2 * 512 + 3 * (512 + 1376)) * 128
    assert result["cola_btp_parameters"] == embedding_and_head + norms + projections
    assert result["cola_vanilla_parameters"] == result["cola_btp_parameters"]
    page = (tmp_path / "demo" / "report.html").read_text()
    assert f"{result['cola_btp_validation_loss']:.3f}" in page
    assert (tmp_path / "demo" / "loss.png").stat().st_size > 10_000
    assert "Next: train on your own text" in run.stdout


def test_ctrl_c_ends_the_demo_and_every_rank(tmp_path):
    out = tmp_path / "demo"
    log = out / "cola-btp" / "log.txt"
    process = subprocess.Popen(
        demo("--out", out),
        cwd=REPOSITORY,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        # Tests that run in the background of a shell inherit that Ctrl-C is ignored.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    try:
        while not (log.exists() and "iteration        2/" in log.read_text()):
            assert process.poll() is None, process.stderr.read()
            time.sleep(0.2)
        assert len(processes_with(str(out))) >= 4  # the demo, the launcher and two ranks
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=60)
    finally:
        if process.poll() is None:
            os.kill(process.pid, signal.SIGKILL)

    assert process.returncode == 130
    assert errors == "error: interrupted\n"
    assert processes_with(str(out)) == []
