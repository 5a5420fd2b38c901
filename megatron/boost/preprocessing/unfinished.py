"""What a run keeps beside its output until that is whole, so that a killed one can go on.

`PREFIX.partial/` holds the data sets as far as they are written, a description of the run, and how
far it was when it was last saved. What was written after that is written again.
"""

import fcntl
import json
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, Self

from megatron.boost.preprocessing.dataset import Extent
from megatron.boost.preprocessing.inputs import InputFile
from megatron.boost.preprocessing.records import BadDocument, Position

FIRST_BAD_KEPT = 10

# No .json after their names: the folder may lie within one that is read.
_LOCK = "lock"
_DESCRIPTION = "description"
_PROGRESS = "progress"


@dataclass(frozen=True, kw_only=True)
class State:
    """How far a run is: everything that it needs to go on."""

    position: Position = Position()
    extents: tuple[Extent, ...]
    """Of the data set of each key."""
    dropping: bool = False
    """Whether the rest of a long document, of which a piece was bad, is to be left out."""
    text_bytes: int = 0
    """Of the input, decompressed."""
    bad_documents: int = 0
    first_bad: tuple[BadDocument, ...] = ()
    """The first ten."""
    whole: bool = False
    """Whether all data sets and their indices are written."""

    @property
    def documents(self) -> int:
        """The good ones that have been written to their end."""
        return self.extents[0].documents

    def with_bad(self, bad: Sequence[BadDocument]) -> "State":
        """This state after some more bad documents."""
        return replace(
            self,
            bad_documents=self.bad_documents + len(bad),
            first_bad=(*self.first_bad, *bad)[:FIRST_BAD_KEPT],
        )

    @classmethod
    def from_json(cls, text: str) -> "State":
        """The state that `to_json` wrote."""
        values = json.loads(text)
        return cls(
            **values
            | {
                "position": Position(*values["position"]),
                "extents": tuple(Extent(*extent) for extent in values["extents"]),
                "first_bad": tuple(BadDocument(*bad) for bad in values["first_bad"]),
            }
        )

    def to_json(self) -> str:
        """All of it, in one line."""
        return json.dumps(asdict(self))


class UnfinishedRun:
    """The folder of one run; a context manager that holds a lock on it.

    `before` is the state of an earlier run that this one goes on with, or None. What an earlier run
    left is emptied where the input has changed, since nobody can go on with that, and with
    `start_over`. One of other settings could still go on, and is refused. `note` is told, in words,
    what became of it. Raises `ValueError` when it is refused, is damaged, or is still running.

    The folder is removed at the end of the block when nothing was saved, and after `forget`.
    """

    def __init__(
        self,
        folder: Path,
        settings: Mapping[str, str],
        inputs: Sequence[InputFile],
        *,
        start_over: bool,
        note: Callable[[str], None],
    ) -> None:
        self.folder = folder
        self._lock = _locked(folder)
        try:
            self.before = None if start_over else self._earlier(settings, inputs, note)
            if self.before is None:
                self._begin(settings, inputs)
        except BaseException:
            self._lock.close()
            raise
        self._keep = self.before is not None

    def save(self, state: State) -> None:
        """Store how far the run is; what `state` counts as written must be on disk."""
        _write(self.folder / _PROGRESS, state.to_json())
        self._keep = True

    def forget(self) -> None:
        """Have the folder removed when the block ends."""
        self._keep = False

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if not self._keep:
            shutil.rmtree(self.folder)
        self._lock.close()

    def _earlier(
        self,
        settings: Mapping[str, str],
        inputs: Sequence[InputFile],
        note: Callable[[str], None],
    ) -> State | None:
        if not (self.folder / _DESCRIPTION).exists():
            return None
        try:
            description = json.loads((self.folder / _DESCRIPTION).read_text(encoding="utf-8"))
            earlier_settings = dict(description["settings"])
            earlier_inputs = [InputFile(*file) for file in description["inputs"]]
            state = None
            if (self.folder / _PROGRESS).exists():
                state = State.from_json((self.folder / _PROGRESS).read_text(encoding="utf-8"))
        except (ValueError, TypeError, KeyError) as error:
            raise ValueError(
                f"{self.folder}: what an unfinished run left cannot be read ({error!r}); "
                "--start-over begins anew"
            ) from None
        if earlier_inputs != inputs:
            note(f"{_difference(earlier_inputs, inputs)} since the unfinished run: beginning anew")
            return None
        for name, value in settings.items():
            if (earlier := earlier_settings.get(name)) != value:
                raise ValueError(
                    f"{name} {value}: {self.folder} holds an unfinished run with {earlier}, and "
                    "that can only go on as it was begun; --start-over begins anew"
                )
        return state

    def _begin(self, settings: Mapping[str, str], inputs: Sequence[InputFile]) -> None:
        for path in self.folder.iterdir():
            if path.name != _LOCK:
                path.unlink()
        description = {"settings": dict(settings), "inputs": inputs}
        _write(self.folder / _DESCRIPTION, json.dumps(description))


def _locked(folder: Path) -> BinaryIO:
    """The open lock file of `folder`, which is made where it is missing."""
    while True:
        folder.mkdir(parents=True, exist_ok=True)
        try:
            lock = (folder / _LOCK).open("wb")
        except FileNotFoundError:
            continue  # another run has just finished and removed the folder
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            lock.close()
            raise ValueError(f"{folder}: another run is writing there") from None
        try:
            if os.path.samestat(os.fstat(lock.fileno()), (folder / _LOCK).stat()):
                return lock
        except FileNotFoundError:
            pass
        lock.close()


def _difference(earlier: Sequence[InputFile], now: Sequence[InputFile]) -> str:
    for old, new in zip(earlier, now, strict=False):
        if old.path != new.path:
            break
        if old != new:
            return f"{new.path} has changed"
    return "the files of --input have changed"


def _write(path: Path, text: str) -> None:
    partial = path.with_name(f"{path.name}.new")
    with partial.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)
