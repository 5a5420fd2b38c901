"""`tools/checkpoint/convert.py`: what it prints, writes, checks and refuses."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file, save_file

from boost_layers.config import LowRankConfig
from megatron.boost.conversion import checking, progress
from megatron.boost.conversion.exporting import plan_export
from megatron.boost.conversion.importing import exact_plan, open_source
from megatron.boost.conversion.mapping_table import export_rows, import_rows, lines
from tests.support.checkpoints import description, save_checkpoint
from tests.support.distributed import RankFailure, run_ranks
from tests.support.hf_models import VARIANTS, Variant, save_llama
from tests.support.tools import TOOLS, load_tool

CONVERT = load_tool("checkpoint/convert")


def convert(*argv: object) -> None:
    CONVERT.main([str(word) for word in argv])


def convert_in_turn(commands: Sequence[Sequence[object]]) -> None:
    """For a rank, where Megatron is imported already."""
    for argv in commands:
        convert(*argv)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llama") / "source"
    save_llama(folder, VARIANTS["gqa, sharded, llama3, old spelling"])
    return folder


def test_both_directions_are_checked_against_megatron(llama: Path, tmp_path: Path) -> None:
    checkpoint, back = tmp_path / "checkpoint", tmp_path / "back"
    lax = tmp_path / "lax"
    save_checkpoint(lax, description(LowRankConfig(arch="lax", rank=8)))
    results = [tmp_path / f"{number}.json" for number in range(3)]
    commands = [
        ("import", "--hf", llama, "--save", checkpoint, "--check", "--json", results[0]),
        ("export", "--load", checkpoint, "--hf", back, "--check", "--json", results[1]),
        ("export", "--load", lax, "--hf", tmp_path / "boost", "--check", "--json", results[2]),
    ]
    run_ranks(convert_in_turn, 1, commands, init_process_group=False)
    found = [json.loads(path.read_text()) for path in results]
    assert all(0 < each["largest_logit_difference"] <= 1e-5 for each in found)
    assert found[0]["parameters"] == found[0]["parameters_source"] == found[1]["parameters"]
    assert found[0]["low_rank_arch"] == "none"
    assert found[1]["bytes"] == 4 * found[1]["parameters"]
    assert found[2]["low_rank_arch"] == "lax"


def test_a_difference_is_not_blessed(llama: Path, tmp_path: Path) -> None:
    """A head that was exchanged on the way, and one number that is none."""
    source = open_source(llama)
    reference = torch.randn(2, 5, 10)
    value = reference.clone()
    assert checking.compare(value, reference).agrees
    value[1, 3, 2] += 1e-3
    agreement = checking.compare(value, reference)
    assert not agreement.agrees and agreement.position == 3
    value[1, 3, 2] = torch.nan
    assert checking.compare(value, reference).difference == torch.inf

    logits = checking.source_logits(source, checking.sample_tokens(source.description))
    plan = exact_plan(source)
    for wrong, outcome in ((logits, None), (logits.roll(1, dims=1), "--check: the logits of")):
        patches = {
            "megatron_logits": mock.Mock(return_value=wrong),
            "CheckpointReader": mock.Mock(),
        }
        with mock.patch.multiple(checking, **patches):
            if outcome is None:
                assert checking.check_import(plan, tmp_path).difference == 0
            else:
                with pytest.raises(ValueError, match=outcome):
                    checking.check_import(plan, tmp_path)


def test_a_dry_run_accounts_for_every_tensor(
    llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    convert("import", "--hf", llama, "--save", tmp_path / "checkpoint", "--dry-run")
    printed = capsys.readouterr().out
    source = open_source(llama)
    assert [name for name in source.reader.tensors if f"{name} [" not in printed] == []
    plan = exact_plan(source)
    assert [entry.name for entry in plan.entries if entry.name not in printed] == []
    words = " ".join(printed.split())
    assert "-> decoder.layers.self_attention.linear_qkv.weight[1] [64, 32] float32 qkv by" in words
    assert "21 tensors of the source, 15 of the target" in printed
    assert list(tmp_path.iterdir()) == []


def test_the_mapping_tables_name_what_becomes_of_each_tensor(tmp_path: Path) -> None:
    save_llama(tmp_path / "tied", Variant({"tie_word_embeddings": True}))
    weights = tmp_path / "tied" / "model.safetensors"
    tensors = load_file(weights)
    save_file({**tensors, "lm_head.weight": tensors["model.embed_tokens.weight"] + 0}, weights)
    rows = import_rows(exact_plan(open_source(tmp_path / "tied")))
    (unused,) = [row for row in rows if row.target == "-"]
    assert unused.sources[0].startswith("lm_head.weight [100, 32]")

    save_checkpoint(
        tmp_path / "svd", description(LowRankConfig(arch="svd", rank=8), dtype=torch.bfloat16)
    )
    export = plan_export(tmp_path / "svd", merge=True, dtype=torch.float32)
    (row,) = [r for r in export_rows(export) if r.target.startswith("model.layers.2.mlp.down_proj")]
    assert row.target == "model.layers.2.mlp.down_proj.weight [32, 48] float32"
    assert row.how == "product"
    assert row.sources == (
        "decoder.layers.2.mlp.down_proj.B [32, 8] bfloat16",
        "decoder.layers.2.mlp.down_proj.A [8, 48] bfloat16",
    )
    assert "51 tensors of the source, 30 of the target" in list(lines(export_rows(export)))[-1]


REFUSED: dict[str, tuple[Sequence[str], str]] = {
    "no command": ((), "command"),
    "unknown command": (("exprot",), "exprot"),
    "unknown flag": (("import", "--hf", "x", "--save", "y", "--chekc"), "the nearest is --check"),
    "no source": (("import", "--hf", "x", "--save", "y"), "x: no such folder"),
    "a file": (
        ("import", "--hf", __file__, "--save", "y"),
        "py: is a file, and a folder is wanted",
    ),
    "no checkpoint": (("export", "--load", "x", "--hf", "y"), "x: no such folder"),
    "size": (("export", "--load", "x", "--hf", "y", "--max-shard-size", "5 potatoes"), "5 potat"),
    "occupied": (("export", "--load", "x", "--hf", "."), "is there already and not empty"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_bad_input_is_refused(
    case: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine").write_text("kept")
    argv, message = REFUSED[case]
    with pytest.raises((ValueError, SystemExit)) as refusal:
        convert(*argv)
    assert message in capsys.readouterr().err + str(refusal.value)
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


def import_interrupted(source: Path, save: Path, end: int) -> None:
    """Import, and be sent the signal `end` when half of it is written."""

    @contextmanager
    def interrupting(title: str, total: int) -> Iterator[Callable[[int], None]]:
        done = 0

        def advance(size: int) -> None:
            nonlocal done
            done += size
            if done > total / 2:
                os.kill(os.getpid(), end)

        yield advance

    with mock.patch.object(progress, "on_terminal", interrupting):
        convert("import", "--hf", source, "--save", save)


@pytest.mark.parametrize("end", [signal.SIGTERM, signal.SIGKILL])
def test_a_run_that_is_ended_leaves_no_checkpoint(
    end: signal.Signals, llama: Path, tmp_path: Path
) -> None:
    save = tmp_path / "checkpoint"
    with pytest.raises(RankFailure):
        run_ranks(import_interrupted, 1, llama, save, int(end), init_process_group=False)
    assert not save.exists()
    assert bool(list(tmp_path.iterdir())) == (end == signal.SIGKILL)
    # The next one removes what could not be removed.
    convert("import", "--hf", llama, "--save", save)
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint"]


def test_what_is_not_known_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model: Any = description(LowRankConfig(arch="dense"))
    save_checkpoint(tmp_path / "checkpoint", model)
    convert("export", "--load", tmp_path / "checkpoint", "--hf", tmp_path / "hf")
    printed = capsys.readouterr()
    assert "tokenizer: none was found beside the checkpoint; --tokenizer DIR" in printed.out
    assert "written: " in printed.out
    assert printed.err == ""


@pytest.mark.slow
def test_a_users_terminal_shows_only_what_the_tool_says(llama: Path, tmp_path: Path) -> None:
    command = [sys.executable, str(TOOLS / "checkpoint" / "convert.py"), "import"]
    arguments = ["--hf", str(llama), "--save", "checkpoint", "--check"]
    done = subprocess.run([*command, *arguments], cwd=tmp_path, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    said = [line.partition(" ")[0] for line in done.stdout.splitlines()]
    assert said == ["logits", "written:", "train"]
    again = subprocess.run([*command, *arguments], cwd=tmp_path, capture_output=True, text=True)
    assert again.returncode == 2
    assert again.stderr.startswith("error: ") and again.stderr.count("\n") == 1
    assert "checkpoint: is there already and not empty; nearest legal value:" in again.stderr
