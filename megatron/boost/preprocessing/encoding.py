"""Turning records into token ids with a Hugging Face tokenizer.

Nothing here imports Megatron or, in a worker process, transformers: workers start in no time.
"""

import hashlib
import io
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from megatron.boost.preprocessing.dataset import token_dtype
from megatron.boost.preprocessing.inputs import why_not
from megatron.boost.preprocessing.pieces import (
    PIECE_BYTES,
    NoJoint,
    cut,
    encode_piece,
)
from megatron.boost.preprocessing.records import (
    BadDocument,
    BadRecord,
    Position,
    Record,
    RecordReader,
    invalid_utf_8,
    parse_texts,
)

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerBase

BATCH_BYTES = 1 << 19
BATCH_RECORDS = 2048


@dataclass(frozen=True)
class EncodingSettings:
    """What decides a record's token ids."""

    tokenizer_model: str
    """Folder of a Hugging Face tokenizer, or its tokenizer.json."""
    keys: tuple[str, ...] = ("text",)
    append_eod: bool = False


class Batch(NamedTuple):
    """Some consecutive records, or one piece of a long document."""

    records: list[Record]
    end: Position
    """Where the next batch begins."""
    disk_bytes: int
    """How much of the input on disk has been taken in when this batch is done."""

    @property
    def size(self) -> int:
        """The bytes that the batch holds."""
        return sum(map(_size, self.records))


@dataclass(frozen=True)
class EncodedBatch:
    """The token ids of a batch."""

    ids: list[np.ndarray]
    """For each key, all documents' ids one after the other, in the data set's integer type."""
    lengths: list[list[int]]
    """For each key, the number of ids of each document."""
    bad: list[BadDocument]
    """Those that could not be used, in the order of the input; their ids are left out."""
    good_before_bad: int
    """The good documents before the first bad one; 0 where there is none."""
    text_bytes: int
    """Of the records, decompressed."""
    begins: bool = True
    """Whether the first document begins in this batch."""
    ends: bool = True
    """Whether the last document ends in this batch."""


class Encoder:
    """Parses records and encodes their texts exactly as Megatron's `HuggingFaceTokenizer` does.

    That is, with the special tokens that the tokenizer itself adds (LLaMA's BOS), so that text is
    encoded alike here and wherever Megatron calls the tokenizer. Can be sent to another process.
    """

    def __init__(self, settings: EncodingSettings) -> None:
        self.settings = settings
        tokenizer = load_tokenizer(settings.tokenizer_model)
        self.eod_id: int | None = tokenizer.eos_token_id
        if settings.append_eod and self.eod_id is None:
            raise ValueError(
                f"--append-eod: the tokenizer in --tokenizer-model {settings.tokenizer_model} has "
                "no end-of-sequence token (eos_token)"
            )
        self.vocabulary_size = len(tokenizer)
        """The number of tokens, added ones included, as Megatron counts them before padding."""
        self.dtype = token_dtype(self.vocabulary_size)
        highest = max(tokenizer.get_vocab().values())
        if highest > np.iinfo(self.dtype).max:
            raise ValueError(
                f"--tokenizer-model {settings.tokenizer_model}: has a token of id {highest}, and "
                f"Megatron stores a vocabulary of {self.vocabulary_size} as {self.dtype.name}"
            )
        self._library_tokenizer = _library_tokenizer(tokenizer)
        self._any_tokenizer = tokenizer if self._library_tokenizer is None else None
        self._added_before: list[int] = []
        self._added_after: list[int] = []
        if self._library_tokenizer is not None:
            self._split_special_tokens = bool(self._library_tokenizer.encode_special_tokens)
            self._added_before, self._added_after = _added_ids(self._library_tokenizer)

    def __setstate__(self, state: dict[str, object]) -> None:
        self.__dict__.update(state)
        if self._library_tokenizer is not None:
            # Not part of what the tokenizers library sends.
            self._library_tokenizer.encode_special_tokens = self._split_special_tokens

    def fingerprint(self) -> str:
        """A hash of all that decides which ids a text gets."""
        if self._library_tokenizer is not None:
            content = self._library_tokenizer.to_str() + str(self._split_special_tokens)
        else:
            assert self._any_tokenizer is not None
            content = json.dumps([repr(self._any_tokenizer), self._any_tokenizer.get_vocab()])
        return hashlib.sha256(f"{self.eod_id} {content}".encode()).hexdigest()

    def encode(self, records: Sequence[Record]) -> EncodedBatch:
        """Encode a batch's records under every key."""
        if records[0].piece is not None:
            return self._encode_piece(records[0])
        keys = self.settings.keys
        bad: dict[int, BadDocument] = {}
        texts: dict[int, list[str]] = {}
        for index, record in enumerate(records):
            try:
                texts[index] = parse_texts(record, keys)
            except BadRecord as error:
                bad[index] = error.document
        documents_of_keys = [
            self._encode_texts([of_keys[number] for of_keys in texts.values()])
            for number in range(len(keys))
        ]
        for number, index in enumerate(texts):
            for documents in documents_of_keys:
                if isinstance(reason := documents[number], str):
                    bad.setdefault(index, _bad(records[index], reason))
        good = [number for number, index in enumerate(texts) if index not in bad]
        encoded = [[documents[number] for number in good] for documents in documents_of_keys]
        return EncodedBatch(
            ids=[np.concatenate([np.empty(0, self.dtype), *documents]) for documents in encoded],
            lengths=[[len(ids) for ids in documents] for documents in encoded],
            bad=[bad[index] for index in sorted(bad)],
            good_before_bad=min(bad, default=0),
            text_bytes=sum(map(_size, records)),
        )

    def _encode_texts(self, texts: Sequence[str]) -> list[np.ndarray | str]:
        """The ids of each text, or why it has none."""
        documents: list[np.ndarray | str] = []
        short = [text for text in texts if not self._must_be_cut(text)]
        ids_of_short = iter(self._encode_whole(short))
        for text in texts:
            try:
                if self._must_be_cut(text):
                    ids = self._encode_in_pieces(text)
                else:
                    ids = self._array(next(ids_of_short))
            except NoJoint as error:
                documents.append(str(error))
                continue
            if not len(ids):
                documents.append("the tokenizer makes no tokens of the text")
            elif self.settings.append_eod:
                documents.append(np.concatenate([ids, self._array([self.eod_id])]))
            else:
                documents.append(ids)
        return documents

    def _array(self, ids: Sequence[int | None]) -> np.ndarray:
        return np.fromiter(ids, self.dtype, len(ids))

    def _must_be_cut(self, text: str) -> bool:
        # What the tokenizer holds besides the ids takes hundreds of times the memory of the text.
        return len(text) > PIECE_BYTES and self._library_tokenizer is not None

    def _encode_whole(self, texts: list[str]) -> list[list[int]]:
        if self._library_tokenizer is not None:
            # Fast: without the places of the tokens in the text.
            return [encoding.ids for encoding in self._library_tokenizer.encode_batch_fast(texts)]
        assert self._any_tokenizer is not None
        if not texts:
            return []
        # Not verbose: documents longer than the model's context are fine in a corpus.
        found: list[list[int]] = self._any_tokenizer(
            texts, return_attention_mask=False, return_token_type_ids=False, verbose=False
        )["input_ids"]
        return found

    def _encode_in_pieces(self, text: str) -> np.ndarray:
        assert self._library_tokenizer is not None
        # As arrays one by one: a Python list of all ids takes many times their memory.
        parts = [self._array(self._added_before)]
        for piece in cut(io.BytesIO(text.encode("utf-8")).read):
            parts.append(self._array(encode_piece(self._library_tokenizer, piece)))
        return np.concatenate([*parts, self._array(self._added_after)])

    def _encode_piece(self, record: Record) -> EncodedBatch:
        """Encode a piece of a long text file, the same one for every key."""
        piece = record.piece
        assert piece is not None
        bad = []
        ids: list[int] = []
        if record.fault is not None:
            bad = [_bad(record, record.fault)]
        elif self._library_tokenizer is None:
            limit = f"{PIECE_BYTES // 1024} KiB"
            reason = f"longer than {limit}, which takes a tokenizer of the tokenizers library"
            bad = [_bad(record, reason)]
        else:
            try:
                ids = encode_piece(self._library_tokenizer, piece)
            except NoJoint as error:
                bad = [_bad(record, str(error))]
            except UnicodeDecodeError as error:
                bad = [_bad(record, invalid_utf_8(error, piece.data, piece.at))]
        if piece.first:
            ids = self._added_before + ids
        if piece.last:
            ids = ids + self._added_after
            if self.settings.append_eod:
                assert self.eod_id is not None
                ids.append(self.eod_id)
        return EncodedBatch(
            ids=[self._array(ids)] * len(self.settings.keys),
            lengths=[[len(ids)]] * len(self.settings.keys),
            bad=bad,
            good_before_bad=0,
            text_bytes=piece.end - piece.begin,
            begins=piece.first,
            ends=piece.last,
        )


def load_tokenizer(tokenizer_model: str) -> "PreTrainedTokenizerBase":
    """Load a Hugging Face tokenizer from a folder, or its tokenizer.json; nothing is asked of a
    network. Raises `ValueError` when there is no tokenizer."""
    from transformers import AutoTokenizer

    path = Path(tokenizer_model)
    if path.name == "tokenizer.json":
        path = path.parent
    if not path.is_dir():
        raise ValueError(f"--tokenizer-model {tokenizer_model}: {why_not(path, 'folder')}")
    try:
        return AutoTokenizer.from_pretrained(str(path), local_files_only=True)
    except Exception as error:  # the libraries raise KeyError and bare Exceptions for bad files
        reason = (str(error).strip() or repr(error)).splitlines()[0]
        raise ValueError(
            f"--tokenizer-model {tokenizer_model}: no Hugging Face tokenizer there ({reason}); it "
            "wants a folder with tokenizer.json and tokenizer_config.json"
        ) from error


def batches(reader: RecordReader) -> Iterator[Batch]:
    """Group consecutive records to about half a megabyte, which bounds the memory of what is
    queued; a piece of a long document is a batch of its own."""
    records: list[Record] = []
    size = 0
    end, disk_bytes = reader.position, reader.disk_bytes
    for record in reader:
        if records and record.piece is not None:
            yield Batch(records, end, disk_bytes)
            records, size = [], 0
        records.append(record)
        size += _size(record)
        end, disk_bytes = reader.position, reader.disk_bytes
        if record.piece is not None or size >= BATCH_BYTES or len(records) >= BATCH_RECORDS:
            yield Batch(records, end, disk_bytes)
            records, size = [], 0
    if records:
        yield Batch(records, end, disk_bytes)


def _size(record: Record) -> int:
    return len(record.data) + (len(record.piece.data) if record.piece is not None else 0)


def _bad(record: Record, reason: str) -> BadDocument:
    return BadDocument(record.path, record.line, reason)


def _library_tokenizer(tokenizer: "PreTrainedTokenizerBase") -> "Tokenizer | None":
    """The tokenizers library's own object in `tokenizer`, set so that it encodes as `tokenizer`
    does when it is called; None where a call does more or something else."""
    from transformers import PreTrainedTokenizerFast

    call = getattr(type(tokenizer), "_encode_plus", None)
    if call is not PreTrainedTokenizerFast._encode_plus:
        return None
    found: Tokenizer = tokenizer.backend_tokenizer
    found.no_truncation()
    found.no_padding()
    found.encode_special_tokens = tokenizer.split_special_tokens
    return found


def _added_ids(tokenizer: "Tokenizer") -> tuple[list[int], list[int]]:
    """The ids that the tokenizer adds before a text and after it."""
    encoding = tokenizer.encode("a")
    of_text = [index for index, part in enumerate(encoding.sequence_ids) if part is not None]
    if not of_text:
        return encoding.ids, []
    return encoding.ids[: of_text[0]], encoding.ids[of_text[-1] + 1 :]
