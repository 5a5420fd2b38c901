"""An indexed data set on disk, written by Megatron's own builder and renamed when whole."""

import logging
import os
import warnings
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Self

import numpy as np

if TYPE_CHECKING:
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder


def document_prefix(output_prefix: str, key: str) -> str:
    """Megatron's name for the data set of `key`: what follows `--data-path`, no suffix."""
    return f"{output_prefix}_{key}_document"


class IndexedOutput:
    """`PREFIX.bin` and `PREFIX.idx` being written; a context manager.

    Both appear under their names when the block ends without an exception, and not at all
    otherwise. The folder is made when it is missing.
    """

    def __init__(self, prefix: str, vocabulary_size: int) -> None:
        self._bin, self._idx = Path(f"{prefix}.bin"), Path(f"{prefix}.idx")
        self._partial_bin = _partial(self._bin)
        self._partial_idx = _partial(self._idx)
        self._bin.parent.mkdir(parents=True, exist_ok=True)
        self._builder = _megatron_builder(self._partial_bin, vocabulary_size)

    def add_documents(self, ids: np.ndarray, lengths: Sequence[int]) -> None:
        """Append documents: `ids` holds them one after the other, `lengths` says how long each."""
        start = 0
        for length in lengths:
            self._builder.add_document(ids[start : start + length], [length])
            start += length

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            if kind is None:
                self._builder.finalize(str(self._partial_idx))
                # A reader needs both files. With the old index gone first, nobody can read an old
                # index with new data, whenever this is interrupted.
                self._idx.unlink(missing_ok=True)
                self._partial_bin.replace(self._bin)
                self._partial_idx.replace(self._idx)
        finally:
            self._builder.data_file.close()
            self._partial_bin.unlink(missing_ok=True)
            self._partial_idx.unlink(missing_ok=True)


def _partial(path: Path) -> Path:
    return path.with_name(f"{path.name}.{os.getpid()}.partial")


def _megatron_builder(path: Path, vocabulary_size: int) -> "IndexedDatasetBuilder":
    # Importing Megatron takes seconds and warns about GPU libraries that play no part here.
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            from megatron.core.datasets.indexed_dataset import DType, IndexedDatasetBuilder
    finally:
        logging.disable(logging.NOTSET)
    return IndexedDatasetBuilder(str(path), dtype=DType.optimal_dtype(vocabulary_size))
