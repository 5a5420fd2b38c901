"""From what a user names, logs and TensorBoard's folders or files, to runs with distinct names."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron.boost.plotting.event_file import EVENT_FILES, is_event_file
from megatron.boost.plotting.event_run import read_events
from megatron.boost.plotting.history import Run
from megatron.boost.plotting.log_file import read_log


@dataclass(frozen=True)
class _Source:
    """Where a run is read from."""

    name: str | None
    """As the user calls it."""
    place: Path
    """The file, or the folder of event files."""
    events: Sequence[Path]
    """Its event files; none: `place` is a log."""

    def read(self, label: str) -> Run:
        """The run, under a name that tells it from the others."""
        return read_events(self.events, label) if self.events else read_log(self.place, label)

    @property
    def parts(self) -> list[str]:
        """What the place can be called by, the last first; without a log's suffix."""
        path = self.place.resolve()
        return [path.stem if path.is_file() else path.name, *reversed(path.parent.parts)]


def read_runs(sources: Sequence[str]) -> list[Run]:
    """The runs of log files, event files and folders of event files, each below which is a run of
    its own, as in TensorBoard. `NAME=PATH` names a run.

    Raises:
        ValueError: for a path that is missing, empty or has no training loss.
    """
    found = [each for source in sources for each in _found(source)]
    return [each.read(label) for each, label in zip(found, _labels(found), strict=True)]


def _found(source: str) -> list[_Source]:
    name, path = named_path(source)
    if not path.exists():
        raise ValueError(f"{path}: there is no such file or folder")
    if path.is_dir():
        folders = _folders(path)
        if name is not None and len(folders) > 1:
            raise ValueError(
                f"{source}: {path} has the event files of {len(folders)} runs, and a name is for "
                f"one; nearest legal value: {name}={folders[0][0]}"
            )
        return [_Source(name, folder, files) for folder, files in folders]
    if path.stat().st_size == 0:
        raise ValueError(f"{path}: is empty")
    return [_Source(name, path, [path] if is_event_file(path) else [])]


def named_path(source: str) -> tuple[str | None, Path]:
    """NAME=PATH, or a path, in its parts."""
    name, equals, path = source.partition("=")
    if equals and name and path and not Path(source).exists():
        return name, Path(path)
    return None, Path(source)


def _folders(path: Path) -> list[tuple[Path, list[Path]]]:
    """The folders with event files, `path` and those below it, with the files."""
    by_folder: dict[Path, list[Path]] = {}
    for file in sorted(path.rglob(EVENT_FILES)):
        if file.is_file():
            by_folder.setdefault(file.parent, []).append(file)
    if not by_folder:
        logs = sorted(path.rglob("*.log")) + sorted(path.rglob("*.txt"))
        nearest = f"; nearest legal value: {logs[0]}" if logs else ""
        raise ValueError(
            f"{path}: is a folder without TensorBoard's event files ({EVENT_FILES}){nearest}"
        )
    return sorted(by_folder.items())


def _labels(sources: Sequence[_Source]) -> list[str]:
    """A name for each run: the one given, else as much of the end of its path as tells it from the
    others.

    Raises:
        ValueError: for a place or a name that is given twice.
    """
    for place, times in Counter(source.place.resolve() for source in sources).items():
        if times > 1:
            raise ValueError(f"{place}: is given {times} times")
    all_parts = [source.parts for source in sources]
    while len(sources) > 1 and len({parts[0] for parts in all_parts}) == 1:
        # What all of them are called, such as log, tells nothing.
        all_parts = [parts[1:] for parts in all_parts]
    labels = []
    for source, parts in zip(sources, all_parts, strict=True):
        length = 1
        while sum(other[:length] == parts[:length] for other in all_parts) > 1:
            length += 1
        labels.append(source.name or "/".join(reversed(parts[:length])))
    for label, times in Counter(labels).items():
        if times > 1:
            raise ValueError(f"{label}: names {times} runs; give each a name, NAME=PATH")
    return labels
