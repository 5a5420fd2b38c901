"""The preprocessing tool: what it does with bad documents, what it prints, what its JSON holds."""

import json
import sys

import pytest

from megatron.boost.preprocessing import encoding, pieces
from megatron.boost.preprocessing.encoding import load_tokenizer
from megatron.boost.preprocessing.records import BadRecord
from tests.support.preprocessing import (
    TEXTS,
    bytes_of,
    documents_of,
    files_of,
    megatron_bytes,
    write_compressed,
    write_jsonl,
)
from tests.support.small_tokenizer import VOCABULARY_SIZE, save_small_tokenizer
from tests.support.tools import load_tool

preprocess_data = load_tool("preprocess_data")

GOOD = b'{"text": "the fox"}\n'
BAD = {
    b"\n": "the line is blank",
    b'{"text": \n': "invalid JSON at column 9",
    b'{"body": "x"}\n': "no key 'text'",
    b'{"text": null}\n': "the value of 'text' is not a string but a null",
    b'{"text": 3}\n': "the value of 'text' is not a string but a number",
    b'{"text": "\xff"}\n': "invalid UTF-8 at byte 11",
    b'{"text": ""}\n': "the value of 'text' is empty",
}


@pytest.fixture(scope="module")
def tokenizer_model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    save_small_tokenizer(folder)
    return str(folder)


@pytest.fixture
def run(tmp_path, tokenizer_model):
    """Run the tool on an input; what its --json holds."""

    def run_tool(source, *flags):
        prefix = tmp_path / "out" / "x"
        required = ["--input", source, "--output-prefix", prefix]
        required += ["--tokenizer-model", tokenizer_model, "--json", tmp_path / "result.json"]
        preprocess_data.main([str(argument) for argument in (*required, *flags)])
        return json.loads((tmp_path / "result.json").read_text())

    return run_tool


@pytest.fixture
def bad_corpus(tmp_path):
    """Two files of seven bad lines each, every one before a good line, and two bad text files."""
    folder = tmp_path / "corpus"
    folder.mkdir()
    lines = b"".join(bad + GOOD for bad in BAD)
    write_compressed(folder / "a.jsonl", lines)
    write_compressed(folder / "b.jsonl.gz", lines)
    write_compressed(folder / "c.txt", b"")
    write_compressed(folder / "d.txt", b"\xff")
    write_compressed(folder / "e.txt", b"the dog")
    return folder


@pytest.mark.parametrize("records_per_batch", [1, 5, 2048])
def test_skip_leaves_bad_documents_out_and_names_ten(
    tmp_path, tokenizer_model, run, bad_corpus, monkeypatch, capsys, records_per_batch
):
    monkeypatch.setattr(encoding, "BATCH_RECORDS", records_per_batch)

    result = run(bad_corpus, "--on-error", "skip")

    texts = ["the fox"] * 14 + ["the dog"]
    expected = megatron_bytes(tmp_path, tokenizer_model, texts)
    assert bytes_of(tmp_path / "out" / "x_text_document") == expected
    assert files_of(tmp_path / "out") == ["x_text_document.bin", "x_text_document.idx"]
    assert result["finished"] is True
    assert result["documents"] == 15
    assert result["bad_documents"] == 16
    assert len(result["first_bad_documents"]) == 10
    places = [("a.jsonl", line) for line in range(1, 14, 2)]
    places += [("b.jsonl.gz", line) for line in range(1, 6, 2)]
    reasons = [*BAD.values(), *BAD.values()]
    for named, (name, line), reason in zip(
        result["first_bad_documents"], places, reasons, strict=False
    ):
        assert named.startswith(f"{bad_corpus / name}, line {line}: {reason}")
    printed = capsys.readouterr().out
    assert "left out: 16 bad documents of 31; the first 10:\n" in printed
    for named in result["first_bad_documents"]:
        assert f"\n  {named}\n" in printed


@pytest.mark.parametrize("records_per_batch", [1, 3, 2048])
def test_fail_ends_at_the_first_bad_document(tmp_path, run, monkeypatch, capsys, records_per_batch):
    monkeypatch.setattr(encoding, "BATCH_RECORDS", records_per_batch)
    source = write_jsonl(tmp_path / "corpus.jsonl", ["the fox"] * 7 + ["", "", "the fox"])
    (tmp_path / "out").mkdir()
    for suffix in (".bin", ".idx"):
        (tmp_path / "out" / f"x_text_document{suffix}").write_bytes(b"old")

    with pytest.raises(BadRecord, match=r"corpus\.jsonl, line 8: .* is empty \(after 7 good docu"):
        run(source)

    assert bytes_of(tmp_path / "out" / "x_text_document") == {".bin": b"old", ".idx": b"old"}
    result = json.loads((tmp_path / "result.json").read_text())
    assert result["finished"] is False
    assert result["documents"] == 7
    assert result["bad_documents"] == 1
    (named,) = result["first_bad_documents"]
    assert named == f"{source}, line 8: the value of 'text' is empty"
    assert capsys.readouterr().out == ""


def test_a_bad_document_at_once_leaves_nothing_behind(tmp_path, run):
    with pytest.raises(BadRecord, match=r"corpus\.jsonl, line 2: "):
        run(write_jsonl(tmp_path / "corpus.jsonl", ["the fox", ""]))

    assert files_of(tmp_path / "out") == []


def test_a_bad_piece_takes_its_whole_document_with_it(tmp_path, tokenizer_model, run, monkeypatch):
    monkeypatch.setattr(pieces, "PIECE_BYTES", 2_000)
    monkeypatch.setattr(pieces, "CONTEXT_BYTES", 200)
    folder = tmp_path / "corpus"
    folder.mkdir()
    long = "the quick brown fox. " * 500
    spoilt = bytearray(long.encode())
    for at in (2_000 + 321, 8_000):
        spoilt[at] = 0xFF
    write_compressed(folder / "a.txt", spoilt)
    write_compressed(folder / "b.txt", long.encode())
    write_compressed(folder / "c.txt", spoilt)
    write_compressed(folder / "d.txt.gz", long.encode())
    whole = (folder / "d.txt.gz").read_bytes()
    (folder / "d.txt.gz").write_bytes(whole[:-1])
    write_compressed(folder / "e.jsonl", GOOD)

    result = run(folder, "--on-error", "skip")

    expected = megatron_bytes(tmp_path, tokenizer_model, [long, "the fox"])
    assert bytes_of(tmp_path / "out" / "x_text_document") == expected
    assert result["first_bad_documents"] == [
        f"{folder}/a.txt: invalid UTF-8 at byte 2322 (invalid start byte)",
        f"{folder}/c.txt: invalid UTF-8 at byte 2322 (invalid start byte)",
        f"{folder}/d.txt.gz: the compressed file ends early",
    ]


def test_input_of_bad_documents_only_is_refused(tmp_path, run):
    source = write_jsonl(tmp_path / "corpus.jsonl", ["", ""])

    with pytest.raises(ValueError, match=r"all 2 documents are bad; the first: .*jsonl, line 1: "):
        run(source, "--on-error", "skip")

    assert files_of(tmp_path / "out") == []


def test_long_lines_are_bad_from_the_given_size_on(tmp_path, run):
    source = write_jsonl(tmp_path / "corpus.jsonl", ["the fox", "the dog " * 140_000])

    with pytest.raises(BadRecord, match=r"line 2: the line is longer than 1 MiB \(--max-line-mib"):
        run(source, "--max-line-mib", 1)


def test_text_files_and_a_flat_summary(tmp_path, tokenizer_model, run, capsys):
    folder = tmp_path / "corpus"
    folder.mkdir()
    for name, text in (("b.txt", TEXTS[1]), ("a.txt", TEXTS[0])):
        (folder / name).write_bytes(text.encode())

    result = run(folder, "--tokenizer-type", "HuggingFaceTokenizer")

    documents = documents_of(tmp_path / "out" / "x_text_document")
    assert load_tokenizer(tokenizer_model).batch_decode(documents) == TEXTS[:2]
    assert result["documents"] == 2
    assert result["bad_documents"] == 0
    assert result["tokens"] == result["text_tokens"] == sum(map(len, documents))
    assert result["input_bytes"] == sum(len(text.encode()) for text in TEXTS[:2])
    assert result["vocabulary_size"] == VOCABULARY_SIZE
    assert result["text_data_path"] == f"{tmp_path}/out/x_text_document"
    assert result["documents_per_second"] == pytest.approx(2 / result["seconds"])
    output = capsys.readouterr()
    assert "x_text_document: 2 documents" in output.out
    assert "left out" not in output.out
    assert output.err == ""


def test_a_bar_is_shown_on_a_terminal_only(tmp_path, run, capsys, monkeypatch):
    source = write_jsonl(tmp_path / "corpus.jsonl", TEXTS)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "200")

    run(source)

    shown = capsys.readouterr().err
    assert f"{len(TEXTS)} documents" in shown
    size = source.stat().st_size / 1000
    assert f"{size:.1f}/{size:.1f} kB" in shown
    assert "documents/s" in shown
    assert "MB/s" in shown
