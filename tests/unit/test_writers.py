"""What is said and refused of TensorBoard, W&B and the statistics of latents, before a run."""

from __future__ import annotations

import contextlib
import io
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
NOT_INSTALLED = (
    r"--tensorboard-dir board: .*needs the package tensorboard, which is not installed "
    r"\(pip install 'boost-lowrank\[tensorboard\]'\)"
)


def answered(lines: list[str], packages: tuple[str, ...]) -> tuple[list[str], str]:
    """On a rank: the answers to command lines where of the two packages only some are installed,
    and what was printed."""
    given: list[Any] = [(1, [*MODEL, *DATA, *TRAINING, *line.split()]) for line in lines]
    output = io.StringIO()
    with (
        recorded_writers(),
        mock.patch("megatron.boost.writers._installed", lambda package: package in packages),
        contextlib.redirect_stdout(output),
    ):
        found = [answer for answer, _ in answers(given)]
    return found, output.getvalue()


def ask(lines: list[str], *packages: str) -> tuple[list[str], str]:
    ((found, printed),) = run_ranks(answered, 1, lines, packages, init_process_group=False)
    return found, printed


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
    found, printed = ask(list(cases), "tensorboard", "wandb")
    for answer, expected in zip(found, cases.values(), strict=True):
        assert_matches(answer, expected)
    assert "not installed" not in printed


def test_a_run_without_the_package_of_its_writer_is_told(tmp_path: Path) -> None:
    wandb = f"--wandb-project p --wandb-exp-name e --wandb-save-dir {tmp_path}"
    cases = {
        f"{COLA} {LATENTS} 5 {BOARD}": f"^{NOT_INSTALLED}$",
        wandb: "--wandb-project p: needs the package wandb, which is not installed",
        # Megatron's own runs go on without it, and so do ours.
        f"{COLA} {BOARD}": ACCEPTED,
        BOARD: ACCEPTED,
    }
    found, printed = ask(list(cases))
    for answer, expected in zip(found, cases.values(), strict=True):
        assert_matches(answer, expected)
    said = [line for line in printed.splitlines() if line.startswith("> --tensorboard-dir")]
    assert len(said) == 2
    for line in said:
        assert_matches(line, f"^> {NOT_INSTALLED.replace('.*', 'nothing is written there; it ')}$")


def assert_matches(answer: str, expected: str) -> None:
    assert re.search(expected, answer), (expected, answer)
