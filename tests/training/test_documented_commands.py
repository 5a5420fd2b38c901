"""The recipes of the documentation run, command by command, on models made here."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.convert.test_cola_import import PLAIN, save_cola
from tests.support.documents import assert_written, cut, recipes, run_commands
from tests.support.hf_models import Variant, save_llama
from tests.support.small_tokenizer import TEXT, save_small_tokenizer

RECIPES = recipes("docs/checkpoints.md")
# The tiny model of the tests has no 2048 positions, and there is no time for 1000 iterations.
CUT = {
    "--seq-length 2048": "--seq-length 32",
    "--train-iters 1000": "--train-iters 4",
    "--global-batch-size 64": "--global-batch-size 4",
    "--lr-warmup-iters 50": "--lr-warmup-iters 1",
    "--eval-interval 200 --eval-iters 10": "--eval-interval 4 --eval-iters 1",
    "--low-rank-act-anneal 500": "--low-rank-act-anneal 3",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the page takes for granted: the checkout, a LLaMA with a tokenizer, a CoLA, text."""
    here = tmp_path_factory.mktemp("recipes")
    tokenizer = save_small_tokenizer(here / "llama")
    sizes = {"vocab_size": len(tokenizer), "eos_token_id": tokenizer.eos_token_id}
    save_llama(here / "llama", Variant({"num_key_value_heads": 2, **sizes}))
    save_cola(here / "cola", PLAIN, "ColaForCausalLM")
    for name in ("sample.txt", "held-out.txt"):
        (here / name).write_text(TEXT * 20)
    (here / "my-text.jsonl").write_text(f"{json.dumps({'text': TEXT})}\n" * 40)
    return here


def test_the_page_has_recipes_and_the_test_cuts_what_stands_there() -> None:
    assert len(RECIPES) == 4
    assert_written(CUT, RECIPES.values())


@pytest.mark.program
@pytest.mark.parametrize("recipe", RECIPES)
def test_a_recipe_runs_as_it_stands_on_the_page(recipe: str, folder: Path) -> None:
    run_commands(cut(RECIPES[recipe], CUT), folder)
