"""`make recipes-check`: recipes against the accounting, and what is said when one differs."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megatron.boost.accounting.sizes import Layout
from megatron.boost.recipes import __main__ as tool
from megatron.boost.recipes.check import Checked, check, check_recipe, places
from megatron.boost.recipes.commands import Recipe, command_of
from tests.support.distributed import run_ranks

CHECKED = Checked(
    ranks=8,
    tensor_parallel=4,
    pipeline_parallel=1,
    data_parallel=2,
    micro_batch_size=4,
    parameters=2_820_935_680,
    gib=29.6,
    seconds=26.6,
    forward_collectives=4,
    backward_collectives=4,
    built=1,
    faults=(),
)


def test_colas_smallest_recipe_is_as_accounted() -> None:
    cola = Recipe("cola", "60M", "no-tp", "cola")
    (small,) = run_ranks(check_recipe, 1, cola, init_process_group=False)
    layer = 128 * (4 * 2 * 512 + 3 * (512 + 1376)) + 2 * 512
    parameters = 2 * 32000 * 512 + 8 * layer + 512
    assert small == replace(
        small, ranks=8, data_parallel=8, parameters=parameters, built=1, faults=()
    )


@pytest.mark.slow
def test_a_recipe_of_several_stages_is_as_accounted() -> None:
    full_rank = Recipe("llama2", "30B", "full-rank", None)
    (large,) = run_ranks(check_recipe, 1, full_rank, init_process_group=False)
    assert large == replace(large, ranks=16, parameters=29_666_910_208, faults=())
    assert large.tensor_parallel * large.pipeline_parallel * large.data_parallel == 16
    assert large.built == min(3, large.pipeline_parallel)


def checked_with(recipe: Recipe, *flags: str) -> Checked:
    from megatron.boost.cpu import megatron_on_cpu

    with megatron_on_cpu():
        return check(command_of(recipe, *flags))


@pytest.mark.slow
def test_a_layout_that_does_not_fit_and_flags_that_cannot_run_are_found() -> None:
    vanilla = Recipe("llama2", "7B", "vanilla", "lax")
    layout = ("--tensor-model-parallel-size", "2", "--micro-batch-size", "16")
    (found,) = run_ranks(checked_with, 1, vanilla, *layout, init_process_group=False)
    (fault,) = found.faults
    assert re.match(r"stage 0: needs \d+\.\d GiB, and NVIDIA H100 .* has 80$", fault)
    odd = (*layout[:2], "--ffn-hidden-size", "11009")
    with pytest.raises(AssertionError, match="--ffn-hidden-size 11009: .* legal value: 11010"):
        run_ranks(checked_with, 1, vanilla, *odd, init_process_group=False)


@pytest.mark.parametrize("pp, stages", [(1, [0]), (2, [0, 1]), (4, [0, 2, 3]), (8, [0, 4, 7])])
def test_first_middle_and_last_stage_are_built(pp: int, stages: list[int]) -> None:
    layout = Layout(sequence_length=8, micro_batch_size=1, tensor_parallel=4, pipeline_parallel=pp)
    assert [stage for _, stage in places(layout)] == stages


class _Pool:
    """Stands in for the processes: every recipe has the fault of the second one."""

    def __init__(self, *_: Any) -> None:
        pass

    def __enter__(self) -> _Pool:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def map(self, _: Any, recipes: list[Recipe]) -> list[Checked]:
        return [replace(CHECKED, faults=("kept_bytes: 1",) * (n == 1)) for n in range(len(recipes))]


def test_a_difference_ends_the_check_with_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(tool, "ProcessPoolExecutor", _Pool)
    with pytest.raises(SystemExit) as end:
        tool.main(["--only", "7B btp", "--json", str(tmp_path / "result.json")])
    assert end.value.code == 1
    output, errors = capsys.readouterr()
    assert errors == "error: llama2 7B btp svd: kept_bytes: 1\n"
    assert "llama2 7B btp svd" in output and "3 recipes, 3 ranks built, 1 differences" in output
    result = json.loads((tmp_path / "result.json").read_text())
    assert (result["recipes"], result["differences"]) == (3, 1)
    assert result["llama2_7B_btp_cola_forward_collectives"] == 4
    monkeypatch.setattr(_Pool, "map", lambda _, __, recipes: [CHECKED] * len(recipes))
    tool.main(["--only", "7B btp"])
    assert "0 differences" in capsys.readouterr().out


def test_an_unknown_recipe_is_refused() -> None:
    with pytest.raises(ValueError, match="--only 8B: no recipe .* known: llama2 1B full-rank, "):
        tool.main(["--only", "8B"])
