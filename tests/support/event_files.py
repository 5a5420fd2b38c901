"""TensorBoard's event files, written with TensorBoard's own package."""

from __future__ import annotations

import io
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.record_writer import RecordWriter
from tensorboard.util.tensor_util import make_tensor_proto


@dataclass(frozen=True)
class Entry:
    """One event: a number, a text or an array under a tag."""

    tag: str
    step: int
    value: Any
    """A float is stored plainly; a text, or an array of numpy, as a tensor."""
    wall_time: float = 0.0


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


def text(tag: str, words: str) -> Entry:
    """A text as `SummaryWriter.add_text` stores it."""
    return Entry(f"{tag}/text_summary", 0, np.array([words.encode()], dtype=object))


def write_event_file(path: Path, entries: Iterable[Entry], begin: float = 1000.0) -> bytes:
    """Write `entries` after the record that opens a file; returns the file's bytes."""
    first = Event(wall_time=begin, file_version="brain.Event:2")
    events = [first, *map(_event, entries)]
    return write_records(path, [event.SerializeToString() for event in events])


def write_records(path: Path, records: Iterable[bytes]) -> bytes:
    """Write records of any content; returns the file's bytes."""
    file = io.BytesIO()
    writer = RecordWriter(file)
    for record in records:
        writer.write(record)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(file.getvalue())
    return file.getvalue()


def _event(entry: Entry) -> Event:
    if isinstance(entry.value, float):
        value = Summary.Value(tag=entry.tag, simple_value=entry.value)
    else:
        value = Summary.Value(tag=entry.tag, tensor=make_tensor_proto(entry.value))
    return Event(wall_time=entry.wall_time, step=entry.step, summary=Summary(value=[value]))
