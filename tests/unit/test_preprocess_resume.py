"""A run that ended early: what is left, how the next one goes on, and when it does not."""

import json
import os

import pytest

from megatron.boost.preprocessing import encoding, pieces, pipeline
from megatron.boost.preprocessing.encoding import EncodingSettings
from megatron.boost.preprocessing.pipeline import preprocess
from megatron.boost.preprocessing.records import BadRecord
from megatron.boost.preprocessing.unfinished import UnfinishedRun
from tests.support.preprocessing import (
    TEXTS,
    bytes_of,
    files_of,
    json_lines,
    write_compressed,
    write_jsonl,
)
from tests.support.small_tokenizer import save_small_tokenizer


class Killed(BaseException):
    """Stands for an end at a moment chosen by a test."""


@pytest.fixture(scope="module")
def tokenizer_model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    save_small_tokenizer(folder)
    return str(folder)


@pytest.fixture
def settings(tokenizer_model):
    return EncodingSettings(tokenizer_model, append_eod=True)


@pytest.fixture(autouse=True)
def small_batches(monkeypatch):
    # No test takes the power away, and waiting for disks takes long.
    monkeypatch.setattr(os, "fsync", lambda file: None)
    monkeypatch.setattr(encoding, "BATCH_RECORDS", 3)
    monkeypatch.setattr(pieces, "PIECE_BYTES", 3_000)
    monkeypatch.setattr(pieces, "CONTEXT_BYTES", 300)
    monkeypatch.setattr(pipeline, "SECONDS_BETWEEN_SAVES", 0.0)


@pytest.fixture
def corpus(tmp_path):
    """Files of every kind, with bad documents among them; some 20 batches."""
    folder = tmp_path / "corpus"
    folder.mkdir()
    texts = [f"{text} {number}" for number in range(3) for text in TEXTS]
    lines = json_lines([*texts[:7], "", *texts[7:]])
    long = "".join(texts).encode()
    write_compressed(folder / "a.jsonl", b"\xef\xbb\xbf" + lines)
    write_compressed(folder / "b.txt", b"\xef\xbb\xbf" + long)
    write_compressed(folder / "c.txt.zst", long[:-500] + b"\xff")
    write_compressed(folder / "d.jsonl.gz", lines)
    return folder


def interrupted(after, inputs, prefix, settings, how=Killed, **flags):
    """Run until `after` batches are written and, if it comes so far, end it; else return True."""
    batches = 0

    def stop(progress):
        nonlocal batches
        batches += 1
        if batches == after:
            raise how

    try:
        preprocess(inputs, prefix, settings, on_error="skip", on_progress=stop, **flags)
    except how:
        return False
    return True


def test_wherever_a_run_ends_the_next_writes_the_same_bytes(tmp_path, settings, corpus):
    whole = preprocess([corpus], str(tmp_path / "whole"), settings, on_error="skip")
    assert whole.bad_documents == 3
    prefix = str(tmp_path / "out" / "x")

    for after in range(1, 100):
        if interrupted(after, [corpus], prefix, settings):
            break
        assert files_of(tmp_path / "out") == ["x.partial"]
        notes = []
        summary = preprocess([corpus], prefix, settings, on_error="skip", note=notes.append)
        assert notes == [
            f"going on with an unfinished run, after {summary.earlier_documents} documents"
        ]
        assert bytes_of(f"{prefix}_text_document") == bytes_of(tmp_path / "whole_text_document")
        assert summary.documents == whole.documents
        assert summary.tokens == whole.tokens
        assert summary.input_bytes == whole.input_bytes
        assert summary.first_bad == whole.first_bad
        for suffix in (".bin", ".idx"):
            os.remove(f"{prefix}_text_document{suffix}")
        assert files_of(tmp_path / "out") == []
    assert after > 15


def test_a_run_may_end_over_and_over(tmp_path, settings, corpus):
    preprocess([corpus], str(tmp_path / "whole"), settings, on_error="skip")
    prefix = str(tmp_path / "x")

    runs = 1
    while not interrupted(2, [corpus], prefix, settings):
        runs += 1

    assert runs > 7
    assert bytes_of(f"{prefix}_text_document") == bytes_of(tmp_path / "whole_text_document")


def test_what_was_written_after_the_last_save_is_written_again(
    tmp_path, settings, corpus, monkeypatch
):
    preprocess([corpus], str(tmp_path / "whole"), settings, on_error="skip")
    prefix = str(tmp_path / "x")
    assert not interrupted(8, [corpus], prefix, settings)
    for name in ("0.bin", "0.lengths"):
        with (tmp_path / "x.partial" / name).open("ab") as file:
            file.write(b"more than was saved")

    preprocess([corpus], prefix, settings, on_error="skip")

    assert bytes_of(f"{prefix}_text_document") == bytes_of(tmp_path / "whole_text_document")


def test_an_end_without_a_last_save_loses_only_what_came_after_the_one_before(
    tmp_path, settings, corpus, monkeypatch
):
    """As it is with SIGKILL, also where a long document has been taken back in between."""
    preprocess([corpus], str(tmp_path / "whole"), settings, on_error="skip")
    prefix = str(tmp_path / "x")
    save = UnfinishedRun.save
    saves = 0

    def save_some(run, state):
        nonlocal saves
        saves += 1
        if saves % 4 == 0 or state.whole:
            save(run, state)

    for after in range(1, 100):
        with monkeypatch.context() as patch:
            patch.setattr(UnfinishedRun, "save", save_some)
            if interrupted(after, [corpus], prefix, settings):
                break
        preprocess([corpus], prefix, settings, on_error="skip")
        assert bytes_of(f"{prefix}_text_document") == bytes_of(tmp_path / "whole_text_document")
    assert after > 15


def test_files_that_are_gone_after_they_were_renamed_are_missed(tmp_path, settings, monkeypatch):
    source = write_jsonl(tmp_path / "corpus.jsonl", TEXTS)
    with monkeypatch.context() as patch:
        patch.setattr(UnfinishedRun, "forget", lambda run: None)
        preprocess([source], str(tmp_path / "x"), settings)
    (tmp_path / "x_text_document.bin").unlink()

    with pytest.raises(ValueError, match=r"x_text_document: .* are gone; --start-over begins anew"):
        preprocess([source], str(tmp_path / "x"), settings)


@pytest.mark.parametrize("renamed", [0, 1, 2, 3, 4])
def test_an_end_between_the_renames_is_made_up_for(tmp_path, settings, monkeypatch, renamed):
    source = tmp_path / "corpus.jsonl"
    source.write_text('{"q": "the fox", "a": "the dog"}\n{"q": "the", "a": "quick brown"}\n')
    settings = EncodingSettings(settings.tokenizer_model, keys=("q", "a"))
    preprocess([source], str(tmp_path / "whole"), settings)
    replace = type(source).replace
    renames = 0

    def replace_some(path, target):
        nonlocal renames
        if path.suffix in (".bin", ".idx"):
            if renames == renamed:
                raise Killed
            renames += 1
        return replace(path, target)

    with monkeypatch.context() as patch:
        patch.setattr(type(source), "replace", replace_some)
        if renamed < 4:
            with pytest.raises(Killed):
                preprocess([source], str(tmp_path / "x"), settings)
    # Where both files of a data set are there, they belong together.
    for key in settings.keys:
        found = [(tmp_path / f"x_{key}_document{end}").exists() for end in (".bin", ".idx")]
        assert found != [False, True]

    preprocess([source], str(tmp_path / "x"), settings)

    for key in settings.keys:
        assert bytes_of(tmp_path / f"x_{key}_document") == bytes_of(
            tmp_path / f"whole_{key}_document"
        )
    assert not (tmp_path / "x.partial").exists()


def test_a_failed_run_can_go_on_without_the_bad_documents(tmp_path, settings, corpus):
    whole = preprocess([corpus], str(tmp_path / "whole"), settings, on_error="skip")
    prefix = str(tmp_path / "x")

    with pytest.raises(BadRecord, match=r"a\.jsonl, line 8: "):
        preprocess([corpus], prefix, settings)
    summary = preprocess([corpus], prefix, settings, on_error="skip")

    assert summary.earlier_documents == 6
    assert summary.first_bad == whole.first_bad
    assert bytes_of(f"{prefix}_text_document") == bytes_of(tmp_path / "whole_text_document")


def test_an_unfinished_run_that_skipped_fails_when_it_may_not(tmp_path, settings, corpus):
    assert not interrupted(8, [corpus], str(tmp_path / "x"), settings)

    with pytest.raises(BadRecord, match=r"a\.jsonl, line 8: the value of 'text' is empty"):
        preprocess([corpus], str(tmp_path / "x"), settings)


@pytest.mark.parametrize(
    ("changed", "flag"),
    [
        ({"append_eod": False}, "--append-eod no: .* holds an unfinished run with yes"),
        ({"keys": ("body",)}, "--json-keys body: .* holds an unfinished run with text"),
        ({"tokenizer_model": "other"}, "--tokenizer-model .a hash of it. .* run with"),
        ({"max_line_bytes": 1 << 20}, "--max-line-mib 1: .* holds an unfinished run with 64"),
    ],
)
def test_other_settings_are_refused_until_told_to_start_over(tmp_path, settings, changed, flag):
    source = write_jsonl(tmp_path / "corpus.jsonl", TEXTS * 3)
    prefix = str(tmp_path / "x")
    assert not interrupted(2, [source], prefix, settings)
    before = {path.name: path.read_bytes() for path in (tmp_path / "x.partial").iterdir()}
    values = {"tokenizer_model": settings.tokenizer_model, "append_eod": True} | changed
    flags = {"max_line_bytes": values.pop("max_line_bytes")} if "max_line_bytes" in values else {}
    if values["tokenizer_model"] == "other":
        save_small_tokenizer(tmp_path / "other", begins_with="<s>")
        values["tokenizer_model"] = str(tmp_path / "other")
    if "keys" in values:
        source.write_bytes(source.read_bytes())  # the same, but newer
        os.utime(source, ns=(0, 0))
        os.utime(source, ns=(0, json.loads(before["description"])["inputs"][0][2]))

    with pytest.raises(ValueError, match=f"{flag}.*; --start-over begins anew"):
        preprocess([source], prefix, EncodingSettings(**values), **flags)

    left = {path.name: path.read_bytes() for path in (tmp_path / "x.partial").iterdir()}
    assert left == before
    notes = []
    if "keys" not in values:
        summary = preprocess(
            [source],
            prefix,
            EncodingSettings(**values),
            start_over=True,
            note=notes.append,
            **flags,
        )
        assert (summary.documents, summary.earlier_documents) == (15, 0)
        assert notes == []


def test_changed_input_is_begun_anew_and_said_so(tmp_path, settings):
    source = write_jsonl(tmp_path / "corpus.jsonl", TEXTS * 3)
    prefix = str(tmp_path / "x")

    def note_after_interruption(change):
        assert not interrupted(3, [source], prefix, settings)
        inputs = change()
        notes = []
        summary = preprocess(inputs, prefix, settings, note=notes.append)
        assert summary.earlier_documents == 0
        preprocess(inputs, str(tmp_path / "whole"), settings)
        assert bytes_of(f"{prefix}_text_document") == bytes_of(tmp_path / "whole_text_document")
        (note,) = notes
        return note

    def other_content():
        write_jsonl(source, TEXTS * 4)
        return [source]

    def other_time():
        os.utime(source, (1, 1))
        return [source]

    def other_files():
        return [source, write_jsonl(tmp_path / "second.jsonl", TEXTS)]

    for change in (other_content, other_time):
        note = note_after_interruption(change)
        assert note == f"{source} has changed since the unfinished run: beginning anew"
    note = note_after_interruption(other_files)
    assert note == "the files of --input have changed since the unfinished run: beginning anew"


def test_input_that_changes_under_way_gives_no_data_set(tmp_path, settings):
    source = write_jsonl(tmp_path / "corpus.jsonl", TEXTS * 3)

    with pytest.raises(ValueError, match=r"corpus\.jsonl: the file changed while it was read"):
        preprocess(
            [source],
            str(tmp_path / "out" / "x"),
            settings,
            on_progress=lambda progress: os.utime(source, (1, 1)),
        )

    assert files_of(tmp_path / "out") == ["x.partial"]


def test_a_second_run_to_the_same_place_is_refused(tmp_path, settings):
    source = write_jsonl(tmp_path / "corpus.jsonl", TEXTS * 3)
    prefix = str(tmp_path / "x")
    refusals = []

    def run_another(progress):
        with pytest.raises(ValueError, match=r"x\.partial: another run is writing there") as error:
            preprocess([source], prefix, settings, start_over=True)
        refusals.append(error)

    assert preprocess([source], prefix, settings, on_progress=run_another).documents == 15
    assert len(refusals) == 5


@pytest.mark.parametrize(
    ("name", "content"),
    [("description", b"{"), ("progress", b"[]"), ("progress", b"{}"), ("0.bin", b"")],
)
def test_a_damaged_state_is_refused_until_told_to_start_over(tmp_path, settings, name, content):
    source = write_jsonl(tmp_path / "corpus.jsonl", TEXTS * 3)
    assert not interrupted(3, [source], str(tmp_path / "x"), settings)
    (tmp_path / "x.partial" / name).write_bytes(content)

    with pytest.raises(ValueError, match=r"x\.partial.*; --start-over begins anew"):
        preprocess([source], str(tmp_path / "x"), settings)

    assert preprocess([source], str(tmp_path / "x"), settings, start_over=True).documents == 15


def test_a_folder_that_is_read_may_hold_the_unfinished_run(tmp_path, settings):
    write_jsonl(tmp_path / "corpus.jsonl", TEXTS * 3)
    assert not interrupted(3, [tmp_path], str(tmp_path / "x"), settings)

    summary = preprocess([tmp_path], str(tmp_path / "x"), settings)

    assert (summary.documents, summary.earlier_documents) == (15, 9)
