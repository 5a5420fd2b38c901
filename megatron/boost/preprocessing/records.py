"""Reading documents from input files, each with the place it came from."""

import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from megatron.boost.preprocessing.inputs import InputFile
from megatron.boost.preprocessing.pieces import Piece, context_begin, cut
from megatron.boost.preprocessing.streams import ByteStream, DamagedInput

MAX_LINE_BYTES = 64 << 20

_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_OTHER_BYTE_ORDER_MARKS = {b"\xff\xfe": "UTF-16", b"\xfe\xff": "UTF-16"}
_SKIPPED_AT_ONCE = 1 << 20
_KEYS_NAMED = 10


class Record(NamedTuple):
    """The undecoded bytes of one document: a whole text file, a piece of a long one, or one line
    with its line break."""

    path: str
    line: int | None
    """Line number from 1, or None when the record is no line."""
    data: bytes
    fault: str | None = None
    """Why there is no document here."""
    piece: Piece | None = None
    """What the bytes are of a long document."""


class BadDocument(NamedTuple):
    """A document that cannot be used, and why."""

    path: str
    line: int | None
    reason: str

    def __str__(self) -> str:
        place = self.path if self.line is None else f"{self.path}, line {self.line}"
        return f"{place}: {self.reason}"


class BadRecord(ValueError):
    """A document that cannot be used; its message names the file, the line and the reason."""

    def __init__(
        self,
        path: str,
        line: int | None,
        reason: str,
        *,
        hint: str = "",
        good_documents: int = 0,
    ) -> None:
        self.document = BadDocument(path, line, reason)
        self.good_documents = good_documents
        """How many came before it."""
        super().__init__(f"{self.document}{hint}")


class Position(NamedTuple):
    """How far the input has been read: always between two records."""

    file: int = 0
    """Files before this one have been read to their end."""
    offset: int = 0
    """Bytes of this file's content."""
    line: int = 0
    """Lines of this file."""


class RecordReader:
    """Iterates over all documents of `files`, undecoded, from `position` on.

    A UTF-8 byte order mark at the start of a file is no part of its text and is dropped. A file
    without any content, one that is damaged and a line of more than `max_line_bytes` give a record
    with a fault. Memory grows neither with the files nor with their documents.
    """

    def __init__(
        self,
        files: Sequence[InputFile],
        position: Position,
        *,
        max_line_bytes: int = MAX_LINE_BYTES,
    ) -> None:
        self.position = position
        """That of the record after the last one given."""
        self.disk_bytes = sum(file.size for file in files[: position.file])
        """How much of the input on disk has been taken in."""
        self._files = files
        self._max_line_bytes = max_line_bytes

    def __iter__(self) -> Iterator[Record]:
        while self.position.file < len(self._files):
            index = self.position.file
            file = self._files[index]
            disk_bytes = self.disk_bytes
            try:
                with ByteStream(Path(file.path)) as stream:
                    records = self._text if file.is_text else self._lines
                    for record in records(file.path, stream):
                        self.disk_bytes = disk_bytes + stream.disk_bytes
                        yield record
            except DamagedInput as damage:
                record = self._damaged(file, str(damage))
                self.position = Position(index + 1)
                yield record
            self.position = Position(index + 1)
            self.disk_bytes = disk_bytes + file.size

    def _damaged(self, file: InputFile, reason: str) -> Record:
        offset, line = self.position.offset, self.position.line
        if not file.is_text:
            return Record(file.path, line + 1, b"", reason)
        rest = Piece(b"", 0, 0, offset, first=offset == 0, last=True)
        return Record(file.path, None, b"", reason, rest)

    def _lines(self, path: str, stream: ByteStream) -> Iterator[Record]:
        file, offset, number = self.position
        stream.skip(offset)
        longest = self._max_line_bytes
        while data := stream.read_line(longest + 1):
            fault = None
            offset += len(data)
            number += 1
            if len(data) > longest:
                fault = f"the line is longer than {longest / 2**20:g} MiB (--max-line-mib)"
                while not data.endswith(b"\n") and (data := stream.read_line(_SKIPPED_AT_ONCE)):
                    offset += len(data)
                data = b""
            elif number == 1:
                data = data.removeprefix(_BYTE_ORDER_MARK)
            self.position = Position(file, offset, number)
            yield Record(path, number, data, fault)
        if number == 0:
            self.position = Position(file + 1)
            yield Record(path, None, b"", "the file is empty")

    def _text(self, path: str, stream: ByteStream) -> Iterator[Record]:
        file, offset, _ = self.position
        start = stream.read(len(_BYTE_ORDER_MARK))
        mark = len(start) if start == _BYTE_ORDER_MARK else 0
        begin = max(0, offset - mark)
        # Where the context of the first piece begins.
        skipped = context_begin(begin)
        held = start[mark:][skipped:]
        stream.skip(max(0, skipped - len(start[mark:])))

        def read(size: int) -> bytes:
            nonlocal held
            data, held = held[:size], held[size:]
            return data + stream.read(size - len(data))

        for piece in cut(read, begin):
            end = Position(file, mark + piece.at + piece.end)
            self.position = Position(file + 1) if piece.last else end
            if piece.first and piece.last:
                yield Record(path, None, piece.data)
            else:
                yield Record(path, None, b"", None, piece)


def parse_texts(record: Record, keys: Sequence[str]) -> list[str]:
    """The record's text under each of `keys`; a plain text file has the same one for all.

    Raises `BadRecord` for a record with a fault, invalid UTF-8, a blank or broken line, a line that
    is no JSON object, a missing key, and a value that is empty or no string.
    """
    if record.fault is not None:
        raise _bad(record, record.fault)
    try:
        text = record.data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise _bad(record, invalid_utf_8(error, record.data)) from None
    if record.line is None:
        return [_checked(record, "the file", text)] * len(keys)
    text = text.strip()
    if not text:
        raise _bad(record, "the line is blank")
    try:
        document = json.loads(text)
    except json.JSONDecodeError as error:
        raise _bad(record, f"invalid JSON at column {error.colno} ({error.msg})") from None
    except ValueError:
        most = sys.get_int_max_str_digits()
        raise _bad(record, f"a number of more than {most:,} digits") from None
    except RecursionError:
        raise _bad(record, "the JSON is nested too deeply") from None
    if not isinstance(document, dict):
        raise _bad(record, f"not a JSON object but a {_json_type(document)}")
    texts = []
    for key in keys:
        if key not in document:
            raise _bad(record, f"no key {key!r} (--json-keys); its keys: {_named(document)}")
        texts.append(_checked(record, f"the value of {key!r}", document[key]))
    return texts


def invalid_utf_8(error: UnicodeDecodeError, data: bytes, at: int = 0) -> str:
    """What is wrong with `data`, which begins at byte `at` of its line or file, in words."""
    encoding = _OTHER_BYTE_ORDER_MARKS.get(data[:2]) if at == 0 else None
    hint = f"; its byte order mark says {encoding}" if encoding else ""
    return f"invalid UTF-8 at byte {at + error.start + 1} ({error.reason}{hint})"


def _checked(record: Record, what: str, text: object) -> str:
    if not isinstance(text, str):
        raise _bad(record, f"{what} is not a string but a {_json_type(text)}")
    if not text:
        raise _bad(record, f"{what} is empty")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        # JSON can spell half of a surrogate pair, which no tokenizer takes.
        raise _bad(record, f"{what} has an unpaired surrogate") from None
    return text


def _bad(record: Record, reason: str) -> BadRecord:
    return BadRecord(record.path, record.line, reason)


def _named(document: dict[str, object]) -> str:
    names = [repr(name) for name in list(document)[:_KEYS_NAMED]]
    more = len(document) - len(names)
    return ", ".join(names) + (f" and {more} more" if more else "") or "none"


def _json_type(value: object) -> str:
    if value is None:
        return "null"
    names = {bool: "boolean", int: "number", float: "number", str: "string", list: "list"}
    return names.get(type(value), "object")
