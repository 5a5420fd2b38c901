"""Text files in, Megatron's indexed data sets out."""

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from megatron.boost.preprocessing.dataset import IndexedOutput, document_prefix
from megatron.boost.preprocessing.encoding import Encoder, EncodingSettings, encode_in_order
from megatron.boost.preprocessing.inputs import (
    TEXT_SUFFIXES,
    Record,
    find_inputs,
    read_records,
)


@dataclass(frozen=True)
class Progress:
    """How far a run is, in documents and bytes of input."""

    documents: int
    input_bytes: int
    total_bytes: int


@dataclass(frozen=True)
class Summary:
    """What a run wrote and how long that took."""

    prefixes: dict[str, str]
    """For each key, what `--data-path` wants."""
    tokens: dict[str, int]
    """For each key, the number of token ids written, end-of-document tokens included."""
    documents: int
    input_bytes: int
    vocabulary_size: int
    eod_id: int | None
    seconds: float
    """From the first record to the renamed data sets, the start of the workers included."""

    def as_flat_dict(self) -> dict[str, object]:
        """The summary as `--json` gives it."""
        flat: dict[str, object] = {
            "documents": self.documents,
            "tokens": sum(self.tokens.values()),
            "input_bytes": self.input_bytes,
            "vocabulary_size": self.vocabulary_size,
            "end_of_document_id": self.eod_id,
            "seconds": self.seconds,
            "documents_per_second": self.documents / self.seconds,
            "input_megabytes_per_second": self.input_bytes / 1e6 / self.seconds,
        }
        for key, prefix in self.prefixes.items():
            flat[f"{key}_data_path"] = prefix
            flat[f"{key}_tokens"] = self.tokens[key]
        return flat


def preprocess(
    inputs: Sequence[Path],
    output_prefix: str,
    settings: EncodingSettings,
    *,
    workers: int = 1,
    on_progress: Callable[[Progress], None] | None = None,
) -> Summary:
    """Encode all documents of `inputs` and write `{output_prefix}_{key}_document.bin` and `.idx`.

    One data set for each of `settings.keys`, documents in the order of the input, in the format and
    integer type that Megatron's own tool writes. Nothing appears under these names unless every
    document was good. Raises `ValueError` for bad settings and (as `BadRecord`) for the first bad
    document, `ChildProcessError` when a worker dies, `OSError` when writing fails.
    """
    files = find_inputs(inputs)
    _check_keys(settings.keys, files)
    encoder = Encoder(settings)
    total_bytes = sum(file.stat().st_size for file in files)
    prefixes = {key: document_prefix(output_prefix, key) for key in settings.keys}
    tokens = dict.fromkeys(settings.keys, 0)
    documents = input_bytes = 0
    with ExitStack() as stack:
        outputs = [
            stack.enter_context(IndexedOutput(prefix, encoder.vocabulary_size))
            for prefix in prefixes.values()
        ]
        start = time.perf_counter()
        for batch in encode_in_order(_all_records(files), encoder, workers):
            for key, output, ids, lengths in zip(
                settings.keys, outputs, batch.ids, batch.lengths, strict=True
            ):
                output.add_documents(ids, lengths)
                tokens[key] += len(ids)
            documents += batch.documents
            input_bytes += batch.input_bytes
            if on_progress is not None:
                on_progress(Progress(documents, input_bytes, total_bytes))
    return Summary(
        prefixes,
        tokens,
        documents,
        input_bytes,
        encoder.vocabulary_size,
        encoder.eod_id,
        time.perf_counter() - start,
    )


def _all_records(files: Iterable[Path]) -> Iterator[Record]:
    for file in files:
        yield from read_records(file)


def _check_keys(keys: Sequence[str], files: Sequence[Path]) -> None:
    if len(set(keys)) != len(keys):
        raise ValueError(f"--json-keys {' '.join(keys)}: a key is given twice")
    for file in files:
        if len(keys) > 1 and file.suffix.lower() in TEXT_SUFFIXES:
            raise ValueError(
                f"--json-keys {' '.join(keys)}: {file} holds one text only; give one key"
            )
