"""Reading documents: order, encodings, and what is refused, by file and line."""

import pytest

from megatron.boost.preprocessing.inputs import (
    BadRecord,
    find_inputs,
    parse_texts,
    read_records,
)


def texts_of(path, keys=("text",)):
    return [parse_texts(record, keys) for record in read_records(path)]


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b"", "the line is blank"),
        (b"  \t", "the line is blank"),
        (b'{"text": "half', "invalid JSON at column 10"),
        (b"[" * 100_000, "nested too deeply"),
        (b'["text"]', "not a JSON object but a list"),
        (b"null", "not a JSON object but a null"),
        (b"true", "not a JSON object but a boolean"),
        (b'{"body": "x", "id": 3}', "no key 'text' (--json-keys); its keys: 'body', 'id'"),
        (b"{}", "no key 'text' (--json-keys); its keys: none"),
        (b'{"text": null}', "the value of 'text' is not a string but a null"),
        (b'{"text": ["a"]}', "the value of 'text' is not a string but a list"),
        (b'{"text": 3}', "the value of 'text' is not a string but a number"),
        (b'{"text": ""}', "the value of 'text' is empty"),
        (b'{"text": "\xff"}', "invalid UTF-8 at byte 11"),
        (b'{"text": "\\ud800"}', "unpaired surrogate"),
    ],
)
def test_bad_line_is_named_by_file_line_and_reason(tmp_path, line, reason):
    path = tmp_path / "corpus.jsonl"
    path.write_bytes(b'{"text": "good"}\n' + line + b'\n{"text": "good"}\n')

    with pytest.raises(BadRecord) as error:
        texts_of(path)

    assert f"{path}, line 2: " in str(error.value)
    assert reason in str(error.value)


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("a.txt", b"", "the file is empty"),
        ("a.txt", b"\xef\xbb\xbf", "the file is empty"),
        ("a.txt", "text".encode("utf-16"), "invalid UTF-8 at byte 1"),
        ("a.jsonl", b"", "the file is empty"),
    ],
)
def test_bad_file_is_named(tmp_path, name, content, reason):
    path = tmp_path / name
    path.write_bytes(content)

    with pytest.raises(BadRecord) as error:
        texts_of(path)

    assert str(error.value).startswith(f"{path}: {reason}")


def test_text_file_is_one_document_unchanged(tmp_path):
    path = tmp_path / "a.txt"
    path.write_bytes("one\r\n\r\ntwo — ünï\n".encode())

    assert texts_of(path) == [["one\r\n\r\ntwo — ünï\n"]]


def test_json_lines_with_byte_order_mark_crlf_and_no_last_newline(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"text": "a\\n"}\r\n{"text": "\\ud83d\\ude00"}')

    assert texts_of(path) == [["a\n"], ["😀"]]


def test_several_keys_come_in_the_order_asked_for(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"question": "q", "id": 1, "answer": "a"}\n')

    assert texts_of(path, ("answer", "question")) == [["a", "q"]]


def test_folder_gives_its_text_files_sorted_at_any_depth(tmp_path):
    for name in ("b.txt", "a/z.jsonl", "a/deep/c.TXT", "a.json"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("x")
    (tmp_path / "notes.md").write_text("not text to train on")
    (tmp_path / "folder.txt").mkdir()

    found = [path.relative_to(tmp_path).as_posix() for path in find_inputs([tmp_path])]

    assert found == ["a.json", "a/deep/c.TXT", "a/z.jsonl", "b.txt"]


def test_inputs_keep_the_order_given(tmp_path):
    paths = [tmp_path / "b.txt", tmp_path / "a.txt"]
    for path in paths:
        path.write_text("x")

    assert find_inputs(paths) == paths


def test_unusable_inputs_are_refused_with_the_nearest_usable_one(tmp_path):
    (tmp_path / "corpus.jsonl").write_text("{}")
    (tmp_path / "corpus.csv").write_text("a,b")
    (tmp_path / "empty").mkdir()

    with pytest.raises(
        ValueError, match=r"corpus\.jsnl: no such .* the nearest is .*corpus\.jsonl"
    ):
        find_inputs([tmp_path / "corpus.jsnl"])
    with pytest.raises(ValueError, match=r"--input .*corpus\.csv: not a \.txt, \.jsonl or \.json"):
        find_inputs([tmp_path / "corpus.csv"])
    with pytest.raises(ValueError, match=r"--input .*empty: the folder has no \.txt"):
        find_inputs([tmp_path / "empty"])
