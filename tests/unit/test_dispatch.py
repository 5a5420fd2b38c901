"""Which implementation of the ops serves, and what is said when the extension is not there."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from boost_layers import ops
from boost_layers.ops.dispatch import problem_of_csrc

ROOT = Path(__file__).parents[2]
WITHOUT_EXTENSION = """
import importlib.util
find = importlib.util.find_spec
importlib.util.find_spec = lambda name, *rest: None if name.endswith("._C") else find(name, *rest)
"""
PRINT = "from boost_layers import ops; print(ops.in_use())"


def run(program: str, **environment: str) -> subprocess.CompletedProcess:
    inherited = {k: v for k, v in os.environ.items() if k not in ("BOOST_OPS", "RANK")}
    return subprocess.run(
        [sys.executable, "-c", program],
        cwd=ROOT,
        env=inherited | environment,
        capture_output=True,
        text=True,
    )


@pytest.mark.slow
def test_the_reference_can_be_asked_for() -> None:
    result = run(PRINT, BOOST_OPS="reference")
    assert result.stdout == "{'cpu': 'reference', 'cuda': 'reference'}\n"
    assert result.stderr == ""


@pytest.mark.slow
def test_an_unknown_implementation_is_refused_by_name() -> None:
    result = run(PRINT, BOOST_OPS="fast")
    assert "ValueError: BOOST_OPS=fast: must be csrc, triton or reference" in result.stderr


@pytest.mark.slow
def test_without_the_extension_there_is_one_warning_and_everything_works() -> None:
    result = run(WITHOUT_EXTENSION + PRINT)
    assert "'cpu': 'reference'" in result.stdout
    assert result.stderr.count("make ext") == 1
    assert run(WITHOUT_EXTENSION + PRINT, RANK="1").stderr == ""
    refused = run(WITHOUT_EXTENSION + PRINT, BOOST_OPS="csrc")
    assert "ImportError: BOOST_OPS=csrc: it is not built for this Python" in refused.stderr


@pytest.mark.slow
def test_the_report_names_what_serves() -> None:
    result = subprocess.run(
        [sys.executable, "-m", "boost_layers.ops"], cwd=ROOT, capture_output=True, text=True
    )
    lines = result.stdout.splitlines()
    assert lines[0].startswith("extension (csrc): ")
    assert lines[1] == f"cpu: {ops.in_use()['cpu']}"


@pytest.mark.skipif(problem_of_csrc() is not None, reason=f"csrc: {problem_of_csrc()}")
def test_one_device_can_be_served_otherwise_for_a_while() -> None:
    x = torch.ones(2, 3)
    with ops.use("csrc"):
        assert ops.in_use()["cpu"] == "csrc"
        with ops.use("reference"):
            assert ops.in_use()["cpu"] == "reference"
            assert torch.equal(ops.rms_stats(x=x), torch.full((2, 1), 3.0))
        assert ops.in_use()["cpu"] == "csrc"
        assert torch.equal(ops.rms_stats(x=x), torch.full((2, 1), 3.0))
