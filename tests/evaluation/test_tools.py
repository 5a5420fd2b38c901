"""`tools/evaluate.py` and `tools/generate.py` as a user starts them."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from boost_layers.config import LowRankConfig
from tests.evaluation.test_hugging_face import TEXT, save_small_llama
from tests.support.checkpoints import description, save_checkpoint
from tests.support.small_tokenizer import VOCABULARY_SIZE, save_small_tokenizer
from tests.support.tools import TOOLS, load_tool

LAUNCHER_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llama")
    tokenizer = save_small_tokenizer(folder, begins_with="<s>")
    save_small_llama(folder, tokenizer)
    (folder / "text.txt").write_text(TEXT, encoding="utf-8")
    return folder


def started(
    command: list[str], standard_input: str | None = None
) -> subprocess.CompletedProcess[str]:
    environment = {k: v for k, v in os.environ.items() if k not in LAUNCHER_VARIABLES}
    return subprocess.run(
        [sys.executable, *command],
        env=environment,
        input=standard_input,
        capture_output=True,
        text=True,
        timeout=240,
    )


def evaluate(*argv: object) -> None:
    load_tool("evaluate").main([*map(str, argv)])


def generate(*argv: object) -> None:
    load_tool("generate").main([*map(str, argv)])


def test_a_folder_is_measured_and_the_result_written(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    result = tmp_path / "result.json"
    evaluate("--hf", folder, "--text", folder / "text.txt", "--device", "cpu", "--json", result)

    found = json.loads(result.read_text())
    printed = capsys.readouterr()
    assert printed.err == ""
    assert f"validation loss  {found['loss_nats_per_token']:.6f} nats/token\n" in printed.out
    assert f"bits per byte    {found['bits_per_byte']:.6f}\n" in printed.out
    assert all(not isinstance(value, dict | list) for value in found.values())
    assert found["tokens"] > 0
    assert found["text_bytes"] == len(TEXT.encode())


@pytest.mark.slow
def test_under_torchrun_a_checkpoint_is_measured_and_said_once(tmp_path: Path) -> None:
    small = description(LowRankConfig(arch="cola", rank=8), vocab_size=VOCABULARY_SIZE)
    save_checkpoint(tmp_path / "cola", small)
    save_small_tokenizer(tmp_path / "cola" / "tokenizer")
    (tmp_path / "text.txt").write_text(TEXT, encoding="utf-8")
    result = tmp_path / "result.json"
    process = started(
        [*TORCHRUN, str(TOOLS / "evaluate.py"), "--load", str(tmp_path / "cola")]
        + ["--text", str(tmp_path / "text.txt"), "--tensor-model-parallel-size", "2"]
        + ["--device", "cpu", "--json", str(result)]
    )
    assert process.returncode == 0, process.stderr
    # The result and nothing else; of torchrun at most its own notice.
    assert len(process.stdout.splitlines()) == 5
    lines = process.stderr.splitlines()
    assert [line for line in lines if "torch/distributed/run.py" not in line] == []
    found = json.loads(result.read_text())
    assert f"{found['loss_nats_per_token']:.6f} nats/token" in process.stdout


@pytest.mark.slow
def test_text_goes_in_and_out_through_pipes(folder: Path, tmp_path: Path) -> None:
    result = tmp_path / "result.json"
    process = started(
        [str(TOOLS / "generate.py"), "--hf", str(folder), "--max-new-tokens", "5"]
        + ["--device", "cpu", "--json", str(result)],
        standard_input="the quick brown\n",
    )
    assert (process.returncode, process.stderr) == (0, "")
    found = json.loads(result.read_text())
    assert process.stdout == f"the quick brown{found['completion_0']}\n"
    assert (found["prompts"], found["new_tokens"], found["completion_0_tokens"]) == (1, 5, 5)


def test_several_prompts(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    base = ["--hf", folder, "--max-new-tokens", 3, "--device", "cpu"]
    generate(*base, "--prompt", "the quick", "the dog")
    both = capsys.readouterr().out
    generate(*base, "--prompt", "the quick")
    first = capsys.readouterr().out
    generate(*base, "--prompt", "the dog")
    assert both == first + "\n" + capsys.readouterr().out


@pytest.mark.parametrize(
    ("argv", "refusal"),
    [
        (["--text", "a"], "one of the arguments --load --hf is required"),
        (["--hf", "a", "--text", "b", "--data", "c"], "not allowed with argument --text"),
        (["--hf", "a", "--text", "b", "--stride", "0"], "0 is not a whole number of at least 1"),
        (["--hf", "a", "--text", "b", "--seq-len", "8"], "--seq-len: .* nearest is --seq-length"),
    ],
)
def test_a_bad_command_line_is_one_line(
    argv: list[str], refusal: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        evaluate(*argv)
    assert end.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ")
    assert re.search(refusal, line), line


def test_wrong_folders_are_refused_by_name(folder: Path, tmp_path: Path) -> None:
    text = ["--text", folder / "text.txt", "--device", "cpu"]
    for argv, refusal in (
        (["--load", tmp_path / "none"], "--load .*none: no such folder"),
        (["--load", folder], f"--load .*: is a Hugging Face folder; .* value: --hf {folder}"),
        (["--load", tmp_path], "--load .*: there is no torch_dist checkpoint"),
        (["--load", tmp_path, "--tensor-model-parallel-size", 3], "torchrun --nproc-per-node 3$"),
    ):
        with pytest.raises(ValueError, match=refusal):
            evaluate(*argv, *text)
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("2")
    with pytest.raises(ValueError, match=f"is a Megatron checkpoint; .* value: --load {tmp_path}"):
        evaluate("--hf", tmp_path, *text)


def test_wrong_folders_generate_nothing(folder: Path, tmp_path: Path) -> None:
    prompt = ["--prompt", "the", "--device", "cpu"]
    for argv, refusal in (
        (["--load", tmp_path / "none"], "--load .*none: no such folder"),
        (["--load", folder], f"--load .*: is a Hugging Face folder; .* value: --hf {folder}"),
        (["--load", tmp_path], f"--load {tmp_path}: .*holds no checkpoint"),
        (["--hf", tmp_path], f"--hf {tmp_path}: has no config.json"),
        (["--hf", folder, "--tokenizer-model", tmp_path], "--tokenizer-model .*: no Hugging Face"),
        (["--hf", folder, "--top-p", 2], "--top-p 2.0: must be .*nearest legal value: 1.0"),
    ):
        with pytest.raises(ValueError, match=refusal):
            generate(*argv, *prompt)
