"""A model whose vocabulary is not as large as its tokenizer: the checkpoint's size is kept."""

from __future__ import annotations

import json
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from megatron.boost.conversion.exporting import plan_export, write_export
from megatron.boost.conversion.importing import exact_plan, open_source, write_import
from megatron.boost.stored_run import TRUE_VOCABULARY, StoredRun
from megatron.boost.vocabulary import keep_vocabulary, padding_flags, require_tokenizer
from tests.support.distributed import run_ranks
from tests.support.hf_models import Variant, save_llama
from tests.support.runs import losses, relative_difference, train_in_turn
from tests.support.small_tokenizer import save_small_tokenizer

ROWS = 500
RUN = "--use-checkpoint-args --seq-length 32 --train-iters 1 --save-interval 1 --lr 0 --min-lr 0"


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """By layers, "none" and "dense": the loss and the checkpoint of a model of 500 rows that ran at
    TP 2 with a tokenizer of 280 tokens; under "source" its weights."""
    root = tmp_path_factory.mktemp("vocabulary")
    save_llama(root / "hf", Variant({"vocab_size": ROWS, "pad_token_id": 7}))
    save_small_tokenizer(root / "hf")
    found: dict[str, Any] = {"source": load_file(root / "hf" / "model.safetensors")}
    # Megatron's own loss counts rows of padding, so that its layers have none here.
    padding = {"none": ROWS // 2, "dense": 48}
    lines = []
    for arch, multiple in padding.items():
        write_import(exact_plan(open_source(root / "hf"), arch), root / arch)
        lines.append(
            f"{RUN} --load {root / arch} --save {root / arch}-trained "
            f"--tensor-model-parallel-size 2 --make-vocab-size-divisible-by {multiple} "
            f"--tokenizer-type HuggingFaceTokenizer --tokenizer-model {root / 'hf'}"
        )
    by_rank = run_ranks(train_in_turn, 2, lines, model=(), init_process_group=False)
    for number, arch in enumerate(padding):
        loss = losses([results[number] for results in by_rank])
        found[arch] = {"loss": loss, "checkpoint": root / f"{arch}-trained"}
    return found


@pytest.mark.slow
@pytest.mark.parametrize("arch", ["none", "dense"])
def test_all_rows_are_loaded_kept_and_exported(
    arch: str, runs: dict[str, Any], tmp_path: Path
) -> None:
    export = plan_export(runs[arch]["checkpoint"])
    assert getattr(export.reader.arguments, TRUE_VOCABULARY) == ROWS
    assert export.reader.padded_vocab_size == {"none": ROWS, "dense": 576}[arch]
    write_export(export, tmp_path / "hf", max_shard_size=10**9)
    weights = load_file(tmp_path / "hf" / "model.safetensors")
    assert weights.keys() == runs["source"].keys()
    for name, tensor in runs["source"].items():
        assert torch.equal(weights[name], tensor), name
    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    named = ("bos_token_id", "eos_token_id", "pad_token_id", "initializer_range")
    assert [config[name] for name in named] == [1, 2, 7, 0.2]


@pytest.mark.slow
def test_the_mask_leaves_the_models_own_rows_alone(runs: dict[str, Any]) -> None:
    """Ours masks 76 rows of padding, Megatron's own layers have none: one loss."""
    assert relative_difference(runs["dense"]["loss"], runs["none"]["loss"]) <= 2e-6


def run_of(rows: int = ROWS, **more: Any) -> StoredRun:
    return StoredRun("--load CK", Namespace(**{TRUE_VOCABULARY: rows}, **more), None)


def this_run(**more: Any) -> Namespace:
    settings = {
        "use_checkpoint_args": True,
        "use_mp_args_from_checkpoint_args": False,
        "make_vocab_size_divisible_by": 128,
        "tensor_model_parallel_size": 2,
        "tokenizer_type": "HuggingFaceTokenizer",
        "tokenizer_model": "TOK",
        "vocab_file": None,
        "vocab_size": None,
        "padded_vocab_size": None,
        "load": "CK",
    }
    return Namespace(**settings | more)


def test_the_padded_vocabulary_holds_the_models() -> None:
    stored = run_of().arguments
    assert padding_flags([], this_run(), stored) == ["--padded-vocab-size", "512"]
    assert padding_flags([], this_run(), Namespace()) == []
    # As it was saved, where that fits this layout.
    assert padding_flags([], this_run(), run_of(padded_vocab_size=502).arguments) == []
    odd = run_of(padded_vocab_size=501).arguments
    assert padding_flags([], this_run(), odd) == ["--padded-vocab-size", "512"]
    given = ["--padded-vocab-size", "384"]
    with pytest.raises(ValueError, match="--padded-vocab-size 384: .* 500 tokens; .* 512"):
        padding_flags(given, this_run(padded_vocab_size=384), stored)


def test_a_tokenizer_that_contradicts_the_model_is_refused() -> None:
    arguments = this_run()
    (line,) = keep_vocabulary(run_of(), arguments, 281)
    assert "500 tokens, of which the tokenizer has 281" in line
    assert getattr(arguments, TRUE_VOCABULARY) == ROWS
    with pytest.raises(ValueError, match="--tokenizer-model TOK: has 281 .* --load CK has 280"):
        keep_vocabulary(run_of(280), this_run(), 281)
    with pytest.raises(ValueError, match=r"has 281 .* 500; .* --use-checkpoint-args"):
        keep_vocabulary(run_of(), this_run(use_checkpoint_args=False), 281)
    assert keep_vocabulary(run_of(281), this_run(use_checkpoint_args=False), 281) == []


def test_a_run_without_a_tokenizer_is_told_the_flags(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="--tokenizer-type: is missing.* --tokenizer-model"):
        require_tokenizer(this_run(tokenizer_type=None, tokenizer_model=None))
    (tmp_path / "tokenizer").mkdir()
    gone = this_run(tokenizer_model=str(tmp_path / "gone"), load=str(tmp_path))
    with pytest.raises(ValueError, match=f"gone: .* legal value: {tmp_path / 'tokenizer'}"):
        require_tokenizer(gone)
    require_tokenizer(this_run(tokenizer_model=str(tmp_path)))
