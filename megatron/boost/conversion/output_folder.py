"""A folder that is there whole or not at all."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def refuse_occupied(folder: Path, flag: str = "") -> None:
    """Raise ValueError if `folder` is a file or a broken link, is a folder with something in it, or
    would be below a file.

    Args:
        folder: where a folder shall be.
        flag: the one that names it, for messages.
    """
    folder = folder.absolute()
    shown = f"{flag} {folder}".strip()
    if folder.is_dir():
        if any(folder.iterdir()):
            raise ValueError(
                f"{shown}: is there already and not empty; nearest legal value: "
                f"{_free_name(folder)}"
            )
        return
    if folder.exists():
        raise ValueError(f"{shown}: is a file; nearest legal value: a folder that is not there yet")
    for path in (folder, *folder.parents):
        if path.is_symlink() and not path.exists():
            raise ValueError(
                f"{shown}: {path} is a link to {path.readlink()}, which is not there; "
                f"nearest legal value: {_free_name(folder)}"
            )
        if path.exists():
            if not path.is_dir():
                raise ValueError(
                    f"{shown}: {path} is a file; nearest legal value: {path.parent / folder.name}"
                )
            return


@contextmanager
def new_folder(folder: Path) -> Iterator[Path]:
    """Context with a temporary folder beside `folder`, renamed to it at the end and removed if the
    context is left by an exception. What a killed process left of the same folder is swept up.

    Raises:
        ValueError: if `folder` is occupied.
    """
    refuse_occupied(folder)
    folder = folder.absolute()
    folder.parent.mkdir(parents=True, exist_ok=True)
    _sweep(folder)
    partial = folder.parent / f".{folder.name}.{os.getpid()}.partial"
    partial.mkdir()
    try:
        yield partial
        # An empty folder gives way to a rename.
        partial.rename(folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _sweep(folder: Path) -> None:
    """Remove the temporary folders of processes that are no more."""
    for left in folder.parent.glob(f".{folder.name}.*.partial"):
        pid = left.name.removesuffix(".partial").rpartition(".")[2]
        if pid.isdecimal() and not _is_alive(int(pid)):
            shutil.rmtree(left, ignore_errors=True)


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _free_name(folder: Path) -> Path:
    """A folder of a similar name that is not there."""
    number = 2
    while folder.with_name(f"{folder.name}-{number}").exists():
        number += 1
    return folder.with_name(f"{folder.name}-{number}")
