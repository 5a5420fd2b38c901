"""An indexed data set being written in Megatron's format, byte for byte.

Megatron's own builder keeps a document's length, and where it begins, as Python objects until the
end, and can't go on with a file that exists; so here the lengths are kept on disk too. Of Megatron
the tool needs nothing else, so it starts seconds sooner.
"""

import os
import struct
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import BinaryIO, NamedTuple

import numpy as np

MAX_DOCUMENT_TOKENS = 2**31 - 1
"""The index stores a document's length in 32 bits."""

_MAGIC = b"MMIDIDX\x00\x00"
_VERSION = 1
_DTYPE_CODES = {np.dtype(np.int32): 4, np.dtype(np.uint16): 8}
# Megatron counts in vocabularies that it might pad a little.
_VOCABULARY_OF_16_BITS = 65500
_INDEX_BLOCK = 1 << 16


class Extent(NamedTuple):
    """How much of a data set is written."""

    documents: int = 0
    """Those that have ended."""
    tokens: int = 0
    """Those of the open document included."""
    open_tokens: int = 0
    """Of a document whose end has not been written yet."""


def document_prefix(output_prefix: str, key: str) -> str:
    """Megatron's name for the data set of `key`: what follows `--data-path`, no suffix."""
    return f"{output_prefix}_{key}_document"


def token_dtype(vocabulary_size: int) -> np.dtype:
    """The integer type that Megatron stores tokens of such a vocabulary in."""
    return np.dtype(np.uint16 if vocabulary_size < _VOCABULARY_OF_16_BITS else np.int32)


class DataSetWriter:
    """Writes `{stem}.bin` and the documents' lengths; later the index, and all under their names.

    What is there already, up to `extent`, is kept. Raises `ValueError` where there is less.
    """

    def __init__(self, stem: Path, dtype: np.dtype, extent: Extent) -> None:
        self._dtype = dtype
        self._extent = extent
        self._bin, self._lengths, self._idx = unfinished_files(stem)
        # An open document may have been taken back since, and then it will be again.
        closed = extent.tokens - extent.open_tokens
        self._bin_file = _open(self._bin, closed * dtype.itemsize, extent.tokens * dtype.itemsize)
        self._lengths_file = _open(self._lengths, extent.documents * 4, extent.documents * 4)

    @property
    def extent(self) -> Extent:
        """How much is written by now."""
        return self._extent

    def add(
        self, ids: np.ndarray, lengths: Sequence[int], *, begins: bool = True, ends: bool = True
    ) -> None:
        """Append documents: `ids` holds them one after the other, `lengths` says how long each.

        Without `begins` the first one goes on with the open document; without `ends` the last one
        is left open.
        """
        documents, tokens, open_tokens = self._extent
        lengths = list(lengths)
        if lengths:
            assert not (begins and open_tokens)
            lengths[0] += open_tokens
            open_tokens = 0 if ends else lengths.pop()
        self._bin_file.write(np.ascontiguousarray(ids, self._dtype).data)
        self._lengths_file.write(np.asarray(lengths, "<i4").data)
        self._extent = Extent(documents + len(lengths), tokens + len(ids), open_tokens)

    def drop_open(self) -> None:
        """Take back the open document."""
        documents, tokens, open_tokens = self._extent
        if open_tokens:
            self._bin_file.seek((tokens - open_tokens) * self._dtype.itemsize)
            self._bin_file.truncate()
            self._extent = Extent(documents, tokens - open_tokens)

    def sync(self) -> None:
        """Have all that is written on disk."""
        for file in (self._bin_file, self._lengths_file):
            file.flush()
            os.fsync(file.fileno())

    def write_index(self) -> None:
        """Write Megatron's index from the lengths, in blocks: memory does not grow with them."""
        self.sync()
        documents = self._extent.documents
        with self._idx.open("wb") as idx, self._lengths.open("rb") as lengths:
            idx.write(_MAGIC)
            idx.write(struct.pack("<QB", _VERSION, _DTYPE_CODES[self._dtype]))
            # One sequence a document, and one more border than there are documents.
            idx.write(struct.pack("<QQ", documents, documents + 1))
            for block in _blocks(lengths):
                idx.write(block.data)
            begin = 0
            for block in _blocks(lengths):
                ends = begin + np.cumsum(block, dtype="<i8") * self._dtype.itemsize
                idx.write(np.concatenate([[begin], ends[:-1]]).astype("<i8").data)
                begin = int(ends[-1])
            for first in range(0, documents + 1, _INDEX_BLOCK):
                last = min(first + _INDEX_BLOCK, documents + 1)
                idx.write(np.arange(first, last, dtype="<i8").data)
            idx.flush()
            os.fsync(idx.fileno())

    def close(self) -> None:
        """Close the files, leaving them where they are."""
        self._bin_file.close()
        self._lengths_file.close()


def unfinished_files(stem: Path) -> tuple[Path, Path, Path]:
    """Where the data, the documents' lengths and the index are until they are published."""
    return stem.with_suffix(".bin"), stem.with_suffix(".lengths"), stem.with_suffix(".idx")


def publish(stem: Path, prefix: str) -> None:
    """Rename a written data set and its index to `{prefix}.bin` and `.idx`; when that has been
    interrupted, do the rest. Raises `ValueError` where nothing is left to be renamed and they are
    not there."""
    bin_, _, idx = unfinished_files(stem)
    final_bin, final_idx = Path(f"{prefix}.bin"), Path(f"{prefix}.idx")
    if bin_.exists():
        # A reader needs both files. With the old index gone first, nobody can read an old index
        # with new data, whenever this is interrupted.
        final_idx.unlink(missing_ok=True)
        bin_.replace(final_bin)
    if idx.exists():
        idx.replace(final_idx)
    if not (final_bin.exists() and final_idx.exists()):
        raise ValueError(
            f"{prefix}: an earlier run wrote this data set, but its files are gone; --start-over "
            "begins anew"
        )


def _open(path: Path, least: int, size: int) -> BinaryIO:
    """Open a file to go on writing from `size` on; it must have at least `least` bytes."""
    path.touch()
    found = path.stat().st_size
    if found < least:
        raise ValueError(
            f"{path}: has {found:,} bytes, of {least:,} that an unfinished run wrote; "
            "--start-over begins anew"
        )
    file = path.open("r+b")
    file.truncate(size)
    file.seek(size)
    return file


def _blocks(lengths: BinaryIO) -> Iterator[np.ndarray]:
    lengths.seek(0)
    while data := lengths.read(_INDEX_BLOCK * 4):
        yield np.frombuffer(data, "<i4")
