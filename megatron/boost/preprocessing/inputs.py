"""Finding input files, and noticing when they change."""

import difflib
from collections.abc import Sequence
from pathlib import Path
from typing import Literal, NamedTuple

from megatron.boost.preprocessing.streams import COMPRESSED_SUFFIXES

TEXT_SUFFIXES = (".txt",)
JSON_LINES_SUFFIXES = (".jsonl", ".json")
SUFFIXES = TEXT_SUFFIXES + JSON_LINES_SUFFIXES


class InputFile(NamedTuple):
    """A file as it was when the run began."""

    path: str
    size: int
    """In bytes, on disk."""
    modified: int
    """In nanoseconds since 1970."""

    @classmethod
    def of(cls, path: Path) -> "InputFile":
        """The file at `path` as it is now."""
        status = path.stat()
        return cls(str(path), status.st_size, status.st_mtime_ns)

    @property
    def is_text(self) -> bool:
        """Whether the file is one document, and not one a line."""
        return _kind(Path(self.path)) in TEXT_SUFFIXES


def find_inputs(inputs: Sequence[Path]) -> list[Path]:
    """The files that `inputs` (files and folders) stand for, in the order they are read.

    A folder stands for all its .txt, .jsonl and .json files at any depth, also compressed ones
    (.gz, .zst), sorted by relative path. Raises `ValueError` for a path that does not exist, a file
    of another kind and a folder without any of these files.
    """
    files: list[Path] = []
    for path in inputs:
        if path.is_dir():
            found = [file for file in path.rglob("*") if _is_supported(file) and file.is_file()]
            if not found:
                raise ValueError(f"--input {path}: the folder has no {_KINDS}")
            files.extend(sorted(found, key=lambda file: file.relative_to(path).as_posix()))
        elif not path.is_file():
            raise ValueError(f"--input {path}: {why_not(path, 'file or folder')}")
        elif not _is_supported(path):
            raise ValueError(f"--input {path}: not a {_KINDS}")
        else:
            files.append(path)
    return files


def why_not(path: Path, wanted: Literal["file", "folder", "file or folder"]) -> str:
    """Why a path is not what is wanted: there is nothing, and what is nearest, or another thing."""
    if path.is_dir():
        return "is a folder, and a file is wanted"
    if path.is_file():
        return "is a file, and a folder is wanted"
    if path.exists():
        return f"is no regular file; a {wanted} is wanted"
    if path.is_symlink():
        return f"is a link to {path.readlink()}, which is not there"
    return f"no such {wanted}{nearest_path(path)}"


def nearest_path(path: Path) -> str:
    """`; the nearest is …` for a path that does not exist, or nothing when none is near."""
    if not path.parent.is_dir():
        return ""
    siblings = [sibling.name for sibling in path.parent.iterdir() if sibling.name != path.name]
    near = difflib.get_close_matches(path.name, siblings, n=1)
    return f"; the nearest is {path.parent / near[0]}" if near else ""


def _is_supported(path: Path) -> bool:
    return _kind(path) in SUFFIXES


def _kind(path: Path) -> str:
    if path.suffix.lower() in COMPRESSED_SUFFIXES:
        path = path.with_suffix("")
    return path.suffix.lower()


def _or(words: Sequence[str]) -> str:
    return f"{', '.join(words[:-1])} or {words[-1]}"


_KINDS = f"{_or(SUFFIXES)} file (nor one with {_or(COMPRESSED_SUFFIXES)} after it)"
