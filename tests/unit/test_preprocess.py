"""Text to Megatron's indexed data sets: what Megatron's readers find in them."""

import json
import random
import socket
from pathlib import Path

import numpy as np
import pytest
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
from megatron.core.datasets.indexed_dataset import DType, IndexedDataset, IndexedDatasetBuilder
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from megatron.boost.preprocessing import dataset, encoding, pieces
from megatron.boost.preprocessing.dataset import DataSetWriter, Extent, publish, token_dtype
from megatron.boost.preprocessing.encoding import EncodingSettings, load_tokenizer
from megatron.boost.preprocessing.pipeline import preprocess
from tests.support.preprocessing import (
    TEXTS,
    bytes_of,
    documents_of,
    files_of,
    megatron_bytes,
    megatron_tokenizer,
    write_compressed,
    write_jsonl,
)
from tests.support.small_tokenizer import save_small_tokenizer


@pytest.fixture(scope="module")
def tokenizer_model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    save_small_tokenizer(folder)
    return str(folder)


def test_megatrons_reader_finds_every_document_and_its_text(tmp_path, tokenizer_model):
    source = write_jsonl(tmp_path / "corpus.jsonl", TEXTS)
    settings = EncodingSettings(tokenizer_model, append_eod=True)

    summary = preprocess([source], str(tmp_path / "out" / "corpus"), settings)

    assert files_of(tmp_path / "out") == ["corpus_text_document.bin", "corpus_text_document.idx"]
    tokenizer = megatron_tokenizer(tokenizer_model)
    dataset = IndexedDataset(summary.prefixes["text"])
    assert len(dataset) == len(TEXTS)
    assert dataset.document_indices.tolist() == list(range(len(TEXTS) + 1))
    assert summary.tokens["text"] == sum(dataset.sequence_lengths)
    for ids, text in zip(dataset, TEXTS, strict=True):
        assert ids[-1] == tokenizer.eod
        assert tokenizer.detokenize(ids[:-1].tolist()) == text


@pytest.mark.parametrize("append_eod", [False, True])
@pytest.mark.parametrize("begins_with", [None, "<s>"])
def test_files_are_those_of_megatrons_builder_byte_for_byte(
    tmp_path, monkeypatch, begins_with, append_eod
):
    """Of files of every kind, with lines and text files that are encoded in pieces."""
    save_small_tokenizer(tmp_path / "tokenizer", begins_with=begins_with)
    monkeypatch.setattr(pieces, "PIECE_BYTES", 5_000)
    monkeypatch.setattr(pieces, "CONTEXT_BYTES", 500)
    monkeypatch.setattr(encoding, "PIECE_BYTES", 5_000)
    rng = random.Random(1)
    long = ["".join(rng.choices([*TEXTS[:4], "12", "  \n"], k=4_000)) for _ in range(3)]
    source = tmp_path / "corpus"
    source.mkdir()
    write_jsonl(source / "a.jsonl", [*TEXTS, long[0], *TEXTS])
    write_compressed(source / "b.txt", long[1].encode())
    write_compressed(source / "c.txt.zst", b"\xef\xbb\xbf" + long[2].encode())
    write_compressed(source / "d.txt.gz", TEXTS[2].encode())
    model = str(tmp_path / "tokenizer")

    preprocess([source], str(tmp_path / "x"), EncodingSettings(model, append_eod=append_eod))

    expected = megatron_bytes(
        tmp_path,
        model,
        [*TEXTS, long[0], *TEXTS, long[1], long[2], TEXTS[2]],
        append_eod=append_eod,
    )
    assert bytes_of(tmp_path / "x_text_document") == expected


def test_a_large_vocabulary_is_stored_as_megatron_stores_it(tmp_path):
    words = {f"w{number}": number for number in range(65_500)} | {"?": 65_500}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="?").save_pretrained(
        tmp_path / "tokenizer"
    )
    texts = ["w0 w65499 w3 other", "w5"]
    source = write_jsonl(tmp_path / "corpus.jsonl", texts)

    preprocess([source], str(tmp_path / "x"), EncodingSettings(str(tmp_path / "tokenizer")))

    assert bytes_of(tmp_path / "x_text_document") == megatron_bytes(
        tmp_path, tmp_path / "tokenizer", texts
    )
    assert documents_of(tmp_path / "x_text_document") == [[0, 65_499, 3, 65_500], [5]]


@pytest.mark.parametrize("size", [1, 280, 65_499, 65_500, 65_536, 200_000])
def test_integer_types_are_megatrons(size):
    assert token_dtype(size) == DType.optimal_dtype(size)


@pytest.mark.parametrize("documents", [1, 6, 7, 8, 21])
def test_an_index_written_in_blocks_is_megatrons(tmp_path, monkeypatch, documents):
    monkeypatch.setattr(dataset, "_INDEX_BLOCK", 7)
    rng = np.random.default_rng(1)
    lengths = rng.integers(1, 2_000_000_000, documents).tolist()
    theirs = IndexedDatasetBuilder(str(tmp_path / "theirs.bin"), dtype=np.int32)
    writer = DataSetWriter(tmp_path / "0", np.dtype(np.int32), Extent())
    for length in lengths:
        # The index alone is looked at, so no token of a length is really there.
        theirs.add_document([], [length])
        writer.add(np.empty(0, np.int32), [length])
    theirs.finalize(str(tmp_path / "theirs.idx"))

    writer.write_index()
    writer.close()
    publish(tmp_path / "0", str(tmp_path / "ours"))

    assert bytes_of(tmp_path / "ours") == bytes_of(tmp_path / "theirs")
    assert "0.bin" not in files_of(tmp_path)


def test_a_tokenizer_that_adds_bos_adds_it_here_as_in_megatron(tmp_path):
    save_small_tokenizer(tmp_path / "tokenizer", begins_with="<s>")
    source = write_jsonl(tmp_path / "corpus.jsonl", TEXTS)
    settings = EncodingSettings(str(tmp_path / "tokenizer"), append_eod=True)

    summary = preprocess([source], str(tmp_path / "corpus"), settings)

    tokenizer = megatron_tokenizer(tmp_path / "tokenizer")
    for ids, text in zip(documents_of(summary.prefixes["text"]), TEXTS, strict=True):
        assert ids[0] == tokenizer.bos
        assert ids[:-1] == tokenizer.tokenize(text)


def test_gpt_dataset_serves_the_documents_as_one_stream(tmp_path, tokenizer_model):
    texts = [f"{number} foxes and {number**3} dogs" for number in range(50)]
    source = write_jsonl(tmp_path / "corpus.jsonl", texts)
    settings = EncodingSettings(tokenizer_model, append_eod=True)
    prefix = preprocess([source], str(tmp_path / "corpus"), settings).prefixes["text"]
    documents = documents_of(prefix)
    sequence_length = 16
    samples = (sum(map(len, documents)) - 1) // sequence_length
    config = GPTDatasetConfig(
        random_seed=1,
        sequence_length=sequence_length,
        blend_per_split=[([prefix], None), None, None],
        path_to_cache=str(tmp_path / "cache"),
        tokenizer=megatron_tokenizer(tokenizer_model),
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
    )

    train, _, _ = BlendedMegatronDatasetBuilder(
        GPTDataset, [samples, None, None], lambda: True, config
    ).build()

    served = [train[index] for index in range(samples)]
    assert all(sample["loss_mask"].all() for sample in served)
    tokens = [tuple(sample["tokens"].tolist()) for sample in served]
    assert len(set(tokens)) == samples
    shuffled = [token for index in train.document_index for token in documents[index]]
    expected = {
        tuple(shuffled[start : start + sequence_length])
        for start in range(0, samples * sequence_length, sequence_length)
    }
    assert set(tokens) == expected


def test_every_key_gets_a_data_set_of_its_own(tmp_path, tokenizer_model):
    source = tmp_path / "pairs.jsonl"
    source.write_text('{"q": "the fox", "a": "the dog"}\n{"q": "the", "a": "quick brown"}\n')
    settings = EncodingSettings(tokenizer_model, keys=("a", "q"))

    summary = preprocess([source], str(tmp_path / "pairs"), settings)

    tokenizer = load_tokenizer(tokenizer_model)
    for key, texts in (("q", ["the fox", "the"]), ("a", ["the dog", "quick brown"])):
        assert summary.prefixes[key] == str(tmp_path / f"pairs_{key}_document")
        assert tokenizer.batch_decode(documents_of(summary.prefixes[key])) == texts


def test_text_files_cannot_fill_two_keys(tmp_path, tokenizer_model):
    source = tmp_path / "a.txt"
    source.write_text("the fox")

    with pytest.raises(ValueError, match=r"--json-keys q a: .*a\.txt holds one text only"):
        preprocess([source], str(tmp_path / "x"), EncodingSettings(tokenizer_model, ("q", "a")))
    with pytest.raises(ValueError, match=r"--json-keys q q: a key is given twice"):
        preprocess([source], str(tmp_path / "x"), EncodingSettings(tokenizer_model, ("q", "q")))


def test_tokenizers_are_refused_by_name(tmp_path, tokenizer_model):
    source = write_jsonl(tmp_path / "corpus.jsonl", TEXTS)
    save_small_tokenizer(tmp_path / "endless", ends=False)
    (tmp_path / "void").mkdir()

    def run(model, **settings):
        preprocess([source], str(tmp_path / "x"), EncodingSettings(str(model), **settings))

    run(tmp_path / "endless")
    with pytest.raises(ValueError, match=r"--append-eod: .*endless has no end-of-sequence token"):
        run(tmp_path / "endless", append_eod=True)
    with pytest.raises(ValueError, match=r"endles: no such folder; the nearest is .*endless"):
        run(tmp_path / "endles")
    with pytest.raises(ValueError, match=r"--tokenizer-model .*void: no Hugging Face tokenizer"):
        run(tmp_path / "void")


def test_a_tokenizer_that_is_not_there_is_not_looked_for_in_a_network(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.json").touch()

    def connect(*_):
        raise AssertionError("a connection was tried")

    monkeypatch.setattr(socket.socket, "connect", connect)
    monkeypatch.setattr(socket, "getaddrinfo", connect)
    for name in ("nope/nope", "gpt2"):
        with pytest.raises(ValueError, match=f"^--tokenizer-model {name}: no such folder"):
            load_tokenizer(name)
    with pytest.raises(ValueError, match=r"a\.json: is a file, and a folder is wanted"):
        load_tokenizer("a.json")


@pytest.mark.parametrize(
    ("prefix", "message"),
    [
        ("corpus.jsonl/x", "x_text_document.bin cannot be written: .*corpus.jsonl is no folder"),
        ("corpus.jsonl/new/x", "cannot be written: .*corpus.jsonl is no folder"),
        ("/proc/x", "/proc/x_text_document.bin cannot be written: /proc: "),
        ("taken", "taken_text_document.idx is a folder, and a file is to be written there"),
        ("busy", "busy.partial is no folder"),
    ],
)
def test_a_place_that_takes_no_data_set_is_refused_before_any_work(
    tmp_path, monkeypatch, prefix, message
):
    monkeypatch.chdir(tmp_path)
    write_jsonl(tmp_path / "corpus.jsonl", TEXTS)
    (tmp_path / "taken_text_document.idx").mkdir()
    (tmp_path / "busy.partial").touch()
    before = sorted(tmp_path.iterdir())

    # There is no such tokenizer, so it was not even loaded.
    with pytest.raises(ValueError, match=f"^--output-prefix {prefix}: .*{message}"):
        preprocess([Path("corpus.jsonl")], prefix, EncodingSettings("none"))
    with pytest.raises(ValueError, match="^--json-keys a/b: .*nearest legal value: a_b"):
        preprocess([Path("corpus.jsonl")], "y", EncodingSettings("none", ("a/b",)))

    assert sorted(tmp_path.iterdir()) == before


def test_a_token_that_does_not_fit_into_megatrons_type_is_refused(tmp_path):
    tokenizer = Tokenizer(models.WordLevel({"a": 0, "b": 65_536}, unk_token="a"))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(tmp_path / "gaps")
    source = write_jsonl(tmp_path / "corpus.jsonl", ["b"])

    with pytest.raises(ValueError, match=r"gaps: has a token of id 65536, .* as uint16"):
        preprocess([source], str(tmp_path / "x"), EncodingSettings(str(tmp_path / "gaps")))


def test_special_tokens_in_the_text_are_read_as_megatron_reads_them(tmp_path):
    tokenizer = save_small_tokenizer(tmp_path / "tokenizer")
    text = f"the fox{tokenizer.eos_token}the dog"
    source = write_jsonl(tmp_path / "corpus.jsonl", [text])

    model = str(tmp_path / "tokenizer")
    config = tmp_path / "tokenizer" / "tokenizer_config.json"

    for split in (False, True):
        config.write_text(
            json.dumps(json.loads(config.read_text()) | {"split_special_tokens": split})
        )
        summary = preprocess([source], str(tmp_path / "x"), EncodingSettings(model))
        (ids,) = documents_of(summary.prefixes["text"])
        assert ids == megatron_tokenizer(model).tokenize(text)
        assert (tokenizer.eos_token_id in ids) != split


def test_tokenizer_json_stands_for_its_folder(tokenizer_model):
    by_file = load_tokenizer(f"{tokenizer_model}/tokenizer.json")

    assert by_file.get_vocab() == load_tokenizer(tokenizer_model).get_vocab()
    assert by_file.eos_token_id is not None
