"""A checkpoint of any layout loads into any other, optimizer state included.

A run is handed on from layout to layout, one iteration in each. In the steps of that walk every
two settings meet (of TP × PP × grouping × strategy × optimizer, before and after the step), which
stands for all combinations. Each iteration is a whole training run of its own; the runs share
processes.
"""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.support.covering import Setting, all_settings, covering_walk, pairs_of_step
from tests.support.distributed import run_ranks
from tests.support.runs import (
    losses,
    relative_difference,
    train_in_turn,
    weight_differences,
    whole_weights,
)
from tests.support.training_state import differing, whole_state

AXES: dict[str, tuple[Any, ...]] = {
    "tp": (1, 2, 4),
    "pp": ("1", "2", "interleaved"),
    "grouping": ("grouped", "apart"),
    "strategy": ("btp", "vanilla"),
    "optimizer": ("plain", "distributed"),
}
FLAGS = {
    "1": "",
    "2": "--pipeline-model-parallel-size 2",
    "interleaved": "--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 1",
    "grouped": "",
    "apart": "--no-low-rank-grouping",
    "btp": "--low-rank-tp btp",
    "vanilla": "--low-rank-tp vanilla",
    "plain": "",
    "distributed": "--use-distributed-optimizer",
}
# All kinds of parameters: LaX's gates and norms, which the first low-rank layer lacks, ranks that
# differ, and full-rank layers. Adam divides by the root of squared gradients: with its default ε
# it amplifies what layouts differ by in rounding, more with each iteration.
COMMON = (
    "--low-rank-arch lax --low-rank-ranks q=12,down=8 --low-rank-layers 2-3 --num-layers 4 "
    "--micro-batch-size 1 --lr 3e-4 --min-lr 3e-4 --adam-eps 1e-3 "
    "--ckpt-format torch_dist"
)


class Layout(NamedTuple):
    """A value of each axis."""

    tp: int
    pp: str
    grouping: str
    strategy: str
    optimizer: str

    @property
    def flags(self) -> str:
        words = [f"--tensor-model-parallel-size {self.tp}", *(FLAGS[name] for name in self[1:])]
        return " ".join(words)

    def __str__(self) -> str:
        return "-".join(map(str, self))


def fits(setting: Setting) -> bool:
    """Four ranks are enough."""
    return setting["tp"] * (1 if setting["pp"] == "1" else 2) <= 4


SETTINGS = all_settings(AXES, fits)
WALK = covering_walk(SETTINGS)
LAYOUTS = [Layout(**setting) for setting in WALK]
# What does not fit four ranks.
WIDE_LAYOUTS = [
    Layout(4, "2", "grouped", "vanilla", "distributed"),
    Layout(4, "interleaved", "apart", "btp", "plain"),
]

Runs = list[list[dict[str, Any]]]
"""Results by run and rank; the unbroken run first."""


def test_every_two_settings_meet() -> None:
    met = {pair for step in itertools.pairwise(WALK) for pair in pairs_of_step(*step)}
    for before in SETTINGS:
        for after in SETTINGS:
            assert met.issuperset(pairs_of_step(before, after)), (before, after)


def handed_on(layouts: list[Layout], ranks: int, folder: Path) -> Runs:
    """The unbroken run on one layout, and one that is saved after each iteration and resumed on the
    next layout."""
    common = f"{COMMON} --global-batch-size {ranks} --train-iters {len(layouts)}"
    flags = [common]
    for number, layout in enumerate(layouts):
        load = f"--load {folder / str(number - 1)}" if number else ""
        save = f"--save {folder / str(number)} --save-interval 1 --exit-interval 1"
        flags.append(f"{common} {layout.flags} {load} {save}")
    by_rank = run_ranks(
        train_in_turn, ranks, flags, with_state=True, init_process_group=False, timeout_s=240
    )
    return [[results[number] for results in by_rank] for number in range(len(flags))]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return handed_on(LAYOUTS, 4, tmp_path_factory.mktemp("checkpoints"))


@pytest.fixture(scope="module")
def wide_runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return handed_on(WIDE_LAYOUTS, 8, tmp_path_factory.mktemp("checkpoints"))


def step_id(number: int, layouts: list[Layout]) -> str:
    return f"{layouts[number - 1]}→{layouts[number]}"


@pytest.mark.slow
@pytest.mark.parametrize("number", range(1, len(LAYOUTS)), ids=lambda n: step_id(n, LAYOUTS))
def test_a_checkpoint_loads_into_another_layout(number: int, runs: Runs) -> None:
    assert_handed_on(runs, number)


@pytest.mark.slow
@pytest.mark.parametrize(
    "number", range(1, len(WIDE_LAYOUTS)), ids=lambda n: step_id(n, WIDE_LAYOUTS)
)
def test_a_checkpoint_loads_into_another_layout_of_eight_ranks(
    number: int, wide_runs: Runs
) -> None:
    assert_handed_on(wide_runs, number)


def assert_handed_on(runs: Runs, number: int) -> None:
    """What was saved in the layout before is bit by bit what this one starts from, and the next
    iteration is the unbroken run's."""
    unbroken, before, after = runs[0], runs[number], runs[number + 1]
    vocab_size = unbroken[0]["vocab_size"]
    saved = whole_state([rank["trained"] for rank in before], vocab_size)
    loaded = whole_state([rank["loaded"] for rank in after], vocab_size)
    assert differing(loaded, saved) == []
    assert all(moment.any() for moment in loaded["exp_avg"].values())
    assert {step for rank in after for step in rank["loaded"].steps} == {float(number)}

    expected = [losses(unbroken)[number]], [unbroken[0]["exact_grad_norm"][number]]
    assert relative_difference(losses(after), expected[0]) <= 2e-6
    assert relative_difference(after[0]["exact_grad_norm"], expected[1]) <= 2e-6


@pytest.mark.slow
def test_the_last_weights_are_those_of_the_unbroken_run(runs: Runs) -> None:
    differences = weight_differences(whole_weights(runs[-1]), whole_weights(runs[0]))
    assert {name: d for name, d in differences.items() if not d <= 1e-5} == {}
