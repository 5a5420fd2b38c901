"""A LLaMA trained a little by transformers, imported by truncated SVD with the command that users
call, and trained on."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from megatron.boost.conversion.checkpoint_reader import CheckpointReader
from megatron.boost.conversion.exporting import load_as_transformers
from tests.support.distributed import run_ranks
from tests.support.hf_models import change_config
from tests.support.runs import train_in_turn
from tests.support.small_tokenizer import TEXT, VOCABULARY_SIZE, save_small_tokenizer
from tests.support.tools import load_tool

LENGTH = 32


def batches(tokens: Tensor, steps: int) -> list[Tensor]:
    """Sequences that begin anywhere in the text, `[8, 32]` each."""
    generator = torch.Generator().manual_seed(0)
    starts = torch.randint(len(tokens) - LENGTH, (steps, 8), generator=generator)
    return [torch.stack([tokens[i : i + LENGTH] for i in each]) for each in starts]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """ "folder" of a trained model and its tokenizer, "model", and "held", tokens `[8, 32]`."""
    folder = tmp_path_factory.mktemp("source")
    tokenizer = save_small_tokenizer(folder)
    # Words in an order that is not learned by heart, so that the loss stays above zero.
    words = TEXT.split()[:17]
    order = torch.randint(17, (4000,), generator=torch.Generator().manual_seed(1)).tolist()
    text = " ".join(words[i] for i in order)
    (folder / "text.txt").write_text(text)
    tokens = torch.tensor(tokenizer(text)["input_ids"])
    torch.manual_seed(2)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY_SIZE,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=64,
            initializer_range=0.1,
            bos_token_id=None,
            eos_token_id=None,
        )
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    *training, held = batches(tokens, 61)
    for batch in training:
        optimizer.zero_grad()
        model(batch, labels=batch).loss.backward()
        optimizer.step()
    model.eval().save_pretrained(folder)
    return {"folder": folder, "model": model, "held": held}


def convert(source: dict[str, Any], save: Path, flags: str) -> dict[str, Any]:
    """`convert.py import` in this process; its result as JSON."""
    given = ["--hf", str(source["folder"]), "--save", str(save), "--json", f"{save}.json"]
    load_tool("checkpoint/convert").main(["import", *given, *flags.split()])
    result: dict[str, Any] = json.loads(Path(f"{save}.json").read_text())
    return result


@torch.no_grad()
def loss_and_logits(model: Any, tokens: Tensor) -> tuple[float, Tensor]:
    found = model(tokens, labels=tokens)
    return float(found.loss), found.logits


@pytest.mark.parametrize("flags", ["--low-rank-ratio 1.0", "--energy 1.0"])
def test_at_full_energy_the_logits_are_the_sources(
    source: dict[str, Any], tmp_path: Path, flags: str, capsys: pytest.CaptureFixture[str]
) -> None:
    result = convert(source, tmp_path / "svd", f"--low-rank-arch svd {flags} --check")
    _, theirs = loss_and_logits(source["model"], source["held"])
    _, ours = loss_and_logits(load_as_transformers(tmp_path / "svd"), source["held"])
    assert (ours - theirs).abs().max() <= 1e-5
    # --check has asked Megatron too.
    assert result["largest_logit_difference"] <= 1e-5
    assert result["least_energy_kept"] == pytest.approx(1.0, abs=1e-9)
    assert "energy kept" in capsys.readouterr().out


def test_at_high_energy_the_loss_is_close_and_calibration_brings_the_logits_closer(
    source: dict[str, Any], tmp_path: Path
) -> None:
    dense, logits = loss_and_logits(source["model"], source["held"])
    losses, distances = [], []
    calibration = f"--calibration {source['folder'] / 'text.txt'} --calibration-tokens 4096"
    for number, flags in enumerate(
        ("--energy 0.98", "--low-rank-rank 12", f"--low-rank-rank 12 {calibration}")
    ):
        folder = tmp_path / str(number)
        result = convert(source, folder, f"--low-rank-arch svd {flags}")
        loss, found = loss_and_logits(load_as_transformers(folder), source["held"])
        losses.append(loss)
        distances.append(float((found - logits).norm()))
        assert result["parameters"] == result["parameters_after"]
        assert result["parameters_before"] == result["parameters_source"]
    # It has learned something: an even guess would be 5.6.
    assert dense < 1.5
    assert losses == pytest.approx([dense] * 3, rel=0.02)
    assert distances[2] < 0.7 * distances[1]


def test_a_budget_is_that_of_the_checkpoint(source: dict[str, Any], tmp_path: Path) -> None:
    most = int(0.7 * source["model"].num_parameters())
    result = convert(source, tmp_path / "svd", "--low-rank-arch svd --parameter-budget 0.7")
    reader = CheckpointReader(tmp_path / "svd")
    count = sum(reader.tensor(name).numel() for name in reader.description.tensors())
    assert 0.95 * most <= count == result["parameters"] <= most
    # As it is told on the terminal and in the JSON, so the checkpoint says of itself.
    ranks = {name: reader.description.rank_of(name) for name in ("q_proj", "down_proj")}
    assert {name: result[f"rank_{name}"] for name in ranks} == ranks


def test_a_dry_run_shows_what_is_truncated_and_writes_nothing(
    source: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    convert(source, tmp_path / "lax", "--low-rank-arch lax --low-rank-rank 4 --dry-run")
    shown = capsys.readouterr().out
    assert not (tmp_path / "lax").exists()
    assert "down_proj.A [4, 64] float32" in shown and "truncated" in shown
    assert any(line.startswith("-") and "gate_left" in line for line in shown.splitlines())


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--energy 0.9", "--energy: has an effect on low-rank layers only"),
        ("--low-rank-arch none --low-rank-rank 4", "--low-rank-rank: has an effect on low-rank"),
        ("--low-rank-arch svd --low-rank-rank 99", "--low-rank-rank 99: larger than"),
        ("--low-rank-arch svd --parameter-budget 5", "--parameter-budget 5: .*smallest ranks"),
        ("--low-rank-arch svd --calibration no.txt", "--calibration no.txt: no such file"),
    ],
)
def test_refusals_come_before_anything_is_written(
    source: dict[str, Any], tmp_path: Path, flags: str, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        convert(source, tmp_path / "svd", flags)
    assert list(tmp_path.iterdir()) == []


def test_a_source_without_a_tokenizer_is_imported_and_not_calibrated(
    source: dict[str, Any], tmp_path: Path
) -> None:
    bare = tmp_path / "bare"
    bare.mkdir()
    for name in ("config.json", "model.safetensors"):
        shutil.copyfile(source["folder"] / name, bare / name)
    without = {**source, "folder": bare}
    flags = "--low-rank-arch svd --low-rank-rank 4"
    convert(without, tmp_path / "svd", flags)
    with pytest.raises(ValueError, match="--calibration .*: the source has no tokenizer"):
        convert(without, tmp_path / "other", f"{flags} --calibration {source['folder']}/text.txt")


def test_a_model_without_its_activation_so_far_comes_back_as_one(
    source: dict[str, Any], tmp_path: Path
) -> None:
    flags = "--low-rank-arch cola --low-rank-rank 8 --low-rank-act-anneal 40"
    convert(source, tmp_path / "cola", flags)
    export, tool = tmp_path / "hf", load_tool("checkpoint/convert")
    tool.main(["export", "--load", str(tmp_path / "cola"), "--hf", str(export)])
    exported = {**source, "folder": export}
    convert(exported, tmp_path / "default", "")
    convert(exported, tmp_path / "given", "--low-rank-act-anneal 7")
    for name, steps in (("cola", 40), ("default", 1000), ("given", 7)):
        reader = CheckpointReader(tmp_path / name)
        assert reader.description.activation_amount == 0.0
        assert reader.arguments.low_rank_act_anneal == steps
    for config, flags, message in (
        ({"activation_amount": 0.25}, "", "activation_amount 0.25: .* 0, of an export from before"),
        ({"activation_amount": 0.75}, "", "activation_amount 0.75: .* 1, of an export from after"),
        ({"activation_amount": 1.0}, "--low-rank-act-anneal 7", "is whole already; .*value: 0"),
        ({}, "--low-rank-act-anneal 0", "--low-rank-act-anneal 0: .*nearest legal value: 1"),
        ({}, "--low-rank-rank 4", "--low-rank-rank: the source is low-rank already"),
    ):
        change_config(export, lambda values, config=config: values.update(config))
        with pytest.raises(ValueError, match=message):
            convert(exported, tmp_path / "refused", flags)
        change_config(export, lambda values: values.update(activation_amount=0.0))


TRAINING = (
    f"--vocab-size {VOCABULARY_SIZE - 1} --micro-batch-size 4 --train-iters 2 --eval-iters 0 "
    "--lr 1e-3 --use-checkpoint-args --low-rank-tp btp"
)


@pytest.mark.slow
def test_training_starts_from_the_truncated_model_whatever_it_will_become(
    source: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """CoLA's φ is annealed and LaX's gates are closed, so the first step of either is that of the
    SVD; the second is their own."""
    for arch in ("svd", "cola", "lax"):
        flags = f"--low-rank-arch {arch} --low-rank-rank 8 --check"
        convert(source, tmp_path / arch, flags)
        said = capsys.readouterr().out
        assert ("φ (silu between the factors) changes the function" in said) == (arch == "cola")
        assert ("the gates begin at 0" in said) == (arch == "lax")
    runs = [f"{TRAINING} --load {tmp_path / arch}" for arch in ("svd", "cola", "lax")]
    (found,) = run_ranks(train_in_turn, 1, runs, model=MODEL, init_process_group=False)
    svd, cola, lax = (result["loss"] for result in found)
    assert svd[0] == pytest.approx(cola[0], rel=1e-6) == pytest.approx(lax[0], rel=1e-6)
    assert len({svd[1], cola[1], lax[1]}) == 3


MODEL = "--init-method-std 0.02 --seed 1234 --seq-length 32".split()
