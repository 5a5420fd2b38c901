"""Every command of docs/planner.md runs as it stands there."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs" / "planner.md").read_text(encoding="utf-8")
COMMANDS = re.findall(r"^```sh\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)


def test_the_page_has_commands():
    assert len(COMMANDS) == 7


@pytest.mark.program
@pytest.mark.parametrize("commands", COMMANDS)
def test_a_command_runs_as_it_stands_on_the_page(commands, tmp_path):
    for name in ("tools", "megatron", "boost_layers"):
        (tmp_path / name).symlink_to(ROOT / name)
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "-e", "-c", commands],
        cwd=tmp_path,
        env=os.environ | {"PATH": path},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_page_names_the_errors_that_the_tool_prints():
    from megatron.boost.planner.validation import (
        compare,
        compare_ratios,
        mean_error,
        worst_error,
    )
    from tests.support.planned import A100

    found = compare(A100)
    assert f"{len(found)} published iteration times" in PAGE
    assert (
        f"mean error\n{100 * mean_error(found):.1f} %, worst {100 * worst_error(found):.1f} %"
        in PAGE
    )
    worst_ratio = max(abs(ratio.error) for ratio in compare_ratios(found))
    assert f"within {100 * worst_ratio:.1f} %" in PAGE
