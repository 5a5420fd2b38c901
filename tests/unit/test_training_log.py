"""Reading Megatron's log lines."""

import math

import pytest

from megatron.boost.training_log import TrainingLog, parse_iteration, parse_validation
from tests.support.training_output import iteration_line, training_lines, validation_line


def test_an_iteration_line_gives_its_numbers():
    line = (
        " [2025-11-30 07:30:00.123456] iteration      120/     250 | consumed samples:"
        "          480 | elapsed time per iteration (ms): 1312.7 | throughput per GPU"
        " (TFLOP/s/GPU): 0.1 | learning rate: 1.000000E-03 | global batch size:     4 |"
        " lm loss: 6.543210E+00 | loss scale: 1.0 | grad norm: 0.612 | number of skipped"
        " iterations:   0 | number of nan iterations:   0 |"
    )

    iteration = parse_iteration(line)

    assert iteration is not None
    assert (iteration.number, iteration.total) == (120, 250)
    assert iteration.loss == 6.54321
    assert iteration.milliseconds == 1312.7


def test_a_nan_loss_which_megatron_leaves_out_is_a_nan():
    iteration = parse_iteration(iteration_line(3, 10, float("nan"), 5.0))

    assert iteration is not None
    assert math.isnan(iteration.loss)


def test_a_validation_line_gives_its_place_and_loss():
    validation = parse_validation(validation_line(250, 4.125))

    assert validation is not None
    assert validation.place == "iteration 250 on validation set"
    assert validation.loss == 4.125


@pytest.mark.parametrize(
    "line", ["", "-" * 40, "[Rank 0] (after 1 iterations) memory (MB)", "iteration"]
)
def test_other_lines_are_nothing(line):
    assert parse_iteration(line) is None
    assert parse_validation(line) is None


def test_the_second_line_loses_its_share_of_the_first():
    losses = [9.0, 7.0, 6.0, 5.5]
    milliseconds = [900.0, 100.0, 110.0, 120.0]
    lines = training_lines(losses, milliseconds, 5.0)
    assert "lm loss: 8.000000E+00" in lines[2]  # the mean of 9 and 7, as Megatron prints it
    log = TrainingLog()

    fed = [log.feed(line) for line in lines]

    assert [iteration.loss for iteration in log.iterations] == pytest.approx(losses, abs=1e-5)
    times = [iteration.milliseconds for iteration in log.iterations]
    assert times == pytest.approx(milliseconds, abs=0.2)
    assert [iteration for iteration in fed if iteration] == log.iterations
    assert [validation.loss for validation in log.validations] == [5.0]


def test_with_a_log_interval_the_second_line_covers_the_first_iteration_too():
    log = TrainingLog()
    log.feed(iteration_line(1, 20, 9.0, 1000.0))

    log.feed(iteration_line(10, 20, (9.0 + 9 * 7.0) / 10, (1000.0 + 9 * 100.0) / 10))

    assert log.iterations[1].loss == pytest.approx(7.0, abs=1e-5)
    assert log.iterations[1].milliseconds == pytest.approx(100.0, abs=0.2)
