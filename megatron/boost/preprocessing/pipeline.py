"""Text files in, Megatron's indexed data sets out."""

import contextlib
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Literal

from megatron.boost.command_line import why_unwritable
from megatron.boost.preprocessing.dataset import (
    MAX_DOCUMENT_TOKENS,
    DataSetWriter,
    Extent,
    document_prefix,
    publish,
)
from megatron.boost.preprocessing.encoding import (
    Batch,
    EncodedBatch,
    Encoder,
    EncodingSettings,
    batches,
)
from megatron.boost.preprocessing.inputs import InputFile, find_inputs
from megatron.boost.preprocessing.records import (
    MAX_LINE_BYTES,
    BadDocument,
    BadRecord,
    Position,
    RecordReader,
)
from megatron.boost.preprocessing.unfinished import State, UnfinishedRun
from megatron.boost.preprocessing.workers import encode_in_order

SECONDS_BETWEEN_SAVES = 5.0

# To be raised when the same input gives other bytes, or the same state means something else.
_LAYOUT = "1"

OnError = Literal["fail", "skip"]


@dataclass(frozen=True)
class Progress:
    """How far a run is, in documents and bytes of input."""

    documents: int
    """Good ones, those of an earlier run that this one goes on with included."""
    text_bytes: int
    """Decompressed."""
    disk_bytes: int
    total_disk_bytes: int
    documents_per_second: float
    """Of this run."""
    text_bytes_per_second: float


@dataclass(frozen=True)
class Summary:
    """What a run wrote and how long that took."""

    prefixes: dict[str, str]
    """For each key, what `--data-path` wants."""
    tokens: dict[str, int]
    """For each key, the number of token ids written, end-of-document tokens included."""
    documents: int
    bad_documents: int
    """Those left out, with `on_error="skip"`."""
    first_bad: tuple[BadDocument, ...]
    """The first ten of them."""
    input_bytes: int
    """Decompressed."""
    vocabulary_size: int
    eod_id: int | None
    earlier_documents: int
    """How many an unfinished run had written, that this one went on with."""
    earlier_bytes: int
    seconds: float
    """From the first record to the renamed data sets, the start of the workers included."""

    @property
    def documents_per_second(self) -> float:
        """Of this run, what an earlier one had written apart."""
        return (self.documents - self.earlier_documents) / self.seconds

    @property
    def megabytes_per_second(self) -> float:
        """Of this run, of decompressed input."""
        return (self.input_bytes - self.earlier_bytes) / 1e6 / self.seconds

    def as_flat_dict(self) -> dict[str, object]:
        """The summary as `--json` gives it."""
        flat: dict[str, object] = {
            "documents": self.documents,
            "bad_documents": self.bad_documents,
            "first_bad_documents": [str(bad) for bad in self.first_bad],
            "tokens": sum(self.tokens.values()),
            "input_bytes": self.input_bytes,
            "vocabulary_size": self.vocabulary_size,
            "end_of_document_id": self.eod_id,
            "documents_of_an_earlier_run": self.earlier_documents,
            "seconds": self.seconds,
            "documents_per_second": self.documents_per_second,
            "input_megabytes_per_second": self.megabytes_per_second,
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
    on_error: OnError = "fail",
    max_line_bytes: int = MAX_LINE_BYTES,
    start_over: bool = False,
    on_progress: Callable[[Progress], None] | None = None,
    note: Callable[[str], None] = lambda text: None,
) -> Summary:
    """Encode all documents of `inputs` and write `{output_prefix}_{key}_document.bin` and `.idx`.

    One data set for each of `settings.keys`, documents in the order of the input, in the format and
    integer type that Megatron's own tool writes. Nothing appears under these names before all is
    written. Memory does not grow with the input.

    With `on_error="fail"` the first bad document ends the run, with `"skip"` bad ones are left out.
    A run that ends early, even a killed one, leaves `{output_prefix}.partial/`, and the same call
    goes on from there, to the same bytes; see `UnfinishedRun` for when it does not, and for `note`.
    `workers` and `on_error` may differ then.

    Raises `ValueError` for bad settings, for input that changed meanwhile and (as `BadRecord`) for
    the first bad document, `ChildProcessError` when a worker dies, `OSError` when writing fails.
    """
    files = [InputFile.of(file) for file in find_inputs(inputs)]
    _check_keys(settings.keys, files)
    _check_output(output_prefix, settings.keys)
    encoder = Encoder(settings)
    with UnfinishedRun(
        Path(f"{output_prefix}.partial"),
        _described(encoder, max_line_bytes),
        files,
        start_over=start_over,
        note=note,
    ) as unfinished:
        state = unfinished.before
        if state is not None:
            note(f"going on with an unfinished run, after {state.documents:,} documents")
            if on_error == "fail" and state.first_bad:
                raise BadRecord(*state.first_bad[0])
        start = time.perf_counter()
        earlier = state or State(extents=(Extent(),) * len(settings.keys))
        state = earlier
        if not state.whole:
            run = _Run(unfinished.folder, files, encoder, earlier, on_error, on_progress)
            try:
                state = run.write(unfinished, workers, max_line_bytes)
            except KeyboardInterrupt:
                raise KeyboardInterrupt(f"interrupted{run.how_to_go_on()}") from None
            except ChildProcessError as error:
                raise ChildProcessError(f"{error}{run.how_to_go_on()}") from None
        prefixes = {key: document_prefix(output_prefix, key) for key in settings.keys}
        for number, prefix in enumerate(prefixes.values()):
            publish(_stem(unfinished.folder, number), prefix)
        unfinished.forget()
    return Summary(
        prefixes=prefixes,
        tokens={
            key: extent.tokens for key, extent in zip(settings.keys, state.extents, strict=True)
        },
        documents=state.documents,
        bad_documents=state.bad_documents,
        first_bad=state.first_bad,
        input_bytes=state.text_bytes,
        vocabulary_size=encoder.vocabulary_size,
        eod_id=encoder.eod_id,
        earlier_documents=earlier.documents,
        earlier_bytes=earlier.text_bytes,
        seconds=time.perf_counter() - start,
    )


class _Run:
    """The writing of all data sets, from one state to the next."""

    def __init__(
        self,
        folder: Path,
        files: Sequence[InputFile],
        encoder: Encoder,
        earlier: State,
        on_error: OnError,
        on_progress: Callable[[Progress], None] | None,
    ) -> None:
        self._files = files
        self._total_disk_bytes = sum(file.size for file in files)
        self._encoder = encoder
        self._on_error = on_error
        self._on_progress = on_progress
        self._earlier = earlier
        self._state = earlier
        """Up to the last batch that was added to every data set."""
        self._writers = [
            DataSetWriter(_stem(folder, number), encoder.dtype, extent)
            for number, extent in enumerate(earlier.extents)
        ]
        self._start = time.perf_counter()

    def write(self, unfinished: UnfinishedRun, workers: int, max_line_bytes: int) -> State:
        """Encode what is left of the input and write it, saving now and then how far that is."""
        reader = RecordReader(self._files, self._state.position, max_line_bytes=max_line_bytes)
        with contextlib.ExitStack() as stack:
            for writer in self._writers:
                stack.enter_context(contextlib.closing(writer))
            encoded = stack.enter_context(
                contextlib.closing(encode_in_order(batches(reader), self._encoder, workers))
            )
            saved = time.perf_counter()
            try:
                for batch, result in encoded:
                    self._state = self._added(batch, result)
                    self._report(batch.disk_bytes)
                    if time.perf_counter() - saved >= SECONDS_BETWEEN_SAVES:
                        self._save(unfinished)
                        saved = time.perf_counter()
            except BaseException:
                # What went wrong matters more than that it cannot be saved.
                with contextlib.suppress(OSError):
                    if self._has_progress():
                        self._save(unfinished)
                raise
            self._save(unfinished)
            self._check_the_whole(unfinished)
            for writer in self._writers:
                writer.write_index()
            self._state = replace(self._state, whole=True)
            self._save(unfinished)
        return self._state

    def how_to_go_on(self) -> str:
        """What to say after an error that a new run may get past."""
        if not self._has_progress():
            return ""
        return f"; the same command goes on after {self._state.documents:,} documents"

    def _has_progress(self) -> bool:
        return self._state.position != Position()

    def _save(self, unfinished: UnfinishedRun) -> None:
        for writer in self._writers:
            writer.sync()
        unfinished.save(self._state)

    def _added(self, batch: Batch, encoded: EncodedBatch) -> State:
        """Write a batch; the state after it."""
        state = replace(
            self._state,
            position=batch.end,
            text_bytes=self._state.text_bytes + encoded.text_bytes,
        )
        if state.dropping and not encoded.begins:
            return replace(state, dropping=not encoded.ends)
        bad = encoded.bad or self._too_long(batch, encoded)
        if bad and self._on_error == "fail":
            raise self._failure(bad[0], encoded.good_before_bad)
        state = state.with_bad(bad)
        if bad and not (encoded.begins and encoded.ends):
            for writer in self._writers:
                writer.drop_open()
            state = replace(state, dropping=not encoded.ends)
        else:
            for writer, ids, lengths in zip(
                self._writers, encoded.ids, encoded.lengths, strict=True
            ):
                writer.add(ids, lengths, begins=encoded.begins, ends=encoded.ends)
        return replace(state, extents=tuple(writer.extent for writer in self._writers))

    def _too_long(self, batch: Batch, encoded: EncodedBatch) -> list[BadDocument]:
        for extent, ids in zip(self._state.extents, encoded.ids, strict=True):
            if not encoded.begins and extent.open_tokens + len(ids) > MAX_DOCUMENT_TOKENS:
                reason = (
                    f"more than {MAX_DOCUMENT_TOKENS:,} tokens, the most that Megatron can read"
                )
                return [BadDocument(batch.records[0].path, None, reason)]
        return []

    def _failure(self, bad: BadDocument, good_before: int) -> BadRecord:
        good = self._state.documents + good_before
        hint = f" (after {good:,} good documents; --on-error skip leaves bad ones out)"
        return BadRecord(*bad, hint=hint, good_documents=good)

    def _check_the_whole(self, unfinished: UnfinishedRun) -> None:
        for file in self._files:
            if InputFile.of(Path(file.path)) != file:
                raise ValueError(f"--input {file.path}: the file changed while it was read")
        if not self._state.documents:
            unfinished.forget()
            raise ValueError(
                f"--on-error skip: all {self._state.bad_documents:,} documents are bad; the first: "
                f"{self._state.first_bad[0]}"
            )

    def _report(self, disk_bytes: int) -> None:
        if self._on_progress is None:
            return
        state, earlier = self._state, self._earlier
        seconds = time.perf_counter() - self._start
        self._on_progress(
            Progress(
                documents=state.documents,
                text_bytes=state.text_bytes,
                disk_bytes=disk_bytes,
                total_disk_bytes=self._total_disk_bytes,
                documents_per_second=(state.documents - earlier.documents) / seconds,
                text_bytes_per_second=(state.text_bytes - earlier.text_bytes) / seconds,
            )
        )


def _stem(folder: Path, number: int) -> Path:
    # Numbered, since a key may hold any characters.
    return folder / str(number)


def _described(encoder: Encoder, max_line_bytes: int) -> dict[str, str]:
    """All that decides the bytes of the output besides the input, by the name a user knows."""
    settings = encoder.settings
    return {
        "--json-keys": " ".join(settings.keys),
        "--append-eod": "yes" if settings.append_eod else "no",
        "--tokenizer-model (a hash of it)": encoder.fingerprint()[:16],
        "--max-line-mib": f"{max_line_bytes / 2**20:g}",
        "the tokenizers library": version("tokenizers"),
        "the layout": _LAYOUT,
    }


def _check_keys(keys: Sequence[str], files: Sequence[InputFile]) -> None:
    if len(set(keys)) != len(keys):
        raise ValueError(f"--json-keys {' '.join(keys)}: a key is given twice")
    for key in keys:
        if "/" in key:
            raise ValueError(
                f"--json-keys {key}: names its data set's files, in which / cannot be; nearest "
                f"legal value: {key.replace('/', '_')}, with the key renamed in the input"
            )
    for file in files:
        if len(keys) > 1 and file.is_text:
            raise ValueError(
                f"--json-keys {' '.join(keys)}: {file.path} holds one text only; give one key"
            )


def _check_output(output_prefix: str, keys: Sequence[str]) -> None:
    """Refuse a place that would turn out to be none when all is done."""
    where = f"--output-prefix {output_prefix}"
    partial = Path(f"{output_prefix}.partial")
    if os.path.lexists(partial) and not partial.is_dir():
        raise ValueError(f"{where}: {partial} is no folder, and what is unfinished goes there")
    prefixes = [document_prefix(output_prefix, key) for key in keys]
    for path in [Path(prefix + end) for prefix in prefixes for end in (".bin", ".idx")]:
        if path.is_dir():
            raise ValueError(f"{where}: {path} is a folder, and a file is to be written there")
        if reason := why_unwritable(path):
            raise ValueError(f"{where}: {path} cannot be written: {reason}")
