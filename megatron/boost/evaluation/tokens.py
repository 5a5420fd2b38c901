"""The tokens to evaluate: a Megatron data set or text files as one stream of documents."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Protocol

import numpy as np

from megatron.boost.preprocessing.inputs import nearest_path, why_not

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Documents = Literal["joined", "separate"]
_TOKENS_AT_A_TIME = 1 << 22


class TokenStream(Protocol):
    """Documents one after the other, as one long sequence of tokens."""

    boundaries: np.ndarray
    """Where the documents begin, int64, and at the end where the last one stops:
    `[documents + 1]`."""

    def read(self, start: int, stop: int) -> np.ndarray:
        """The tokens from `start` up to `stop`, int64 `[stop - start]`."""


@dataclass(frozen=True)
class Segment:
    """A part of the stream over whose ends no context reaches."""

    start: int
    stop: int
    prefix: int | None
    """The token that is read before the first one. None: nothing predicts the first one, which is
    then context only."""


class TokensInMemory:
    """A stream of documents that are arrays."""

    def __init__(self, documents: Sequence[np.ndarray]) -> None:
        self.boundaries = np.cumsum([0, *map(len, documents)], dtype=np.int64)
        self._tokens = np.concatenate([np.asarray(ids, np.int64) for ids in documents])

    def read(self, start: int, stop: int) -> np.ndarray:
        """See `TokenStream`."""
        return self._tokens[start:stop]


class IndexedTokens:
    """A stream of the documents of Megatron's .bin and .idx, read as they are asked for.

    Args:
        prefix: the two files' path without its ending.
        split: Megatron's `--split`, of which the validation part is taken; None: everything.

    Raises:
        ValueError: if there are no such files, they cannot be read, or that part is empty.
    """

    def __init__(self, prefix: str, split: str | None = None) -> None:
        from megatron.core.datasets.indexed_dataset import IndexedDataset

        path = Path(prefix)
        if path.suffix in (".bin", ".idx") and path.is_file():
            raise ValueError(
                f"--data {prefix}: is one of two files; nearest legal value: {path.with_suffix('')}"
            )
        for ending in (".idx", ".bin"):
            file = Path(prefix + ending)
            if not file.is_file():
                near = nearest_path(file)
                if not near.endswith(ending):
                    near = ""
                near = near.removesuffix(ending)
                raise ValueError(f"--data {prefix}: there is no {file}{near}")
        try:
            self._data = IndexedDataset(prefix)
        except Exception as failure:  # whatever damaged files make the reader raise
            raise ValueError(f"--data {prefix}: cannot be read: {failure}") from failure
        lengths = np.asarray(self._data.sequence_lengths, np.int64)
        self._starts = np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths)])
        documents = np.asarray(self._data.document_indices, np.int64)
        if split is not None:
            first, last = _validation_part(split, len(lengths))
            inside = documents[(first < documents) & (documents < last)]
            documents = np.array([first, *inside, last])
        self.boundaries = self._starts[documents]

    def read(self, start: int, stop: int) -> np.ndarray:
        """See `TokenStream`."""
        parts = []
        sequence = int(np.searchsorted(self._starts, start, side="right")) - 1
        while start < stop:
            end = min(stop, int(self._starts[sequence + 1]))
            offset = start - int(self._starts[sequence])
            parts.append(self._data.get(sequence, offset, end - start))
            start, sequence = end, sequence + 1
        return np.concatenate([np.zeros(0, np.int64), *parts])


def _validation_part(split: str, sequences: int) -> tuple[int, int]:
    """From where to where Megatron's GPT data set of these shares takes the validation part."""
    from megatron.core.datasets.blended_megatron_dataset_config import (
        convert_split_vector_to_split_matrix,
        parse_and_normalize_split,
    )

    if not re.fullmatch(r"\d+(\.\d+)?(,\d+(\.\d+)?){0,2}", split) or not re.search("[1-9]", split):
        raise ValueError(f"--split {split}: is no list of shares; nearest legal value: 98,2,0")
    part = convert_split_vector_to_split_matrix(parse_and_normalize_split(split))[1] or (0.0, 0.0)
    first, last = (round(share * float(sequences)) for share in part)
    if first >= last:
        raise ValueError(
            f"--split {split}: leaves no document of {sequences} for validation; nearest legal "
            "value: leave it out, and all of them are evaluated"
        )
    return first, last


def tokens_of_text(
    files: Sequence[Path], tokenizer: PreTrainedTokenizerBase
) -> tuple[TokensInMemory, list[int]]:
    """The tokens of text files, one document each, and each one's size in bytes.

    They are encoded as for training, with the special tokens that the tokenizer itself puts around
    a text (LLaMA's BOS). A byte order mark is no part of the text.

    Raises:
        ValueError: for a file that is not there, is not UTF-8 or is empty.
    """
    documents, sizes = [], []
    for file in files:
        if not file.is_file():
            raise ValueError(f"--text {file}: {why_not(file, 'file')}")
        try:
            text = file.read_bytes().decode("utf-8-sig")
        except UnicodeDecodeError as error:
            raise ValueError(
                f"--text {file}: invalid UTF-8 at byte {error.start + 1} ({error.reason})"
            ) from None
        if not text:
            raise ValueError(f"--text {file}: the file is empty")
        sizes.append(len(text.encode("utf-8")))
        documents.append(np.asarray(tokenizer(text, verbose=False)["input_ids"], np.int64))
    return TokensInMemory(documents), sizes


def segments(
    stream: TokenStream, documents: Documents, prefix: int | None, begins: int | None
) -> list[Segment]:
    """The parts of the stream that are scored apart.

    Args:
        stream: what is to be scored.
        documents: "joined": one, in which a document is read after the one before it, as in
            training; "separate": each document by itself.
        prefix: the token to read before the first one; None: there is none.
        begins: the token that begins documents, if there is one. A segment that has it needs no
            prefix: it is what the others are given.
    """
    bounds = stream.boundaries
    if documents == "joined":
        bounds = bounds[[0, -1]]
    found = []
    for start, stop in zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True):
        if start == stop:
            continue
        begun = begins is not None and int(stream.read(start, start + 1)[0]) == begins
        found.append(Segment(start, stop, None if begun else prefix))
    return found


def refuse_foreign_tokens(stream: TokenStream, vocab_size: int, where: str) -> None:
    """Raise ValueError for a token that the model does not have.

    Args:
        stream: all of it is looked through.
        vocab_size: the model's number of tokens.
        where: the flag that names the data, and its value.
    """
    first, last = stream.boundaries[[0, -1]].tolist()
    for start in range(first, last, _TOKENS_AT_A_TIME):
        part = stream.read(start, min(start + _TOKENS_AT_A_TIME, last))
        largest, smallest = int(part.max()), int(part.min())
        if largest >= vocab_size or smallest < 0:
            token = largest if largest >= vocab_size else smallest
            raise ValueError(
                f"{where}: has token {token}, and the model's are 0 to {vocab_size - 1}; nearest "
                "legal value: data made with the model's own tokenizer"
            )


def text_bytes(
    stream: TokenStream,
    scored_from: Sequence[Segment],
    tokenizer: PreTrainedTokenizerBase,
    rank: int = 0,
    ranks: int = 1,
) -> int:
    """The UTF-8 bytes of the text of the scored tokens, as the tokenizer decodes them.

    Special tokens, such as an end of document, have none. Of several ranks each counts its share of
    the documents; the sum over them is the size.

    Args:
        stream: the tokens.
        scored_from: the segments; the first token of one without a prefix is not scored.
        tokenizer: the one that made them.
        rank: this one of `ranks`.
        ranks: how many share the work.
    """
    size = 0
    for number, ids in enumerate(_documents(stream, scored_from)):
        if number % ranks == rank:
            size += len(tokenizer.decode(ids.tolist(), skip_special_tokens=True).encode("utf-8"))
    return size


def _documents(stream: TokenStream, scored_from: Sequence[Segment]) -> Iterator[np.ndarray]:
    """The scored tokens, document by document."""
    unscored = {segment.start for segment in scored_from if segment.prefix is None}
    bounds = stream.boundaries.tolist()
    for start, stop in zip(bounds[:-1], bounds[1:], strict=True):
        first = start + (start in unscored)
        if first < stop:
            yield stream.read(first, stop)
