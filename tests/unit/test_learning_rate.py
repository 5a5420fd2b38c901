"""A course of learning rate or weight decay that Megatron's scheduler does not take is refused
before anything is built. The small model trains 4 iterations with --lr 1e-2 and --min-lr 1e-3."""

from __future__ import annotations

from tests.unit.test_arguments import ACCEPTED, COLA, Refusal, ask, check

COURSES = [
    Refusal("--lr-warmup-iters 4", "--lr-warmup-iters 4: ", "3", "--lr-warmup-iters 3"),
    Refusal(
        "--lr-warmup-iters 9 --lr-decay-iters 8",
        "--lr-warmup-iters 9: must end before the learning rate's course does, --lr-decay-iters 8",
        "7",
        "--lr-warmup-iters 7 --lr-decay-iters 8",
    ),
    Refusal(
        "--lr-warmup-fraction 1.0",
        "--lr-warmup-fraction 1.0: ",
        "0.99",
        "--lr-warmup-fraction 0.99",
    ),
    Refusal("--lr-decay-iters -3", "--lr-decay-iters -3: ", "1", "--lr-decay-iters 1"),
    Refusal("--min-lr 0.02", "--min-lr 0.02: is above --lr 0.01", "0.01", "--min-lr 0.01"),
    Refusal("--min-lr -0.1", "--min-lr -0.1: ", "0.0", "--min-lr 0.0"),
    Refusal(
        "--lr-warmup-init 0.5",
        "--lr-warmup-init 0.5: is above --lr 0.01",
        "0.01",
        "--lr-warmup-init 0.01",
    ),
    Refusal(
        "--weight-decay-incr-style linear --start-weight-decay 0.2 --end-weight-decay 0.1",
        "--start-weight-decay 0.2: ",
        "0.1",
        "--weight-decay-incr-style linear --start-weight-decay 0.1 --end-weight-decay 0.1",
    ),
]


def test_what_the_scheduler_does_not_take_is_refused_with_the_nearest_it_does() -> None:
    check(COURSES, ask(*((1, f"{COLA} {case.flags}") for case in COURSES)))


def test_what_is_proposed_is_accepted() -> None:
    for case, (answer, _) in zip(
        COURSES, ask(*((1, f"{COLA} {case.legal}") for case in COURSES)), strict=True
    ):
        assert answer == ACCEPTED, case.legal


def test_a_fall_at_the_end_needs_its_length() -> None:
    ((answer, _), (other, _)) = ask(
        (1, f"{COLA} --lr-decay-style WSD"),
        (1, f"{COLA} --lr-decay-style WSD --lr-wsd-decay-iters 2"),
    )
    assert answer.startswith("--lr-decay-style WSD: needs --lr-wsd-decay-iters")
    assert other == ACCEPTED
