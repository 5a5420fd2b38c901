"""A command line that lacks something is refused by the flag that it lacks."""

from __future__ import annotations

from pathlib import Path

from tests.support.distributed import run_ranks
from tests.support.runs import DATA, MODEL, TRAINING
from tests.unit.test_arguments import COLA, answers

TOKENIZER = [word for word in DATA if word != "--mock-data"]


def test_what_is_missing_is_named(tmp_path: Path) -> None:
    whole = [*MODEL, *DATA, *TRAINING, *COLA.split()]
    lines = {
        "--data-path: is missing": [*MODEL, *TOKENIZER, *TRAINING, *COLA.split()],
        f"--save {tmp_path}: needs --save-interval": [*whole, "--save", str(tmp_path)],
        "--load nowhere: no such folder": [*whole, "--load", "nowhere", "--use-checkpoint-args"],
    }
    (found,) = run_ranks(
        answers, 1, [(1, line) for line in lines.values()], init_process_group=False
    )
    for beginning, (answer, seconds) in zip(lines, found, strict=True):
        assert answer.startswith(beginning), answer
        assert seconds < 2


def test_a_tokenizer_is_asked_for_before_it_is_looked_for_in_a_network(tmp_path: Path) -> None:
    sized = [*MODEL, *TRAINING, *COLA.split(), "--mock-data"]
    hub = ["--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model"]
    (tmp_path / "tok").mkdir()
    moved = str(tmp_path / "tik")
    lines = {
        "--tokenizer-type: is missing; nearest legal value: --tokenizer-type": sized,
        f"--tokenizer-model {moved}: there is no such folder; the nearest is {tmp_path / 'tok'}": [
            *sized,
            *hub,
            moved,
        ],
        "--tokenizer-model ./tik: there is no such folder": [*sized, *hub, "./tik"],
    }
    (found,) = run_ranks(
        answers, 1, [(1, line) for line in lines.values()], init_process_group=False
    )
    for beginning, (answer, seconds) in zip(lines, found, strict=True):
        assert answer.startswith(beginning), answer
        assert seconds < 2
