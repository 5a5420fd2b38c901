"""The planner's times of the iterations that `benchmarks/iteration.py` measures on a CPU."""

from __future__ import annotations

import csv
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks.harness import summarise
from benchmarks.planner import BENCHMARK, LIMIT, PlannerReport, cases_of, planned, predicted
from benchmarks.variants import FULL_SIZES
from megatron.boost.accounting.parameters import rank_parameters
from megatron.boost.planner.cluster import load_cluster
from megatron.boost.planner.implementation import BOOST
from megatron.boost.planner.iteration import estimate
from tests.unit.test_benchmark_harness import step

CPU = load_cluster("cpu-xeon")
RESULTS = Path(__file__).parents[3] / "benchmarks" / "results"
RECORDED = {
    "cpu-xeon": RESULTS / "planner-20261130-232313-01768ab.csv",
    "cpu-epyc": RESULTS / "planner-20261201-012440-4659b3b.csv",
}
"""Measured on the days and on the machines that the presets are of."""


def recorded_ms(preset: str) -> dict[str, float]:
    with RECORDED[preset].open() as file:
        rows = list(csv.DictReader(file))
    steps = [
        step(row["variant"], int(row["round_number"]), float(row["milliseconds"]))
        for row in rows
        if row["counts"] == "True"
    ]
    medians = {key: summarise(steps, key).median_ms for key in {each.variant for each in steps}}
    return {key: median for key, median in medians.items() if median is not None}


@pytest.mark.parametrize("preset", RECORDED)
def test_a_preset_predicts_what_was_measured_where_it_is_from(preset: str) -> None:
    measured, cluster = recorded_ms(preset), load_cluster(preset)
    assert set(measured) == {case.variant.key for case in cases_of(2)}
    for case in cases_of(2):
        found = predicted(case, FULL_SIZES, "fp32", cluster).seconds * 1000.0
        assert found == pytest.approx(measured[case.variant.key], rel=LIMIT), case.variant.key


def test_the_benchmark_s_iteration_has_neither_optimiser_nor_gradient_buffers() -> None:
    case = cases_of(2)[0]
    model, layout = planned(case, FULL_SIZES, "fp32")
    assert (layout.tensor_parallel, layout.data_parallel, layout.dtype) == (2, 1, torch.float32)
    bare = predicted(case, FULL_SIZES, "fp32", CPU)
    assert (bare.optimiser, bare.data_parallel, bare.bubble, bare.transfers) == (0, 0, 0, 0)
    buffered = estimate(model, layout, CPU, implementation=BOOST, optimiser=False)
    # Read and written once, 4 bytes a number; embedding and head are 2·V·d/T of the parameters.
    vocabulary = 2 * FULL_SIZES.vocabulary * FULL_SIZES.hidden / 2
    layers = rank_parameters(model, layout, 0) - vocabulary
    assert (buffered.elementwise - bare.elementwise) * CPU.elementwise_bytes_per_s == pytest.approx(
        2 * 4 * layers, rel=0.01
    )
    assert BENCHMARK == replace(BOOST, name=BENCHMARK.name, gradient_buffers=False)


def test_errors_are_of_the_predicted_time_against_the_median() -> None:
    cases = cases_of(2)
    times = {case.variant.key: predicted(case, FULL_SIZES, "fp32", CPU) for case in cases}
    steps = [
        step(key, number, 1000.0 * found.seconds * factor)
        for key, found in times.items()
        for number, factor in enumerate((0.5, 0.8, 2.0))
    ]
    report = PlannerReport(
        settings={"tp": 2, "dtype": "fp32"},
        machine={"processor": "a processor"},
        cases=cases,
        estimates=times,
        of_preset={},
        clusters={"ranks_2": CPU},
        steps=steps,
    )
    flat = report.flat()
    assert flat["btp_ms"] == pytest.approx(800.0 * times["btp"].seconds)
    assert flat["btp_predicted_error_percent"] == pytest.approx(25.0)
    assert flat["predicted_worst_error_percent"] == pytest.approx(25.0)
    assert flat["btp_preset_ms"] is None
    assert flat["preset_worst_error_percent"] is None
    assert flat["ranks_2_memory.bandwidth_gb_per_s"] == CPU.memory.bandwidth_gb_per_s
    page = report.markdown()
    assert "| +25.0% | not measured | not measured |" in page
    assert f"| node.latency_us | {CPU.node.latency_us} |" in page
