"""What the benchmarks of single ops time: every op, the same numbers for all, and the bytes they
are judged by."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.gpu import extension, steps
from benchmarks.gpu.plan import Measured, Plan, Times, key_of
from benchmarks.gpu.report import GpuReport, verdict
from benchmarks.gpu.timing import Stopwatch
from benchmarks.kernels import KernelReport
from benchmarks.op_cases import (
    Maker,
    Prepared,
    RankSizes,
    copy_case,
    implementation,
    op_cases,
    rate,
)
from benchmarks.variants import QUICK_SIZES
from boost_layers import ops
from boost_layers.ops import reference
from boost_layers.ops.dispatch import problem_of_csrc
from tests.unit.test_benchmark_harness import step

pytestmark = pytest.mark.slow

CPU = torch.device("cpu")
SIZES = RankSizes.of(QUICK_SIZES, 2)
CASES = {case.key: case for case in op_cases(SIZES, torch.float32, "cpu")}
MOVING = [key for key, case in CASES.items() if case.moved_bytes]
MULTIPLYING = [key for key, case in CASES.items() if case.flop]


def tensors(result: Any) -> Iterator[Tensor]:
    if isinstance(result, Tensor):
        yield result
    elif isinstance(result, list | tuple):
        for each in result:
            yield from tensors(each)


def outcome(prepared: Prepared) -> list[Tensor]:
    """What a call gives and what it changes."""
    with torch.no_grad():
        result = prepared.run()
    return [*tensors(result), *(tensor for tensor, _ in prepared.overwritten)]


def test_every_dispatched_op_is_timed() -> None:
    dispatched = {name for name in ops.__all__ if hasattr(getattr(ops, name), "__wrapped__")}
    assert {case.op for case in CASES.values()} == dispatched - {"use"}


def test_every_op_is_judged_by_bytes_or_by_operations() -> None:
    assert len(CASES) == len(op_cases(SIZES, torch.float32, "cpu"))
    assert not set(MOVING) & set(MULTIPLYING)
    assert set(MOVING) | set(MULTIPLYING) == set(CASES)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("key", MOVING)
def test_bytes_are_those_of_the_tensors_given_and_made(key: str, dtype: torch.dtype) -> None:
    case = next(each for each in op_cases(SIZES, dtype, "cpu") if each.key == key)
    maker = Maker(CPU, dtype)
    call = case.build(maker, reference)
    written = [*tensors(call()), *maker.places, *(tensor for tensor, _ in maker.overwritten)]
    assert case.moved_bytes == sum(t.numel() * t.itemsize for t in [*maker.given, *written])


@pytest.mark.parametrize("key", MULTIPLYING)
def test_operations_are_those_of_the_matrices_multiplied(key: str) -> None:
    in_place: Any = {torch.ops.aten.addmm_: lambda c, a, b, **_: 2 * a[0] * a[1] * b[1]}
    call = CASES[key].prepare(CPU, torch.float32, reference)
    with FlopCounterMode(display=False, custom_mapping=in_place) as counter, torch.no_grad():
        call.run()
    assert counter.get_total_flops() == CASES[key].flop


@pytest.mark.skipif(problem_of_csrc() is not None, reason="csrc is not built")
@pytest.mark.parametrize("key", CASES)
def test_implementations_are_given_the_same_numbers(key: str) -> None:
    by_csrc, expected = (
        outcome(CASES[key].prepare(CPU, torch.float32, implementation(name, "cpu")))
        for name in ("csrc", "reference")
    )
    for value, other in zip(by_csrc, expected, strict=True):
        torch.testing.assert_close(value, other, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("key", ["residual_add_rms_stats", "rotary", "fold_gamma_accumulate"])
def test_what_is_changed_in_place_is_fresh_every_time(key: str) -> None:
    call = CASES[key].prepare(CPU, torch.float32, reference)
    first = [t.clone() for t in outcome(call)]
    assert any(not torch.equal(t, contents) for t, contents in call.overwritten)
    call.refresh()
    assert all(torch.equal(*pair) for pair in zip(first, outcome(call), strict=True))


def test_a_copy_moves_what_it_says() -> None:
    copy = copy_case(4096)
    assert copy.moved_bytes == 4096
    (result,) = outcome(copy.prepare(CPU, torch.float32, reference))
    assert 2 * result.numel() * result.itemsize == 4096


def test_absent_implementations_are_refused_by_name() -> None:
    with pytest.raises(ValueError, match="^triton: not for cpu$"):
        implementation("triton", "cpu")


def test_a_rate_is_of_a_second() -> None:
    assert rate(3 * 10**9, 1000.0) == pytest.approx(3.0)
    assert rate(10, None) is None
    assert rate(0, 1.0) is None


def kernel_report(*, with_copy: bool = True) -> KernelReport:
    times = {"rms_stats_csrc": 2.0, "rms_stats_reference": 6.0, "rms_stats_copy": 1.0}
    if not with_copy:
        del times["rms_stats_copy"]
    times |= {"up_projection_qkv_csrc": 5.0, "up_projection_qkv_reference": 5.5}
    return KernelReport(
        settings={"tp": 2},
        machine={"processor": "a processor"},
        cases=[CASES["rms_stats"], CASES["up_projection_qkv"]],
        memory_copy_bytes=10**9,
        steps=[
            step(key, number, ms)
            for number in range(2)
            for key, ms in (times | {"memory_copy": 100.0}).items()
        ],
    )


def test_the_race_tells_ratios_and_rates() -> None:
    result = kernel_report().flat()
    assert result["rms_stats_reference_over_csrc"] == pytest.approx(3.0)
    assert result["rms_stats_csrc_share_of_copy"] == pytest.approx(0.5)
    expected = CASES["rms_stats"].moved_bytes / 2.0 / 1e6
    assert result["rms_stats_csrc_gb_per_second"] == pytest.approx(expected)
    assert result["copy_gb_per_second"] == pytest.approx(10.0)
    assert result["up_projection_qkv_reference_over_csrc"] == pytest.approx(1.1)
    assert "up_projection_qkv_csrc_gflop_per_second" in result
    page = kernel_report().markdown()
    assert "| rms_stats | 2.000 | 2.000 | 2.000 | 6.000 | 6.000 | 6.000 | 3.00 |" in page
    assert kernel_report(with_copy=False).flat()["rms_stats_csrc_share_of_copy"] is None


PLAN = Plan(device="cuda", quick=False, repeats=3)


def gpu_report(found: dict[str, Measured], missing: str | None = None) -> GpuReport:
    return GpuReport(
        missing=missing,
        outcomes={"build": "not run"},
        sections=steps.sections(PLAN, found),
        failures={},
        counts={"tests_failed": None},
        settings={"tp": 4},
        machine={"gpu": "none"},
    )


def test_without_a_gpu_every_figure_is_not_measured() -> None:
    report = gpu_report({}, "there is no GPU")
    result = report.flat()
    assert result["measured"] is False
    figures = [value for section in report.sections for value in section.flat.values()]
    targets = {0.85, 1.55, 1.21}
    assert all(value is None or value in targets for value in figures)
    page = report.markdown()
    assert "Nothing was measured: there is no GPU." in page
    assert "| rms_stats | 1 | 8.5 | not measured | not measured | not measured |" in page


def times(milliseconds: float) -> Times:
    return Times(median_ms=milliseconds, p20_ms=milliseconds, p80_ms=milliseconds)


def test_shares_and_ratios_are_of_what_was_measured_in_the_run() -> None:
    copy_ms = 2**31 / 2e12 * 1e3
    moved = 3 * 4096 * 1024 * 2 + 4 * 4096
    kernels = Measured(
        times={
            "copy": times(copy_ms),
            key_of("residual_gradient", 1, "csrc"): times(moved / 1.8e12 * 1e3),
            key_of("residual_gradient", 1, "triton"): times(moved / 1.0e12 * 1e3),
        }
    )
    gemms = Measured(
        times={
            "square_8192": times(2 * 8192**3 / 3e14 * 1e3),
            key_of("up_projection_qkv", 1, "csrc"): times(2 * 4096 * 3 * 1024**2 / 1.5e14 * 1e3),
            key_of("qkv_grouped", 1, "csrc"): times(0.2),
            key_of("qkv_ungrouped", 1, "csrc"): times(0.32),
            key_of("gate_up_grouped", 1, "csrc"): times(0.2),
            key_of("gate_up_ungrouped", 1, "csrc"): times(0.22),
        }
    )
    layers = Measured(
        times={
            key_of("btp_4_layers", 1, "csrc"): times(30.0),
            key_of("btp_2_layers", 1, "csrc"): times(20.0),
            key_of("full_rank_4_layers", 1, "csrc"): times(50.0),
            key_of("full_rank_2_layers", 1, "csrc"): times(30.0),
        }
    )
    report = gpu_report({"kernels": kernels, "gemms": gemms, "layers": layers})
    result = report.flat()
    assert result["copy_gb_per_second"] == pytest.approx(2000.0)
    assert result["residual_gradient_micro_batch_1_csrc_share_of_copy"] == pytest.approx(0.9)
    assert result["residual_gradient_micro_batch_1_triton_share_of_copy"] == pytest.approx(0.5)
    assert result["csrc_least_share_of_copy"] == pytest.approx(0.9)
    assert result["matrix_peak_tflop_per_second"] == pytest.approx(300.0)
    assert result["up_projection_qkv_micro_batch_1_csrc_share_of_peak"] == pytest.approx(0.5)
    assert result["qkv_ungrouped_over_grouped_micro_batch_1_csrc"] == pytest.approx(1.6)
    assert result["btp_micro_batch_1_csrc_ms_of_32_layers"] == pytest.approx(160.0)
    assert result["full_rank_over_btp_micro_batch_1_csrc_without_communication"] == 2.0
    page = report.markdown()
    assert "| qkv | 1 | csrc | 0.320 | 0.200 | 1.60 | 1.55 | yes |" in page
    assert "| gate_up | 1 | csrc | 0.220 | 0.200 | 1.10 | 1.21 | NO |" in page


def test_targets_are_judged_only_where_there_are_figures() -> None:
    assert verdict(0.9, 0.85) == "yes"
    assert verdict(0.8, 0.85) == "NO"
    assert verdict(None, 0.85) == "not measured"
    assert verdict(0.9, None) == "not judged"


def test_a_call_that_fails_does_not_end_the_step() -> None:
    watch = Stopwatch(CPU, PLAN)

    def fails() -> None:
        raise RuntimeError("an illegal access\nand where")

    watch.take("broken", lambda: Prepared(fails))
    watch.take("sound", lambda: Prepared(lambda: None))
    assert watch.measured.failures == {"broken": "an illegal access"}
    assert watch.measured.milliseconds("sound") is not None
    assert watch.measured.milliseconds("broken") is None


class FakeEvent:
    """Stands in for CUDA's; 12 ms lie between any two."""

    def __init__(self, log: list[str], **_: Any) -> None:
        self.log = log

    def record(self) -> None:
        self.log.append("event")

    def elapsed_time(self, other: FakeEvent) -> float:
        return 12.0


def test_on_cuda_several_calls_stand_between_two_events_that_are_queued_together() -> None:
    log: list[str] = []
    watch = Stopwatch(CPU, PLAN)
    watch.device = torch.device("cuda")
    with (
        mock.patch.object(torch.cuda, "Event", lambda **options: FakeEvent(log, **options)),
        mock.patch.object(torch.cuda, "synchronize", lambda: log.append("wait")),
        mock.patch.object(torch.cuda, "_sleep", lambda cycles: log.append("busy")),
    ):
        watch.take("op", lambda: Prepared(lambda: log.append("call")), calls=3)
    assert watch.measured.times == {"op": times(4.0)}
    warm_up = ["call", "call", "call", "wait"]
    repeat = ["wait", "busy", "event", "call", "call", "call", "event", "wait"]
    assert log == 3 * warm_up + PLAN.repeats * repeat


def test_as_many_calls_as_it_takes_to_be_beyond_the_cache() -> None:
    watch = Stopwatch(CPU, PLAN)
    assert watch.calls_for(100) == 1
    watch._cache = 1000
    assert [watch.calls_for(size) for size in (0, 1, 300, 1000, 5000)] == [32, 32, 4, 1, 1]


def test_the_tests_are_counted_from_their_report() -> None:
    report = (
        '<testsuites><testsuite name="a" tests="10" failures="2" errors="1" skipped="3"/>'
        '<testsuite name="b" tests="1" failures="0" errors="0" skipped="0"/></testsuites>'
    )
    assert extension.counted(report) == {
        "tests_passed": 5,
        "tests_failed": 3,
        "tests_skipped": 3,
    }
