"""Turning records into token ids with a Hugging Face tokenizer, in this process or in several.

Nothing here imports Megatron: worker processes start by importing this module.
"""

import multiprocessing
import os
import signal
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from megatron.boost.preprocessing.inputs import BadRecord, Record, nearest_path, parse_texts

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

BATCH_BYTES = 1 << 20
BATCH_RECORDS = 512
BATCHES_IN_FLIGHT_PER_WORKER = 2


@dataclass(frozen=True)
class EncodingSettings:
    """What decides a record's token ids."""

    tokenizer_model: str
    """Folder of a Hugging Face tokenizer, its tokenizer.json, or a name on the hub."""
    keys: tuple[str, ...] = ("text",)
    append_eod: bool = False


@dataclass(frozen=True)
class EncodedBatch:
    """The token ids of some consecutive records."""

    ids: list[np.ndarray]
    """For each key, all documents' ids one after the other, int32."""
    lengths: list[list[int]]
    """For each key, the number of ids of each document."""
    input_bytes: int

    @property
    def documents(self) -> int:
        """The number of records in the batch."""
        return len(self.lengths[0])


class Encoder:
    """Parses records and encodes their texts exactly as Megatron's `HuggingFaceTokenizer` does.

    That is, with the special tokens that the tokenizer itself adds (LLaMA's BOS), so that text is
    encoded alike here and wherever Megatron calls the tokenizer.
    """

    def __init__(self, settings: EncodingSettings) -> None:
        self.settings = settings
        self.tokenizer = load_tokenizer(settings.tokenizer_model)
        self.eod_id = self.tokenizer.eos_token_id
        if settings.append_eod and self.eod_id is None:
            raise ValueError(
                f"--append-eod: the tokenizer in --tokenizer-model {settings.tokenizer_model} has "
                "no end-of-sequence token (eos_token)"
            )

    @property
    def vocabulary_size(self) -> int:
        """The number of tokens, added ones included, as Megatron counts them before padding."""
        return len(self.tokenizer)

    def encode(self, records: Sequence[Record]) -> EncodedBatch:
        """Encode `records` under every key. Raises `BadRecord` for the first that cannot be."""
        keys = self.settings.keys
        texts_of_records = [parse_texts(record, keys) for record in records]
        all_ids = []
        all_lengths = []
        for texts in zip(*texts_of_records, strict=True):
            # Not verbose: documents longer than the model's context are fine in a corpus.
            documents = self.tokenizer(
                list(texts),
                return_attention_mask=False,
                return_token_type_ids=False,
                verbose=False,
            )["input_ids"]
            for record, ids in zip(records, documents, strict=True):
                if not ids:
                    raise BadRecord(f"{record.place}: the tokenizer makes no tokens of the text")
                if self.settings.append_eod:
                    ids.append(self.eod_id)
            all_lengths.append([len(ids) for ids in documents])
            all_ids.append(np.concatenate([np.asarray(ids, np.int32) for ids in documents]))
        return EncodedBatch(all_ids, all_lengths, sum(len(record.data) for record in records))


def load_tokenizer(tokenizer_model: str) -> "PreTrainedTokenizerBase":
    """Load a Hugging Face tokenizer from a folder, its tokenizer.json, or the hub (`owner/name`).

    Only a name that can be no local path is looked for on the hub. Raises `ValueError` when there
    is no tokenizer.
    """
    from transformers import AutoTokenizer

    path = Path(tokenizer_model)
    if path.name == "tokenizer.json":
        path = path.parent
    on_the_hub = len(path.parts) == 2 and not path.parent.exists()
    if not path.is_dir() and not on_the_hub:
        raise ValueError(f"--tokenizer-model {tokenizer_model}: no such folder{nearest_path(path)}")
    try:
        return AutoTokenizer.from_pretrained(str(path))
    except Exception as error:  # the libraries raise KeyError and bare Exceptions for bad files
        reason = (str(error).strip() or repr(error)).splitlines()[0]
        raise ValueError(
            f"--tokenizer-model {tokenizer_model}: no Hugging Face tokenizer there ({reason}); it "
            "wants a folder with tokenizer.json and tokenizer_config.json"
        ) from error


def batches(records: Iterable[Record]) -> Iterator[list[Record]]:
    """Group consecutive records to about a megabyte, which bounds the memory of what is queued."""
    batch: list[Record] = []
    size = 0
    for record in records:
        batch.append(record)
        size += len(record.data)
        if size >= BATCH_BYTES or len(batch) >= BATCH_RECORDS:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def encode_in_order(
    records: Iterable[Record], encoder: Encoder, workers: int
) -> Iterator[EncodedBatch]:
    """Encode `records` with `workers` processes; the result does not depend on their number.

    With one worker this process encodes. With more, at most `BATCHES_IN_FLIGHT_PER_WORKER` batches
    per worker are read ahead, so memory does not grow with the input. Raises the first `BadRecord`
    in the order of the input, and `ChildProcessError` when a worker dies.
    """
    if workers == 1:
        yield from map(encoder.encode, batches(records))
        return
    pool = ProcessPoolExecutor(
        workers,
        # Forked children would inherit the locks of the tokenizers library's threads.
        mp_context=multiprocessing.get_context("spawn"),
        initializer=_start_worker,
        initargs=(encoder.settings,),
    )
    pending: deque[tuple[Record, Future[EncodedBatch]]] = deque()
    try:
        for batch in batches(records):
            pending.append((batch[0], pool.submit(_encode_in_worker, batch)))
            if len(pending) >= workers * BATCHES_IN_FLIGHT_PER_WORKER:
                yield _result(*pending.popleft())
        while pending:
            yield _result(*pending.popleft())
    finally:
        pool.shutdown(cancel_futures=True)


def _result(first: Record, future: "Future[EncodedBatch]") -> EncodedBatch:
    try:
        return future.result()
    except BrokenProcessPool as error:
        raise ChildProcessError(
            f"a worker process died (out of memory?) at or after {first.place}"
        ) from error


_encoder_of_worker: Encoder


def _start_worker(settings: EncodingSettings) -> None:
    global _encoder_of_worker
    # Ctrl-C reaches the whole process group; the parent alone decides what happens then.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # The processes are the parallelism; threads in each would only get in each other's way.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    _encoder_of_worker = Encoder(settings)


def _encode_in_worker(records: list[Record]) -> EncodedBatch:
    return _encoder_of_worker.encode(records)
