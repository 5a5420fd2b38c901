"""Text to Megatron's indexed data sets: what Megatron's readers find in them."""

import json
import multiprocessing
import os
import signal
import sys

import pytest
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
from megatron.core.datasets.indexed_dataset import DType, IndexedDataset, IndexedDatasetBuilder
from megatron.core.tokenizers import MegatronTokenizer

from megatron.boost.preprocessing import encoding
from megatron.boost.preprocessing.encoding import EncodingSettings, load_tokenizer
from megatron.boost.preprocessing.inputs import BadRecord
from megatron.boost.preprocessing.pipeline import preprocess
from tests.support.small_tokenizer import VOCABULARY_SIZE, save_small_tokenizer
from tests.support.tools import load_tool

preprocess_data = load_tool("preprocess_data")

TEXTS = [
    "the quick brown fox",
    "def f(x):\n\treturn x  # tabs,  blanks\r\n\n",
    "ünïcödé — 漢字 😀",
    " ",
    "the lazy dog " * 200,
]


@pytest.fixture(scope="module")
def tokenizer_model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    save_small_tokenizer(folder)
    return str(folder)


def megatron_tokenizer(folder):
    return MegatronTokenizer.from_pretrained(str(folder), {"library": "huggingface"})


def write_jsonl(path, texts, key="text"):
    path.write_text("".join(json.dumps({key: text}) + "\n" for text in texts))
    return path


def documents_of(prefix):
    # Copied while the data set lives: it unmaps the file under its arrays when it goes.
    dataset = IndexedDataset(str(prefix))
    return [ids.tolist() for ids in dataset]


def files_of(folder):
    return sorted(path.name for path in folder.iterdir())


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


def test_files_are_those_of_megatrons_builder_byte_for_byte(tmp_path, tokenizer_model):
    source = write_jsonl(tmp_path / "corpus.jsonl", TEXTS)
    tokenizer = megatron_tokenizer(tokenizer_model)
    builder = IndexedDatasetBuilder(
        str(tmp_path / "expected.bin"), dtype=DType.optimal_dtype(tokenizer.vocab_size)
    )
    for text in TEXTS:
        ids = tokenizer.tokenize(text)
        builder.add_document(ids, [len(ids)])
    builder.finalize(str(tmp_path / "expected.idx"))

    preprocess([source], str(tmp_path / "ours"), EncodingSettings(tokenizer_model))

    for suffix in (".bin", ".idx"):
        ours = (tmp_path / f"ours_text_document{suffix}").read_bytes()
        assert ours == (tmp_path / f"expected{suffix}").read_bytes()


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


def test_a_bad_line_leaves_the_old_data_set_and_nothing_else(tmp_path, tokenizer_model):
    settings = EncodingSettings(tokenizer_model)
    folder = tmp_path / "out"
    preprocess([write_jsonl(tmp_path / "a.jsonl", TEXTS)], str(folder / "corpus"), settings)
    before = {path.name: path.read_bytes() for path in folder.iterdir()}

    bad = write_jsonl(tmp_path / "b.jsonl", ["the fox", ""])
    with pytest.raises(BadRecord, match=r"b\.jsonl, line 2: "):
        preprocess([bad], str(folder / "corpus"), settings)

    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


@pytest.fixture
def small_batches(monkeypatch):
    monkeypatch.setattr(encoding, "BATCH_RECORDS", 4)


@pytest.mark.slow
def test_workers_write_the_same_bytes_and_read_only_a_little_ahead(
    tmp_path, tokenizer_model, small_batches, monkeypatch
):
    texts = [f"{TEXTS[number % len(TEXTS)]} {number}" for number in range(100)]
    source = write_jsonl(tmp_path / "corpus.jsonl", texts)
    settings = EncodingSettings(tokenizer_model, append_eod=True)
    records_read = 0
    read_records = preprocess.__globals__["read_records"]

    def counted(path):
        nonlocal records_read
        for record in read_records(path):
            records_read += 1
            yield record

    ahead = []
    monkeypatch.setitem(preprocess.__globals__, "read_records", counted)
    preprocess([source], str(tmp_path / "one"), settings)
    records_read = 0
    preprocess(
        [source],
        str(tmp_path / "two"),
        settings,
        workers=2,
        on_progress=lambda state: ahead.append(records_read - state.documents),
    )

    for suffix in (".bin", ".idx"):
        one = (tmp_path / f"one_text_document{suffix}").read_bytes()
        assert (tmp_path / f"two_text_document{suffix}").read_bytes() == one
    most = 2 * encoding.BATCHES_IN_FLIGHT_PER_WORKER * encoding.BATCH_RECORDS
    assert 0 < max(ahead) <= most < len(texts)


@pytest.mark.slow
def test_workers_report_the_first_bad_line_of_the_input(tmp_path, tokenizer_model, small_batches):
    texts = ["the fox"] * 40
    texts[13] = texts[14] = texts[30] = ""
    source = write_jsonl(tmp_path / "corpus.jsonl", texts)

    with pytest.raises(BadRecord, match=r"corpus\.jsonl, line 14: "):
        preprocess(
            [source], str(tmp_path / "out" / "x"), EncodingSettings(tokenizer_model), workers=2
        )

    assert files_of(tmp_path / "out") == []


@pytest.mark.slow
def test_a_worker_that_dies_ends_the_run(tmp_path, tokenizer_model, small_batches):
    source = write_jsonl(tmp_path / "corpus.jsonl", ["the fox"] * 100)

    def kill_the_workers(state):
        for child in multiprocessing.active_children():
            os.kill(child.pid, signal.SIGKILL)

    with pytest.raises(ChildProcessError, match=r"a worker process died .*corpus\.jsonl, line \d+"):
        preprocess(
            [source],
            str(tmp_path / "out" / "x"),
            EncodingSettings(tokenizer_model),
            workers=2,
            on_progress=kill_the_workers,
        )

    assert files_of(tmp_path / "out") == []


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


def test_tokenizer_json_stands_for_its_folder(tokenizer_model):
    by_file = load_tokenizer(f"{tokenizer_model}/tokenizer.json")

    assert by_file.get_vocab() == load_tokenizer(tokenizer_model).get_vocab()
    assert by_file.eos_token_id is not None


def test_tool_writes_text_files_and_a_flat_summary(tmp_path, tokenizer_model, capsys):
    folder = tmp_path / "corpus"
    folder.mkdir()
    for name, text in (("b.txt", TEXTS[1]), ("a.txt", TEXTS[0])):
        (folder / name).write_bytes(text.encode())

    preprocess_data.main(
        f"--input {folder} --output-prefix {tmp_path}/corpus --tokenizer-model {tokenizer_model} "
        f"--tokenizer-type HuggingFaceTokenizer --json {tmp_path}/result.json".split()
    )

    documents = documents_of(tmp_path / "corpus_text_document")
    assert load_tokenizer(tokenizer_model).batch_decode(documents) == TEXTS[:2]
    result = json.loads((tmp_path / "result.json").read_text())
    assert result["documents"] == 2
    assert result["tokens"] == result["text_tokens"] == sum(map(len, documents))
    assert result["input_bytes"] == sum(len(text.encode()) for text in TEXTS[:2])
    assert result["vocabulary_size"] == VOCABULARY_SIZE
    assert result["text_data_path"] == f"{tmp_path}/corpus_text_document"
    assert result["documents_per_second"] == pytest.approx(2 / result["seconds"])
    output = capsys.readouterr()
    assert "corpus_text_document: 2 documents" in output.out
    assert output.err == ""


def test_tool_shows_a_bar_on_a_terminal_only(tmp_path, tokenizer_model, capsys, monkeypatch):
    source = write_jsonl(tmp_path / "corpus.jsonl", TEXTS)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)

    preprocess_data.main(
        f"--input {source} --output-prefix {tmp_path}/x --tokenizer-model {tokenizer_model}".split()
    )

    shown = capsys.readouterr().err
    assert f"{len(TEXTS)} documents" in shown
    size = source.stat().st_size / 1000
    assert f"{size:.1f}/{size:.1f} kB" in shown
