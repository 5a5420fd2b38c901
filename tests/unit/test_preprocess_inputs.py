"""Reading documents: order, encodings, and what is refused, by file and line."""

from pathlib import Path

import pytest

from megatron.boost.preprocessing.inputs import InputFile, find_inputs, nearest_path, why_not
from megatron.boost.preprocessing.records import BadRecord, Position, RecordReader, parse_texts


def read_records(path, **settings):
    return list(RecordReader([InputFile.of(path)], Position(), **settings))


def texts_of(path, keys=("text",), **settings):
    return [parse_texts(record, keys) for record in read_records(path, **settings)]


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
        (b"{" + b", ".join(b'"%d": 0' % n for n in range(12)) + b"}", "'8', '9' and 2 more"),
        (b'{"text": ' + b"1" * 5000 + b"}", "line 2: a number of more than 4,300 digits"),
        (b'\xef\xbb\xbf{"text": "x"}', "invalid JSON at column 1 (Unexpected UTF-8 BOM"),
        (b'{"text": null}', "the value of 'text' is not a string but a null"),
        (b'{"text": ["a"]}', "the value of 'text' is not a string but a list"),
        (b'{"text": "a", "n": [-' + b"1" * 5000 + b"]}", "a number of more than 4,300 digits"),
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
        ("a.txt", "text".encode("utf-16"), "invalid UTF-8 at byte 1 (invalid start byte; its byte"),
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
    for name in ("b.txt", "a/z.jsonl", "a/deep/c.TXT", "a.json", "c.jsonl.gz", "d.txt.ZST"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("x")
    for name in ("notes.md", "notes.md.gz", "archive.zst"):
        (tmp_path / name).write_text("not text to train on")
    (tmp_path / "folder.txt").mkdir()

    found = [path.relative_to(tmp_path).as_posix() for path in find_inputs([tmp_path])]

    assert found == ["a.json", "a/deep/c.TXT", "a/z.jsonl", "b.txt", "c.jsonl.gz", "d.txt.ZST"]


def test_inputs_keep_the_order_given(tmp_path):
    paths = [tmp_path / "b.txt", tmp_path / "a.txt"]
    for path in paths:
        path.write_text("x")

    assert find_inputs(paths) == paths


def test_a_line_that_is_too_long_is_one_bad_line(tmp_path):
    path = tmp_path / "a.jsonl"
    long = b'{"text": "' + b"x" * 3_000_000 + b'"}\n'
    path.write_bytes(b'{"text": "a"}\n' + long + b'{"text": "b"}\n' + long[:-1])

    records = read_records(path, max_line_bytes=1 << 20)

    assert [record.fault is None for record in records] == [True, False, True, False]
    assert all(len(record.data) < 100 for record in records)
    assert [texts for record in records[::2] for texts in parse_texts(record, ["text"])] == [
        "a",
        "b",
    ]
    with pytest.raises(BadRecord, match=r"a\.jsonl, line 2: the line is longer than 1 MiB \(--max"):
        parse_texts(records[1], ["text"])
    assert texts_of(path)[3] == ["x" * 3_000_000]


def test_reading_goes_on_from_between_any_two_records(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(b'\xef\xbb\xbf{"a": 1}\n\n{"b": 2}')
    (tmp_path / "b.txt").write_bytes(b"text")
    (tmp_path / "c.txt").write_bytes(b"")
    (tmp_path / "d.jsonl").write_bytes(b"")
    (tmp_path / "e.jsonl").write_bytes(b"\n")
    files = [InputFile.of(path) for path in find_inputs([tmp_path])]
    reader = RecordReader(files, Position())
    places = [reader.position]
    records = []
    for record in reader:
        records.append(record)
        places.append(reader.position)

    assert len(records) == 7
    for number, place in enumerate(places):
        assert list(RecordReader(files, place)) == records[number:]
    assert reader.disk_bytes == sum(file.size for file in files)


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
    with pytest.raises(ValueError, match=r"--input /dev/null: is no regular file; a file or fol"):
        find_inputs([Path("/dev/null")])


def test_a_path_is_not_answered_with_itself(tmp_path):
    (tmp_path / "link").symlink_to("gone")
    (tmp_path / "file").touch()

    assert why_not(tmp_path, "file") == "is a folder, and a file is wanted"
    assert why_not(tmp_path / "file", "folder") == "is a file, and a folder is wanted"
    assert why_not(tmp_path / "link", "file") == "is a link to gone, which is not there"
    assert why_not(tmp_path / "filo", "file") == f"no such file; the nearest is {tmp_path}/file"
    assert nearest_path(tmp_path / "file") == ""
