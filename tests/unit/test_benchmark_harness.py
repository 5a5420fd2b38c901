"""What a benchmark does with its steps: order, the rule by which they are dropped, medians."""

from collections.abc import Sequence
from pathlib import Path
from unittest import mock

import pytest
import torch

from benchmarks import harness
from benchmarks.harness import (
    MINOR_FAULTS_ALLOWED,
    WARM_UP_ROUNDS,
    Step,
    measure,
    merged,
    percentile,
    rotated,
    round_ratios,
    summarise,
)


def step(variant: str = "a", number: int = 0, ms: float = 100.0, **changes: float) -> Step:
    values = {
        "exposed_communication_seconds": 0.01,
        "cpu_milliseconds": ms,
        "minor_faults": 0,
        "major_faults": 0,
    }
    return Step(variant=variant, round_number=number, milliseconds=ms, **(values | changes))


def steps_of(variant: str, times: Sequence[float]) -> list[Step]:
    return [step(variant, number, ms) for number, ms in enumerate(times)]


def test_each_round_begins_one_later() -> None:
    assert rotated("abc", 0) == ["a", "b", "c"]
    assert rotated("abc", 1) == ["b", "c", "a"]
    assert rotated("abc", 5) == ["c", "a", "b"]
    assert rotated("abc", -1) == ["c", "a", "b"]


def test_in_as_many_rounds_as_variants_each_has_every_place_once() -> None:
    rounds = [rotated("abcde", number) for number in range(5)]
    for place in range(5):
        assert sorted(order[place] for order in rounds) == list("abcde")


@pytest.mark.parametrize(
    ("faults", "counts"),
    [
        ({"minor_faults": MINOR_FAULTS_ALLOWED}, True),
        ({"minor_faults": MINOR_FAULTS_ALLOWED + 1}, False),
        ({"major_faults": 1}, False),
    ],
)
def test_a_step_is_dropped_for_page_faults(faults: dict[str, int], counts: bool) -> None:
    assert step(**faults).counts is counts


def test_a_step_is_not_dropped_for_being_slow() -> None:
    assert step(ms=1e6).counts


# Milliseconds of ten steps of one variant, taken on a machine shared with others; in the fifth the
# heap grew.
RECORDED = [1802.5, 1795.1, 1811.9, 1799.0, 3904.7, 1820.3, 2312.8, 1797.4, 1801.2, 1805.6]


def test_medians_and_percentiles_of_recorded_steps() -> None:
    recorded = steps_of("btp", RECORDED)
    recorded[4] = step("btp", 4, RECORDED[4], minor_faults=27938)
    summary = summarise([*recorded, *steps_of("other", [1.0, 2.0])], "btp")
    assert (summary.steps, summary.dropped) == (10, 1)
    assert summary.median_ms == 1802.5
    # Of nine sorted values, 1.6 and 6.4 steps from the smallest.
    assert summary.p20_ms == pytest.approx(1797.4 + 0.6 * (1799.0 - 1797.4))
    assert summary.p80_ms == pytest.approx(1811.9 + 0.4 * (1820.3 - 1811.9))
    assert summary.exposed_communication_seconds == 0.01


def test_a_variant_without_a_step_that_counts_is_not_measured() -> None:
    summary = summarise([step(major_faults=1)], "a")
    assert (summary.steps, summary.dropped) == (1, 1)
    assert summary.median_ms is None
    assert summary.exposed_communication_seconds is None


def test_percentiles_lie_between_neighbours() -> None:
    assert percentile([4.0, 1.0], 50) == 2.5
    assert percentile([7.0], 80) == 7.0
    assert percentile([], 50) is None


def test_a_step_takes_as_long_as_on_the_slowest_rank() -> None:
    ranks = [
        [step(ms=100.0, minor_faults=3, exposed_communication_seconds=0.0, cpu_milliseconds=90.0)],
        [step(ms=101.0, minor_faults=2, exposed_communication_seconds=0.5, cpu_milliseconds=60.0)],
    ]
    assert merged(ranks) == [
        step(ms=101.0, minor_faults=3, exposed_communication_seconds=0.25, cpu_milliseconds=90.0)
    ]


def test_ratios_come_from_rounds_in_which_both_count() -> None:
    steps = [*steps_of("a", [10.0, 30.0, 20.0]), *steps_of("b", [5.0, 10.0, 5.0])]
    steps[2] = step("a", 2, 20.0, major_faults=1)
    assert round_ratios(steps, "a", "b") == [2.0, 3.0]


def test_measuring_warms_up_and_alternates() -> None:
    calls: list[str] = []
    rounds: list[list[str]] = []
    with (
        mock.patch.object(harness.distributed, "barrier"),
        mock.patch.object(harness, "_enlarge_heap") as enlarge,
    ):
        steps = measure(
            {"a": lambda: calls.append("a"), "b": lambda: calls.append("b")},
            3,
            torch.device("cpu"),
            lambda done: rounds.append([step.variant for step in done]),
        )
    assert len(calls) == 2 * (WARM_UP_ROUNDS + 3)
    assert [step.variant for step in steps] == calls[2 * WARM_UP_ROUNDS :]
    assert rounds == [["a", "b"], ["b", "a"], ["a", "b"]]
    assert [step.round_number for step in steps] == [0, 0, 1, 1, 2, 2]
    enlarge.assert_called_once()


def _huge_pages_everywhere() -> bool:
    setting = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    return setting.exists() and "[always]" in setting.read_text()


@pytest.mark.skipif(_huge_pages_everywhere(), reason="the kernel maps huge pages unasked")
def test_fresh_memory_shows_as_page_faults() -> None:
    pages = 20_000

    def take_fresh_memory() -> None:
        # More than glibc may keep in its heap (32 MiB a block), so mapped anew each time.
        torch.ones(pages * 4096, dtype=torch.uint8)

    with (
        mock.patch.object(harness.distributed, "barrier"),
        mock.patch.object(harness, "_enlarge_heap"),
    ):
        (taken,) = measure({"a": take_fresh_memory}, 1, torch.device("cpu"), lambda _: None)
    assert taken.minor_faults >= pages
    assert not taken.counts
