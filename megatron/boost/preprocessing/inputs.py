"""Finding input files and reading documents from them, each with the place it came from."""

import difflib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

TEXT_SUFFIXES = (".txt",)
JSON_LINES_SUFFIXES = (".jsonl", ".json")
SUFFIXES = TEXT_SUFFIXES + JSON_LINES_SUFFIXES

_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


@dataclass(frozen=True)
class Record:
    """The undecoded bytes of one document: a whole text file, or one line with its line break."""

    path: str
    line: int | None
    """Line number from 1, or None when the record is the whole file."""
    data: bytes

    @property
    def place(self) -> str:
        """Where the record stands, in words."""
        return self.path if self.line is None else f"{self.path}, line {self.line}"


class BadRecord(ValueError):
    """A document that cannot be used; its message names the file, the line and the reason."""


def find_inputs(inputs: Sequence[Path]) -> list[Path]:
    """The files that `inputs` (files and folders) stand for, in the order they are read.

    A folder stands for all its .txt, .jsonl and .json files at any depth, sorted by relative path.
    Raises `ValueError` for a path that does not exist, a file of another kind and a folder without
    any of these files.
    """
    files: list[Path] = []
    for path in inputs:
        if path.is_dir():
            found = [file for file in path.rglob("*") if _is_supported(file) and file.is_file()]
            if not found:
                raise ValueError(f"--input {path}: the folder has no {_or(SUFFIXES)} file")
            files.extend(sorted(found, key=lambda file: file.relative_to(path).as_posix()))
        elif not path.is_file():
            raise ValueError(f"--input {path}: no such file or folder{nearest_path(path)}")
        elif not _is_supported(path):
            raise ValueError(f"--input {path}: not a {_or(SUFFIXES)} file")
        else:
            files.append(path)
    return files


def read_records(path: Path) -> Iterator[Record]:
    """The documents of one file, undecoded, one at a time.

    A UTF-8 byte order mark at the start of the file is no part of its text and is dropped.
    Raises `BadRecord` for a file without any content.
    """
    name = str(path)
    with path.open("rb") as file:
        if path.suffix.lower() in TEXT_SUFFIXES:
            yield Record(name, None, file.read().removeprefix(_BYTE_ORDER_MARK))
            return
        number = 0
        for number, line in enumerate(file, start=1):
            if number == 1:
                line = line.removeprefix(_BYTE_ORDER_MARK)
            yield Record(name, number, line)
        if number == 0:
            raise BadRecord(f"{name}: the file is empty")


def parse_texts(record: Record, keys: Sequence[str]) -> list[str]:
    """The record's text under each of `keys`; a plain text file has the same one for all.

    Raises `BadRecord` for invalid UTF-8, a blank or broken line, a line that is no JSON object, a
    missing key, and a value that is empty or no string.
    """
    try:
        text = record.data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise BadRecord(
            f"{record.place}: invalid UTF-8 at byte {error.start + 1} ({error.reason})"
        ) from None
    if record.line is None:
        return [_checked(record, "the file", text)] * len(keys)
    text = text.strip()
    if not text:
        raise BadRecord(f"{record.place}: the line is blank")
    try:
        document = json.loads(text)
    except json.JSONDecodeError as error:
        raise BadRecord(
            f"{record.place}: invalid JSON at column {error.colno} ({error.msg})"
        ) from None
    except RecursionError:
        raise BadRecord(f"{record.place}: the JSON is nested too deeply") from None
    if not isinstance(document, dict):
        raise BadRecord(f"{record.place}: not a JSON object but a {_json_type(document)}")
    texts = []
    for key in keys:
        if key not in document:
            present = ", ".join(repr(name) for name in document) or "none"
            raise BadRecord(f"{record.place}: no key {key!r} (--json-keys); its keys: {present}")
        texts.append(_checked(record, f"the value of {key!r}", document[key]))
    return texts


def nearest_path(path: Path) -> str:
    """`; the nearest is …` for a path that does not exist, or nothing when none is near."""
    if not path.parent.is_dir():
        return ""
    siblings = [sibling.name for sibling in path.parent.iterdir()]
    near = difflib.get_close_matches(path.name, siblings, n=1)
    return f"; the nearest is {path.parent / near[0]}" if near else ""


def _checked(record: Record, what: str, text: object) -> str:
    if not isinstance(text, str):
        raise BadRecord(f"{record.place}: {what} is not a string but a {_json_type(text)}")
    if not text:
        raise BadRecord(f"{record.place}: {what} is empty")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        # JSON can spell half of a surrogate pair, which no tokenizer takes.
        raise BadRecord(f"{record.place}: {what} has an unpaired surrogate") from None
    return text


def _json_type(value: object) -> str:
    if value is None:
        return "null"
    names = {bool: "boolean", int: "number", float: "number", str: "string", list: "list"}
    return names.get(type(value), "object")


def _is_supported(path: Path) -> bool:
    return path.suffix.lower() in SUFFIXES


def _or(words: Sequence[str]) -> str:
    return f"{', '.join(words[:-1])} or {words[-1]}"
