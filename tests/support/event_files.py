"""TensorBoard's event files, written by the protobuf library from the schema of the three messages
(`event.proto`, `summary.proto`, `tensor.proto` of TensorFlow; the fields that are written here)."""

from __future__ import annotations

import struct
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

from megatron.boost.plotting.event_file import masked_crc32c

_FLOAT, _DOUBLE, _STRING = 1, 2, 7
_FIELD = descriptor_pb2.FieldDescriptorProto
_MESSAGES: dict[str, dict[str, tuple[int, int, str | None]]] = {
    "Event": {
        "wall_time": (1, _FIELD.TYPE_DOUBLE, None),
        "step": (2, _FIELD.TYPE_INT64, None),
        "file_version": (3, _FIELD.TYPE_STRING, None),
        "summary": (5, _FIELD.TYPE_MESSAGE, "Summary"),
    },
    "Summary": {"value": (1, _FIELD.TYPE_MESSAGE, "Value")},
    "Value": {
        "tag": (1, _FIELD.TYPE_STRING, None),
        "simple_value": (2, _FIELD.TYPE_FLOAT, None),
        "tensor": (8, _FIELD.TYPE_MESSAGE, "TensorProto"),
    },
    "TensorProto": {
        "dtype": (1, _FIELD.TYPE_INT32, None),
        "tensor_content": (4, _FIELD.TYPE_BYTES, None),
        "float_val": (5, _FIELD.TYPE_FLOAT, None),
        "double_val": (6, _FIELD.TYPE_DOUBLE, None),
        "string_val": (8, _FIELD.TYPE_BYTES, None),
    },
}
_REPEATED = ("value", "float_val", "double_val", "string_val")


@dataclass(frozen=True)
class Entry:
    """One event: a number or a text under a tag."""

    tag: str
    step: int
    value: float | str
    wall_time: float = 0.0
    style: str = "simple"
    """How a number is stored: "simple", or as a tensor, "float", "double" or "content"."""


def scalars(
    losses: Iterable[tuple[int, float]], begin: float = 1000.0, every: float = 2.0
) -> list[Entry]:
    """What Megatron writes of some training losses, four samples a step, `every` seconds each."""
    entries = []
    for number, (step, loss) in enumerate(losses):
        at = begin + number * every
        entries.append(Entry("learning-rate", step, 1e-3, at))
        entries.append(Entry("lm loss", step, loss, at))
        entries.append(Entry("lm loss vs samples", 4 * step, loss, at))
    return entries


def write_event_file(path: Path, entries: Iterable[Entry], begin: float = 1000.0) -> bytes:
    """Write `entries` after the record that opens a file; returns the file's bytes."""
    first = _message("Event")(wall_time=begin, file_version="brain.Event:2")
    data = b"".join(_record(event.SerializeToString()) for event in [first, *map(_event, entries)])
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    return data


def _record(data: bytes) -> bytes:
    length = struct.pack("<Q", len(data))
    crcs = (struct.pack("<I", masked_crc32c(part)) for part in (length, data))
    return length + next(crcs) + data + next(crcs)


def _event(entry: Entry) -> Any:
    value = _message("Value")(tag=entry.tag)
    if isinstance(entry.value, str):
        value.tag += "/text_summary"
        value.tensor.dtype = _STRING
        value.tensor.string_val.append(entry.value.encode())
    elif entry.style == "simple":
        value.simple_value = entry.value
    elif entry.style == "content":
        value.tensor.dtype, value.tensor.tensor_content = _FLOAT, struct.pack("<f", entry.value)
    else:
        value.tensor.dtype = {"float": _FLOAT, "double": _DOUBLE}[entry.style]
        getattr(value.tensor, f"{entry.style}_val").append(entry.value)
    summary = _message("Summary")(value=[value])
    return _message("Event")(wall_time=entry.wall_time, step=entry.step, summary=summary)


@cache
def _pool() -> descriptor_pool.DescriptorPool:
    file = descriptor_pb2.FileDescriptorProto(name="event.proto", syntax="proto3", package="events")
    for name, fields in _MESSAGES.items():
        message = file.message_type.add(name=name)
        for field, (number, kind, of) in fields.items():
            message.field.add(
                name=field,
                number=number,
                type=kind,
                type_name=f".events.{of}" if of else None,
                label=_FIELD.LABEL_REPEATED if field in _REPEATED else _FIELD.LABEL_OPTIONAL,
            )
    # A number of 0 is stored too, as members of a oneof are.
    value = next(message for message in file.message_type if message.name == "Value")
    value.oneof_decl.add(name="value")
    for member in value.field:
        if member.name in ("simple_value", "tensor"):
            member.oneof_index = 0
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return pool


def _message(name: str) -> Any:
    return message_factory.GetMessageClass(_pool().FindMessageTypeByName(f"events.{name}"))
