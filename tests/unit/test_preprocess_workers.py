"""Encoding in several processes: order, bounds, and how it ends."""

import multiprocessing
import os
import signal
import time

import pytest

from megatron.boost.preprocessing import encoding, workers
from megatron.boost.preprocessing.encoding import Batch, Encoder, EncodingSettings
from megatron.boost.preprocessing.pipeline import preprocess
from megatron.boost.preprocessing.records import BadRecord, Position, Record
from megatron.boost.preprocessing.workers import encode_in_order
from tests.support.preprocessing import (
    TEXTS,
    bytes_of,
    files_of,
    json_lines,
    write_compressed,
    write_jsonl,
)
from tests.support.small_tokenizer import save_small_tokenizer

pytestmark = pytest.mark.slow


def worker_processes():
    """The workers that this process has; what other tests keep running is no daemon."""
    return [child for child in multiprocessing.active_children() if child.daemon]


@pytest.fixture(scope="module")
def settings(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    save_small_tokenizer(folder, begins_with="<s>")
    return EncodingSettings(str(folder), append_eod=True)


@pytest.fixture
def small_batches(monkeypatch):
    monkeypatch.setattr(encoding, "BATCH_RECORDS", 4)


def test_three_workers_write_what_one_writes(tmp_path, settings, small_batches):
    """Lines, bad ones among them, and a text file of a few pieces."""
    folder = tmp_path / "corpus"
    folder.mkdir()
    texts = [f"{TEXTS[number % len(TEXTS)]} {number}" for number in range(60)]
    texts[13] = texts[50] = ""
    write_compressed(folder / "a.jsonl.gz", json_lines(texts))
    write_compressed(folder / "b.txt", "".join(texts * 20).encode())

    summaries = [
        preprocess([folder], str(tmp_path / str(n)), settings, workers=n, on_error="skip")
        for n in (1, 3)
    ]

    assert bytes_of(tmp_path / "3_text_document") == bytes_of(tmp_path / "1_text_document")
    assert summaries[0].first_bad == summaries[1].first_bad
    assert [bad.line for bad in summaries[1].first_bad] == [14, 51]
    with pytest.raises(BadRecord, match=r"a\.jsonl\.gz, line 14: .*after 13 good documents"):
        preprocess([folder], str(tmp_path / "out" / "x"), settings, workers=2)
    assert worker_processes() == []


def test_only_a_little_is_read_ahead(settings):
    """By number of batches, and by bytes where they are large."""
    encoder = Encoder(settings)
    read = []

    def batches(size, number):
        record = Record("a.jsonl", 1, b"\xff" * size)  # refused in no time
        for at in range(number):
            read.append(at)
            yield Batch([record], Position(0, at), 0)

    for size, number, most in ((1, 40, 2 * workers.BATCHES_PER_WORKER), (3 << 20, 6, 2)):
        read.clear()
        ahead = []
        for done, _ in enumerate(encode_in_order(batches(size, number), encoder, 2)):
            ahead.append(len(read) - done)
        assert len(read) == number
        assert 1 < max(ahead) <= most + 1


@pytest.mark.parametrize("busy", [False, True])
def test_a_worker_that_is_killed_ends_the_run_at_once(tmp_path, settings, small_batches, busy):
    """Also when the others are in the middle of long lines."""
    texts = ["the fox"] * 40
    if busy:
        texts[20:] = ["the quick brown fox " * 200_000] * 4
    source = write_jsonl(tmp_path / "corpus.jsonl", texts)
    killed_at = 0.0

    def kill_a_worker(progress):
        nonlocal killed_at
        if not killed_at:
            killed_at = time.monotonic()
            os.kill(worker_processes()[0].pid, signal.SIGKILL)

    died = (
        r"a worker process died, killed by SIGKILL .out of memory\?., at or after .*corpus\.jsonl"
    )
    with pytest.raises(ChildProcessError, match=rf"{died}.*; the same command goes on after \d+"):
        preprocess(
            [source],
            str(tmp_path / "out" / "x"),
            settings,
            workers=2,
            on_progress=kill_a_worker,
        )

    assert time.monotonic() - killed_at < 10
    assert worker_processes() == []
    assert files_of(tmp_path / "out") == ["x.partial"]
    if not busy:
        assert preprocess([source], str(tmp_path / "out" / "x"), settings).documents == 40


def test_a_fault_of_ours_in_a_worker_keeps_its_traceback(settings):
    no_bytes = Batch([Record("a.jsonl", 1, ["x"])], Position(), 0)

    with pytest.raises(RuntimeError, match="in a worker process:\n(.|\n)*in parse_texts\n"):
        list(encode_in_order([no_bytes], Encoder(settings), 2))


def test_workers_end_when_the_caller_loses_interest(settings):
    records = [Record("a.jsonl", 1, b'{"text": "the fox"}')]
    encoded = encode_in_order([Batch(records, Position(), 0)] * 9, Encoder(settings), 2)

    next(encoded)
    assert len(worker_processes()) == 2
    encoded.close()

    assert worker_processes() == []
