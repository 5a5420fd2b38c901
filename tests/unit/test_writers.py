"""What is said and refused of TensorBoard, W&B and the statistics of latents, before a run."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any
from unittest import mock

from tests.support.distributed import run_ranks
from tests.support.runs import DATA, MODEL, TRAINING
from tests.support.writers import recorded_writers
from tests.unit.test_arguments import ACCEPTED, COLA, DENSE, answers

LATENTS = "--low-rank-log-latents-interval"
BOARD = "--tensorboard-dir board"


def answered(lines: list[str], wandb: bool) -> list[str]:
    """On a rank: the answers to command lines, with W&B's package installed or not."""
    given: list[Any] = [(1, [*MODEL, *DATA, *TRAINING, *line.split()]) for line in lines]
    with (
        recorded_writers(),
        mock.patch("megatron.boost.writers._installed", lambda package: wandb),
    ):
        return [answer for answer, _ in answers(given)]


def ask(lines: list[str], wandb: bool = True) -> list[str]:
    (found,) = run_ranks(answered, 1, lines, wandb, init_process_group=False)
    return found


def test_what_writers_and_statistics_of_latents_need(tmp_path: Path) -> None:
    wandb = f"--wandb-project p --wandb-exp-name e --wandb-save-dir {tmp_path}"
    cases = {
        f"{COLA} {LATENTS} -1 {BOARD}": f"{LATENTS} -1: is a number of steps, .* value: 0$",
        f"{COLA} {LATENTS} x {BOARD}": f"{LATENTS}: invalid int value: 'x'",
        f"{LATENTS} 5 {BOARD}": f"{LATENTS} 5: --low-rank-arch none has no latents; .*: 0$",
        f"{DENSE} {LATENTS} 5 {BOARD}": f"{LATENTS} 5: --low-rank-arch dense has no latents; ",
        f"{COLA} {LATENTS} 5": f"{LATENTS} 5: needs --tensorboard-dir or --wandb-project .*: 0$",
        f"{COLA} {LATENTS} 0": ACCEPTED,
        f"{COLA} {LATENTS} 5 {BOARD}": ACCEPTED,
        f"{COLA} {LATENTS} 5 {wandb}": ACCEPTED,
        f"--wandb-project p --wandb-save-dir {tmp_path}": "p: needs --wandb-exp-name",
        "--wandb-project p --wandb-exp-name e": "p: needs --wandb-save-dir, or --save,",
        f"--wandb-project p --wandb-exp-name e --save {tmp_path} --save-interval 5": ACCEPTED,
    }
    for answer, expected in zip(ask(list(cases)), cases.values(), strict=True):
        assert_matches(answer, expected)


def test_a_run_without_the_package_of_w_and_b_is_refused(tmp_path: Path) -> None:
    wandb = f"--wandb-project p --wandb-exp-name e --wandb-save-dir {tmp_path}"
    needs = "--wandb-project p: needs the package wandb, which is not installed"
    refused, accepted = ask([f"{wandb} {BOARD}", f"{COLA} {LATENTS} 5 {BOARD}"], wandb=False)
    assert_matches(refused, needs)
    assert_matches(accepted, ACCEPTED)


def assert_matches(answer: str, expected: str) -> None:
    assert re.search(expected, answer), (expected, answer)
