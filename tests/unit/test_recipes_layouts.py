"""The layouts in the recipes' table are the planner's."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from megatron.boost.planner.cluster import load_cluster
from megatron.boost.recipes import layouts, table
from megatron.boost.recipes.layouts import CLUSTER, layout_lines, main, plans_of
from megatron.boost.recipes.table import table_rows

MOST_TIME = 1.05
"""A row may take this much longer than the fastest layout: the planner's figures change with every
calibration, and a layout need not follow them all."""


def rows(*sizes: str) -> Iterator[list[str]]:
    return (row for row in table_rows("layout") if row[1] in sizes)


def check(row: list[str]) -> None:
    """The row is among the planner's layouts that fit, and hardly slower than the fastest."""
    training, size, strategy, gpus, *numbers, by_sequence, recompute = row
    plans = plans_of(load_cluster(CLUSTER), training, size, strategy, int(gpus))
    tp, pp, virtual, micro_batch = (int(number) for number in numbers)
    (found,) = (
        plan
        for plan in plans
        if (plan.layout.tensor_parallel, plan.layout.pipeline_parallel) == (tp, pp)
        and plan.layout.virtual_stages == virtual
        and plan.layout.micro_batch_size == micro_batch
        and plan.layout.sequence_parallel == (by_sequence == "yes")
        and plan.recompute == recompute
    )
    assert found.seconds <= MOST_TIME * plans[0].seconds, (
        f"{row}: the planner knows a faster one now; python -m megatron.boost.recipes.layouts"
    )


def test_the_layouts_of_some_sizes_are_the_planners() -> None:
    for row in rows("60M", "7B"):
        check(row)


@pytest.mark.slow
def test_the_layouts_of_more_sizes_are_the_planners() -> None:
    for row in rows("1B", "3B", "13B", "30B"):
        check(row)


def test_tensor_parallelism_is_what_a_strategy_says() -> None:
    for row in table_rows("layout"):
        strategy, tp = row[2], int(row[4])
        if strategy != "full-rank":
            assert (tp > 1) == (strategy != "no-tp"), row


def test_a_row_that_is_not_the_fastest_is_noticed() -> None:
    (row,) = (row for row in rows("60M") if row[2] == "no-tp")
    place = 7
    assert row[place] == "64"
    with pytest.raises(AssertionError, match="a faster one now"):
        check([*row[:place], "1", *row[place + 1 :]])


def test_the_rows_are_written_anew_and_all_else_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    other = tmp_path / "recipes.txt"
    before = table.TABLE.read_text(encoding="utf-8").splitlines()
    few = [line for line in before if not line.startswith("layout") or " 60M " in line]
    kept, old = few[:-2], [line.replace(" 64 ", " 32 ") for line in few[-2:]]
    other.write_text("\n".join([*kept, *old]) + "\n", encoding="utf-8")
    monkeypatch.setattr(table, "TABLE", other)
    monkeypatch.setattr(layouts, "TABLE", other)
    main([])
    assert capsys.readouterr().out == f"{other}: 2 layouts\n"
    written = other.read_text(encoding="utf-8").splitlines()
    assert written[:-2] == kept
    assert written[-2:] == list(layout_lines(load_cluster(CLUSTER))) != old
