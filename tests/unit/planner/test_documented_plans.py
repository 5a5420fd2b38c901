"""Every command of docs/planner.md runs as it stands there."""

import pytest

from tests.support.documents import ROOT, blocks, run_commands

PAGE = (ROOT / "docs" / "planner.md").read_text(encoding="utf-8")
COMMANDS = blocks("docs/planner.md")


def test_the_page_has_commands():
    assert len(COMMANDS) == 7


@pytest.mark.program
@pytest.mark.parametrize("commands", COMMANDS)
def test_a_command_runs_as_it_stands_on_the_page(commands, tmp_path):
    run_commands(commands, tmp_path)


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
