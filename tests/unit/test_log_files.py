"""A run from a log file: what Megatron prints, and what becomes of it on the way to a file."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from megatron.boost.plotting.history import Run
from megatron.boost.plotting.log_file import read_log
from tests.support.training_output import iteration_line, training_lines, validation_line

BEGINS = "[before the start of training step] datetime: 2026-11-30 10:53:55.543908 \n"


def read(tmp_path: Path, text: str) -> Run:
    (tmp_path / "run.log").write_text(text)
    return read_log(tmp_path / "run.log", "run")


def lines(*steps: int, loss: float = 5.0, milliseconds: float = 100.0) -> str:
    return "".join(iteration_line(step, 100, loss, milliseconds) for step in steps)


def steps(run: Run) -> list[int]:
    return [point.step for point in run.points]


def test_losses_validations_samples_and_time(tmp_path: Path) -> None:
    log = lines(10, 20) + validation_line(20, 4.5) + lines(30, loss=4.0, milliseconds=200.0)
    run = read(tmp_path, log + "  seq_length ..................................... 32\n")

    assert (steps(run), run.losses) == ([10, 20, 30], [5.0, 5.0, 4.0])
    assert run.validations == {"": {20: 4.5}}
    assert run.x("steps") == [10, 20, 30]
    assert run.x("tokens") == [10 * 4 * 32, 20 * 4 * 32, 30 * 4 * 32]
    assert run.x("time") == pytest.approx([1.0, 2.0, 4.0])
    assert run.x_of_step(run.x("tokens"), 25) == 25 * 4 * 32


def test_a_line_of_upstreams_with_all_it_can_print(tmp_path: Path) -> None:
    line = (
        "[default7]: [2024-02-03 04:05:06] iteration      200/  500000 | consumed samples:"
        "        51200 | skipped samples:            0 | elapsed time per iteration (ms): 1234.5 |"
        " throughput per GPU (TFLOP/s/GPU): 401.2 | learning rate: 1.500000E-04 | global batch "
        "size:   256 | lm loss: 3.210000E+00 | mtp_1 loss: 4.000000E+00 | loss scale: 65536.0 | "
        "grad norm: 0.612 | num zeros: 7 | params norm: 100.125 | number of skipped iterations:   "
        "0 | number of nan iterations:   0 |\n"
    )
    (point,) = read(tmp_path, line).points
    assert (point.step, point.loss, point.samples) == (200, 3.21, 51200)
    assert point.seconds == pytest.approx(200 * 1.2345)


def test_other_ranks_output_between_and_within_lines(tmp_path: Path) -> None:
    whole = iteration_line(20, 100, 4.0, 100.0)
    torn = iteration_line(30, 100, 3.0, 100.0)
    log = (
        "[rank0]:" + lines(10)
        # Two messages, then both of their line ends.
        + "[Rank 1] (after 2 iterations) memory (MB) | allocated: 9.9" + whole + "\n"
        + torn[:90] + "[Rank 2] (after 3 iterations) memory (MB)\n" + torn[90:]
        + "7: " + lines(40)
    )  # fmt: skip
    run = read(tmp_path, log)
    assert steps(run) == [10, 20, 40]
    assert run.losses == [5.0, 4.0, 5.0]
    assert run.incomplete == 1


def test_a_last_line_that_is_cut_off_anywhere_is_left_out(tmp_path: Path) -> None:
    """A loss that is cut off is not a smaller one, and a line without its end not a NaN."""
    last = iteration_line(20, 100, 1234.5, 100.0)
    begun = last.index("/") + len("/     100 |")
    for end in range(1, len(last) - 2):
        run = read(tmp_path, lines(10) + last[:end])
        assert steps(run) == [10]
        assert run.incomplete == (end >= begun)
    assert steps(read(tmp_path, lines(10) + last.removesuffix("\n"))) == [10, 20]


def test_losses_that_are_no_numbers_leave_gaps(tmp_path: Path) -> None:
    log = lines(10) + lines(20, loss=math.nan) + lines(30)
    log += lines(40).replace("lm loss: 5.000000E+00", "lm loss: INF")
    run = read(tmp_path, log)
    assert steps(run) == [10, 20, 30, 40]
    assert [math.isnan(loss) for loss in run.losses] == [False, True, False, False]
    assert run.losses[3] == math.inf
    assert run.nan_points == 1


@pytest.mark.parametrize("marker", ["", BEGINS])
def test_a_resumed_run_repeats_iterations(tmp_path: Path, marker: str) -> None:
    crashed = lines(10, 20, 30, loss=9.0) + validation_line(30, 8.5)
    resumed = lines(30, 40, loss=3.0) + validation_line(40, 2.5)
    run = read(tmp_path, marker + crashed + "Traceback …\n" + marker + resumed)
    assert steps(run) == [10, 20, 30, 40]
    assert run.losses == [9.0, 9.0, 3.0, 3.0]
    assert run.validations == {"": {40: 2.5}}
    assert run.x("time") == pytest.approx([1.0, 2.0, 3.0, 4.0])


def test_the_first_iterations_share_of_the_second_mean_is_taken_out(tmp_path: Path) -> None:
    """Megatron 0.19 logs a process's first iteration beside every tenth."""

    def process(first: int, second: int) -> str:
        covered = second - first
        mean = (9.0 + covered * 7.0) / (covered + 1)
        time = (5000.0 + covered * 100.0) / (covered + 1)
        return (
            BEGINS
            + lines(first, loss=9.0, milliseconds=5000.0)
            + lines(second, loss=mean, milliseconds=time)
            + lines(second + 10, loss=6.0)
        )

    run = read(tmp_path, process(1, 10) + process(21, 30))

    assert steps(run) == [1, 10, 20, 21, 30, 40]
    assert run.losses == pytest.approx([9.0, 7.0, 6.0] * 2, abs=1e-5)
    durations = [5.0, 0.9, 1.0] * 2
    assert [point.seconds for point in run.points] == pytest.approx(durations, abs=2e-3)


def test_lines_for_every_iteration_stay_as_they_are_printed(tmp_path: Path) -> None:
    """Older releases begin their means anew after the first one, and nothing tells which it is."""
    run = read(tmp_path, "".join(training_lines([9.0, 7.0, 6.0], [300.0, 100.0, 100.0], 5.0)))
    assert run.losses == pytest.approx([9.0, 8.0, 6.0], abs=1e-5)


def test_a_log_of_two_lines_and_of_one(tmp_path: Path) -> None:
    assert read(tmp_path, lines(100)).x("time") == pytest.approx([10.0])
    assert read(tmp_path, lines(100, 200)).x("time") == pytest.approx([10.0, 20.0])
    first = lines(1, loss=9.0, milliseconds=1000.0) + lines(10, loss=7.2, milliseconds=190.0)
    assert read(tmp_path, first).losses == pytest.approx([9.0, 7.0], abs=1e-5)


def test_several_validation_sets_and_words_of_older_releases(tmp_path: Path) -> None:
    def line(name: str, place: str, loss: float) -> str:
        return f" validation{name} loss at {place} | lm loss value: {loss:.6E} | lm loss PPL: 1 |\n"

    run = read(
        tmp_path,
        lines(10)
        + line("-wiki", "iteration 10", 4.0)
        + line("-code", "iteration 10", 3.0)
        + lines(20)
        + line("", "the end of training for val data", 2.5)
        + line("", "the end of training for test data", 2.25)
        + line("", "iteration 20 on test set", 2.125),
    )
    assert run.validations == {"wiki": {10: 4.0}, "code": {10: 3.0}, "": {20: 2.5}}


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("nothing of the kind\n", "has no training loss: no complete line 'iteration N/ TOTAL"),
        (validation_line(10, 4.0), "has no training loss"),
        (iteration_line(10, 100, 5.0, 1.0)[:80], "has no training loss"),
        (
            iteration_line(10, 100, math.nan, 1.0) + iteration_line(20, 100, math.nan, 1.0),
            "none of its 2 iterations has an 'lm loss' that is a number",
        ),
    ],
)
def test_a_file_without_a_loss_is_refused(tmp_path: Path, text: str, reason: str) -> None:
    with pytest.raises(ValueError, match=f"run.log: {reason}"):
        read(tmp_path, text)


def test_bytes_that_are_no_text_do_no_harm(tmp_path: Path) -> None:
    (tmp_path / "run.log").write_bytes(b"\xff\xfe\x00\n" + lines(10).encode())
    assert steps(read_log(tmp_path / "run.log", "run")) == [10]
