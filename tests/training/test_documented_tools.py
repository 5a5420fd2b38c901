"""The commands of README.md, docs/preprocessing.md and docs/evaluation.md, in their order, on a
model and a text made here. What is cut is the model's size and the length of its training."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import zstandard

from tests.support.documents import assert_written, blocks, cut, run_commands
from tests.support.hf_models import Variant, save_llama
from tests.support.small_tokenizer import TEXT, save_small_tokenizer

pytestmark = pytest.mark.program

README_CUTS = {
    ".venv/bin/": "",
    "/path/to/tokenizer": "llama",
    "/path/to/llama": "llama",
    "--workers 8": "--workers 2",
    "--num-layers 8 --hidden-size 512 --ffn-hidden-size 1376 --num-attention-heads 8": (
        "--num-layers 2 --hidden-size 64 --ffn-hidden-size 176 --num-attention-heads 4"
    ),
    "--seq-length 256 --max-position-embeddings 256": (
        "--seq-length 32 --max-position-embeddings 32"
    ),
    "--micro-batch-size 8 --global-batch-size 32 --train-iters 1000": (
        "--micro-batch-size 2 --global-batch-size 4 --train-iters 4"
    ),
    "--lr-warmup-iters 100": "--lr-warmup-iters 1",
    "--split 98,2,0 --eval-interval 200 --eval-iters 10": (
        "--split 90,10,0 --eval-interval 4 --eval-iters 1"
    ),
    "--save-interval 500": "--save-interval 4",
    "--seq-length 1024 --micro-batch-size 4 --global-batch-size 64": (
        "--seq-length 32 --micro-batch-size 2 --global-batch-size 4"
    ),
    "--train-iters 500": "--train-iters 4",
    "--split 98,2,0 --eval-interval 100": "--split 90,10,0 --eval-interval 4",
    "    --eval-iters 10 --save": "    --eval-iters 1 --save",
    "--prompt": "--max-new-tokens 8 --prompt",
}
EVALUATION_CUTS = {
    "--split 98,2,0": "--split 90,10,0",
    "--seq-length 1024 --stride 512": "--seq-length 32 --stride 16",
    "--max-new-tokens 500": "--max-new-tokens 8",
    "--prompt": "--max-new-tokens 8 --prompt",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    here = tmp_path_factory.mktemp("documented")
    tokenizer = save_small_tokenizer(here / "llama")
    sizes = {"vocab_size": len(tokenizer), "eos_token_id": tokenizer.eos_token_id}
    save_llama(here / "llama", Variant({"num_key_value_heads": 2, **sizes}))
    for name in ("sample.txt", "held-out.txt", "book.txt"):
        (here / name).write_text(TEXT * 20)
    (here / "prompt.txt").write_text("def main(")
    (here / "my-text.jsonl").write_text(f"{json.dumps({'text': TEXT})}\n" * 40)
    return here


README = blocks("README.md")
EVALUATION = blocks("docs/evaluation.md")


def test_the_pages_have_what_is_run_and_cut() -> None:
    assert README[0].split()[:2] == ["make", "demo"]
    assert len(README) == 6
    assert len(EVALUATION) == 3
    assert_written(README_CUTS, README)
    assert_written(EVALUATION_CUTS, EVALUATION)


# Each takes what those before it have made. Of the recipes the dry one; the others start on a
# cluster, and their dry runs are tests of their own. lm-eval's task comes from the network, and a
# test of its own has another one.
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "commands",
    [
        pytest.param(cut(README[1], README_CUTS), id="readme-preprocess"),
        pytest.param(cut(README[2], README_CUTS), id="readme-train"),
        pytest.param(README[3].splitlines()[0], id="readme-recipe"),
        pytest.param(cut(README[4], README_CUTS), id="readme-hugging-face"),
        pytest.param(cut(README[5], README_CUTS), id="readme-plan"),
        pytest.param(cut(EVALUATION[0], EVALUATION_CUTS), id="evaluate"),
        pytest.param(cut(EVALUATION[1], EVALUATION_CUTS), id="generate"),
    ],
)
def test_the_commands_run_as_they_stand_on_the_page(commands: str, folder: Path) -> None:
    run_commands(commands, folder)


def test_the_page_on_preprocessing(folder: Path) -> None:
    (commands,) = blocks("docs/preprocessing.md")
    corpus = folder / "corpus"
    corpus.mkdir()
    (corpus / "a.txt").write_text(TEXT)
    lines = (folder / "my-text.jsonl").read_bytes()
    (folder / "more.jsonl.zst").write_bytes(zstandard.ZstdCompressor().compress(lines))
    (folder / "tokenizer").symlink_to(folder / "llama")
    run_commands(commands.replace("--workers 8", "--workers 2"), folder)
    assert json.loads((folder / "summary.json").read_text())
    assert (folder / "data" / "corpus_text_document.bin").stat().st_size > 0
