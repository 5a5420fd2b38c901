"""TensorBoard's event files: records of scalars and texts.

A record is its length (8 bytes, little-endian), that length's masked CRC-32C, the data and the
data's CRC (TensorFlow, `core/lib/io/record_writer.h`). The data is a protocol buffer `Event`
(`core/util/event.proto`, `core/framework/summary.proto`, `tensor.proto`); of it are read the wall
time, the step, and each value's tag with its number or its text. The package `tensorboard`, which
could read them too, is not needed where a curve is only drawn.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_HEADER = struct.Struct("<QI")
_CRC_BYTES = 4
_VARINT, _FIXED_64, _BYTES, _FIXED_32 = 0, 1, 2, 5
_SCALAR_FORMATS = {1: "<f", 2: "<d"}
"""`DT_FLOAT` and `DT_DOUBLE`."""
_NUMBERS_OF = {1: 5, 2: 6}
"""The fields of a tensor that hold its numbers, by its type."""
_STRING = 7


@dataclass(frozen=True)
class Value:
    """One value of an event."""

    tag: str
    step: int
    wall_time: float
    """Seconds since the epoch."""
    number: float | None
    """None where it is no scalar."""
    text: str | None = None


class CutOff(Exception):
    """A file ends, or stops making sense, within a record."""


def is_event_file(path: Path) -> bool:
    """Whether the file begins as an event file does."""
    with path.open("rb") as file:
        header = file.read(_HEADER.size)
    return len(header) == _HEADER.size and _valid(header)


def read_values(path: Path) -> Iterator[Value]:
    """The values of an event file, in the order in which they were written.

    Raises:
        CutOff: after the last whole record, where more follows that is none.
    """
    with path.open("rb") as file:
        while header := file.read(_HEADER.size):
            if len(header) < _HEADER.size or not _valid(header):
                raise CutOff(path)
            (length, _) = _HEADER.unpack(header)
            data = file.read(length)
            if len(data) < length or len(file.read(_CRC_BYTES)) < _CRC_BYTES:
                raise CutOff(path)
            try:
                values = list(_values(data))
            except struct.error:
                raise CutOff(path) from None
            yield from values


def _valid(header: bytes) -> bool:
    length, crc = _HEADER.unpack(header)
    return masked_crc32c(header[:8]) == crc


def masked_crc32c(data: bytes) -> int:
    """CRC-32C (Castagnoli, RFC 3720), turned by 15 bits and moved by a constant, as TensorFlow
    stores it."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc = _TABLE[(crc ^ byte) & 0xFF] ^ (crc >> 8)
    crc ^= 0xFFFFFFFF
    return (((crc >> 15) | (crc << 17)) + 0xA282EAD8) & 0xFFFFFFFF


def _crc_table() -> list[int]:
    table = []
    for byte in range(256):
        for _ in range(8):
            byte = (byte >> 1) ^ (0x82F63B78 if byte & 1 else 0)
        table.append(byte)
    return table


_TABLE = _crc_table()


def _values(event: bytes) -> Iterator[Value]:
    wall_time, step, summary = 0.0, 0, b""
    for number, content in _fields(event):
        if number == 1 and isinstance(content, bytes):
            (wall_time,) = struct.unpack("<d", content)
        elif number == 2 and isinstance(content, int):
            step = content
        elif number == 5 and isinstance(content, bytes):
            summary = content
    for number, content in _fields(summary):
        if number == 1 and isinstance(content, bytes):
            yield _value(content, step, wall_time)


def _value(content: bytes, step: int, wall_time: float) -> Value:
    tag, scalar, text = "", None, None
    for number, part in _fields(content):
        if not isinstance(part, bytes):
            continue
        if number == 1:
            tag = part.decode("utf-8", "replace")
        elif number == 2:
            (scalar,) = struct.unpack("<f", part)
        elif number == 8:
            scalar, text = _tensor(part)
    return Value(tag, step, wall_time, scalar, text)


def _tensor(content: bytes) -> tuple[float | None, str | None]:
    """The first number or the first text of a tensor."""
    fields = list(_fields(content))
    kind = next((part for number, part in fields if number == 1), 0)
    for number, part in fields:
        if not isinstance(part, bytes):
            continue
        if kind == _STRING and number == 8:
            return None, part.decode("utf-8", "replace")
        if isinstance(kind, int) and kind in _SCALAR_FORMATS:
            form = _SCALAR_FORMATS[kind]
            if number in (4, _NUMBERS_OF[kind]) and len(part) >= struct.calcsize(form):
                return struct.unpack_from(form, part)[0], None
    return None, None


def _fields(message: bytes) -> Iterator[tuple[int, int | bytes]]:
    """The fields of a protocol buffer by number: an integer, or the bytes of anything else."""
    at = 0
    while at < len(message):
        key, at = _varint(message, at)
        number, kind = key >> 3, key & 7
        if kind == _VARINT:
            content, at = _varint(message, at)
            yield number, content
            continue
        if kind == _BYTES:
            size, at = _varint(message, at)
        elif kind in (_FIXED_64, _FIXED_32):
            size = 8 if kind == _FIXED_64 else 4
        else:
            return
        yield number, message[at : at + size]
        at += size


def _varint(message: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while at < len(message):
        byte = message[at]
        at += 1
        value |= (byte & 0x7F) << shift
        shift += 7
        if byte < 0x80:
            break
    return value, at
