"""What is evaluated: documents of a data set and of text files, and their boundaries."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import PreTrainedTokenizerFast

from megatron.boost.evaluation.tokens import (
    IndexedTokens,
    Segment,
    TokensInMemory,
    refuse_foreign_tokens,
    segments,
    text_bytes,
    tokens_of_text,
)
from tests.support.small_tokenizer import save_small_tokenizer

DOCUMENTS = [[1, 2, 3, 4], [5], [6, 7, 8]]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> PreTrainedTokenizerFast:
    return save_small_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="module")
def begun(tmp_path_factory: pytest.TempPathFactory) -> PreTrainedTokenizerFast:
    return save_small_tokenizer(tmp_path_factory.mktemp("begun"), begins_with="<s>")


def indexed(prefix: Path, documents: list[list[list[int]]]) -> str:
    """A Megatron data set; a document is a list of sequences."""
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=np.uint16)
    for sequences in documents:
        for ids in sequences:
            builder.add_item(torch.tensor(ids))
        builder.end_document()
    builder.finalize(f"{prefix}.idx")
    return str(prefix)


def test_a_data_set_is_one_stream_of_its_documents(tmp_path: Path) -> None:
    prefix = indexed(tmp_path / "data", [[[1, 2], [3, 4]], [[5]], [[6, 7, 8]]])
    stream, whole = IndexedTokens(prefix), TokensInMemory([np.array(d) for d in DOCUMENTS])

    assert stream.boundaries.tolist() == whole.boundaries.tolist() == [0, 4, 5, 8]
    for start in range(9):
        for stop in range(start, 9):
            found = stream.read(start, stop)
            assert found.dtype == np.int64
            assert found.tolist() == whole.read(start, stop).tolist()


def test_boundaries_of_documents() -> None:
    stream = TokensInMemory([np.array(document) for document in DOCUMENTS])

    assert segments(stream, "joined", None, None) == [Segment(0, 8, None)]
    assert segments(stream, "joined", 9, None) == [Segment(0, 8, 9)]
    # A document that has its begin already is given none.
    assert segments(stream, "separate", 9, 5) == [
        Segment(0, 4, 9),
        Segment(4, 5, None),
        Segment(5, 8, 9),
    ]


def test_tokens_that_the_model_lacks_are_named() -> None:
    stream = TokensInMemory([np.array(document) for document in DOCUMENTS])
    refuse_foreign_tokens(stream, 9, "--data x")
    with pytest.raises(ValueError, match="--data x: has token 8, and the model's are 0 to 7; near"):
        refuse_foreign_tokens(stream, 8, "--data x")
    with pytest.raises(ValueError, match="has token -1"):
        refuse_foreign_tokens(TokensInMemory([np.array([3, -1])]), 8, "--data x")


@pytest.mark.parametrize("text", ["the quick fox", "añ — 名字\r\n\n  the\tend \n"])
def test_bytes_are_those_of_the_text(
    tmp_path: Path,
    tokenizer: PreTrainedTokenizerFast,
    begun: PreTrainedTokenizerFast,
    text: str,
) -> None:
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbf" + text.encode())
    for one, documents in ((tokenizer, 1), (begun, 1)):
        stream, sizes = tokens_of_text([tmp_path / "a.txt"] * documents, one)
        assert sizes == [len(text.encode())]
        # Joined or apart, with EOS behind or BOS before, decoded they are the same.
        parts = segments(stream, "separate", one.eos_token_id, one.bos_token_id)
        assert text_bytes(stream, parts, one) == len(text.encode())
        shares = [text_bytes(stream, parts, one, rank, 3) for rank in range(3)]
        assert sum(shares) == len(text.encode())


def test_only_of_a_file_are_the_bytes_of_a_special_tokens_spelling_known(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    spelling = tokenizer.eos_token
    (tmp_path / "a.txt").write_text(f"the fox{spelling}the dog")
    stream, sizes = tokens_of_text([tmp_path / "a.txt"], tokenizer)
    assert stream.read(0, int(stream.boundaries[-1])).tolist().count(tokenizer.eos_token_id) == 1
    assert sizes == [14 + len(spelling)]
    parts = segments(stream, "separate", tokenizer.eos_token_id, None)
    assert text_bytes(stream, parts, tokenizer) == 14


def test_a_first_token_that_nothing_predicts_has_no_bytes(
    tokenizer: PreTrainedTokenizerFast,
) -> None:
    ids = np.array(tokenizer("the quick fox")["input_ids"])
    stream = TokensInMemory([ids])
    missing = len(tokenizer.decode([ids[0]]))
    assert text_bytes(stream, [Segment(0, len(ids), None)], tokenizer) == 13 - missing


@pytest.mark.parametrize(
    ("content", "refusal"),
    [
        (None, "--text .*a.txt: no such file"),
        (b"", "--text .*a.txt: the file is empty"),
        (b"abc\xff", "--text .*a.txt: invalid UTF-8 at byte 4"),
    ],
)
def test_text_that_cannot_be_read_is_refused(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast, content: bytes | None, refusal: str
) -> None:
    file = tmp_path / "a.txt"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(ValueError, match=refusal):
        tokens_of_text([file], tokenizer)
    with pytest.raises(ValueError, match=f"--text {tmp_path}: is a folder, and a file is wanted$"):
        tokens_of_text([tmp_path], tokenizer)


def test_data_that_is_not_there_or_damaged_is_refused(tmp_path: Path) -> None:
    prefix = indexed(tmp_path / "data_text_document", [[[1, 2]]])
    with pytest.raises(ValueError, match=f"--data {prefix}.bin: is one of two files; .* {prefix}$"):
        IndexedTokens(f"{prefix}.bin")
    with pytest.raises(ValueError, match=f"there is no .*; the nearest is {prefix}$"):
        IndexedTokens(str(tmp_path / "data_text_documen"))
    Path(f"{prefix}.bin").rename(tmp_path / "away.bin")
    with pytest.raises(ValueError, match=f"--data {prefix}: there is no {prefix}.bin$"):
        IndexedTokens(prefix)
    (tmp_path / "away.bin").rename(f"{prefix}.bin")
    Path(f"{prefix}.idx").write_bytes(b"MMIDIDX")
    with pytest.raises(ValueError, match=f"--data {prefix}: cannot be read"):
        IndexedTokens(prefix)


def test_the_validation_part_is_the_one_that_training_takes(tmp_path: Path) -> None:
    from megatron.core.datasets.blended_megatron_dataset_builder import (
        BlendedMegatronDatasetBuilder,
    )
    from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
    from megatron.core.tokenizers import MegatronTokenizer

    # Each document is its number, as often as that.
    prefix = indexed(tmp_path / "data", [[[number] * number] for number in range(1, 40)])
    null = MegatronTokenizer.from_pretrained(metadata_path={"library": "null-text"}, vocab_size=100)
    for split in ("90,10,0", "60,25,15", "98,2,0"):
        config = GPTDatasetConfig(
            random_seed=1,
            sequence_length=4,
            blend=([prefix], None),
            split=split,
            tokenizer=null,
            reset_position_ids=False,
            reset_attention_mask=False,
            eod_mask_loss=False,
            path_to_cache=str(tmp_path / "cache"),
            mid_level_dataset_surplus=0.005,
        )
        sizes = [None, None, None]
        built = BlendedMegatronDatasetBuilder(GPTDataset, sizes, lambda: True, config).build()
        theirs = built[1].indices + 1
        stream = IndexedTokens(prefix, split)
        starts = stream.boundaries[:-1].tolist()
        ours = [int(stream.read(start, start + 1)[0]) for start in starts]
        assert ours == theirs.tolist()
        assert np.diff(stream.boundaries).tolist() == ours
    with pytest.raises(ValueError, match="--split 100,0,0: leaves no document of 39 for validat"):
        IndexedTokens(prefix, "100,0,0")
    with pytest.raises(ValueError, match="--split all: is no list of shares"):
        IndexedTokens(prefix, "all")
