"""The preprocessing command and signals: how it ends, and how it goes on when given again."""

import os
import signal
import subprocess
import sys
import time

import pytest

from megatron.boost.preprocessing.encoding import EncodingSettings
from megatron.boost.preprocessing.pipeline import preprocess
from tests.support.preprocessing import TEXTS, bytes_of, files_of, write_jsonl
from tests.support.small_tokenizer import save_small_tokenizer
from tests.support.tools import TOOLS

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def tokenizer_model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    save_small_tokenizer(folder)
    return str(folder)


@pytest.fixture(scope="module")
def large_corpus(tmp_path_factory, tokenizer_model):
    """A file that takes a second or two, and what an unbroken run makes of it."""
    folder = tmp_path_factory.mktemp("large")
    source = write_jsonl(folder / "corpus.jsonl", [f"{TEXTS[4]} {n}" for n in range(700)])
    preprocess([source], str(folder / "whole"), EncodingSettings(tokenizer_model))
    return source, bytes_of(folder / "whole_text_document")


@pytest.mark.parametrize("ending", [signal.SIGKILL, signal.SIGINT])
def test_the_command_given_again_goes_on_after_a_signal(
    tmp_path, tokenizer_model, large_corpus, ending
):
    source, whole = large_corpus
    prefix = tmp_path / "out" / "x"
    command = [sys.executable, TOOLS / "preprocess_data.py", "--input", source]
    command += ["--tokenizer-model", tokenizer_model, "--workers", "2", "--output-prefix"]

    process = subprocess.Popen(
        [*command, prefix],
        stderr=subprocess.PIPE,
        start_new_session=True,
        # A shell's background jobs ignore Ctrl-C, and so would all that they start.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    data = tmp_path / "out" / "x.partial" / "0.bin"
    deadline = time.monotonic() + 60
    while not data.exists() or data.stat().st_size == 0:
        assert time.monotonic() < deadline
        time.sleep(0.005)
    workers = children_of(process.pid)
    begun = time.monotonic()
    os.killpg(process.pid, ending) if ending == signal.SIGINT else process.send_signal(ending)
    _, errors = process.communicate(timeout=30)
    while any(os.path.exists(f"/proc/{worker}") for worker in workers):
        assert time.monotonic() - begun < 10
        time.sleep(0.05)

    assert len(workers) >= 2
    assert files_of(tmp_path / "out") == ["x.partial"]
    if ending == signal.SIGKILL:
        assert process.returncode == -signal.SIGKILL
        assert errors == b""
    else:
        assert process.returncode == 130
        assert errors.startswith(b"error: interrupted; the same command goes on after ")
        assert errors.count(b"\n") == 1
    again = subprocess.run([*command, prefix], capture_output=True, text=True, check=True)
    if ending != signal.SIGKILL:
        assert again.stderr.startswith("note: going on with an unfinished run, after ")
    assert bytes_of(f"{prefix}_text_document") == whole
    assert files_of(tmp_path / "out") == ["x_text_document.bin", "x_text_document.idx"]


def children_of(pid):
    with open(f"/proc/{pid}/task/{pid}/children") as file:
        return [int(child) for child in file.read().split()]
