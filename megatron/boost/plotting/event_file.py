"""TensorBoard's event files: records of scalars and texts, read with TensorBoard's own package.

Its reader that needs no TensorFlow is taken by name: `EventFileLoader` would start TensorFlow where
that is installed, and ends alike at the end of a file and at a record that is damaged.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

EVENT_FILES = "*tfevents*"
"""The names of event files, by which TensorBoard knows them too."""


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
    """A file ends within a record, as while it is written, or has a damaged one."""


def is_event_file(path: Path) -> bool:
    """Whether the file is called as event files are."""
    return fnmatch(path.name, EVENT_FILES)


def read_values(path: Path) -> Iterator[Value]:
    """The values of an event file, in the order in which they were written.

    Raises:
        CutOff: after the last whole record, where more follows that is none.
    """
    # Takes half a second, which runs whose logs alone are read need not wait for.
    from google.protobuf.message import DecodeError
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.tensorflow_stub.errors import DataLossError, OutOfRangeError
    from tensorboard.compat.tensorflow_stub.pywrap_tensorflow import PyRecordReader_New

    reader = PyRecordReader_New(str(path))
    while True:
        try:
            reader.GetNext()
            event = Event.FromString(reader.record())
        except OutOfRangeError:
            return
        except (DataLossError, DecodeError):
            raise CutOff(path) from None
        for value in event.summary.value:
            number, text = _content(value)
            yield Value(value.tag, event.step, event.wall_time, number, text)


def _content(value: Any) -> tuple[float | None, str | None]:
    """The number or the text of a `Summary.Value`, stored plainly or as a tensor."""
    from tensorboard.util.tensor_util import make_ndarray

    if value.HasField("simple_value"):
        return value.simple_value, None
    if not value.HasField("tensor"):
        return None, None
    try:
        array = make_ndarray(value.tensor)
    except (TypeError, ValueError):
        # Some plugins store tensors without a type, for what they say of them.
        return None, None
    if array.size != 1:
        return None, None
    item = array.item()
    if isinstance(item, bytes):
        return None, item.decode("utf-8", "replace")
    return (float(item), None) if isinstance(item, int | float) else (None, None)
