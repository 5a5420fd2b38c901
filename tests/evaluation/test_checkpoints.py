"""A Megatron checkpoint's loss: that of plain PyTorch, and the same in every layout."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer

from boost_layers.config import LowRankConfig
from megatron.boost.conversion.description import RopeSettings
from megatron.boost.conversion.exporting import load_as_transformers
from megatron.boost.evaluation.evaluate import Request
from tests.evaluation.test_tokens import indexed
from tests.support.checkpoints import description, save_checkpoint
from tests.support.distributed import run_ranks
from tests.support.evaluated import (
    canonical_of_stock,
    evaluate_in_turn,
    mean_loss,
    nats_of_plain,
    plain_model,
    refusals,
    save_checkpoints,
)
from tests.support.plain_llama import Lax, PlainLlama
from tests.support.small_tokenizer import VOCABULARY_SIZE, save_small_tokenizer
from tests.support.tools import load_tool

UNTIED = "--untie-embeddings-and-output-weights"
RUNS = {
    "cola": f"--low-rank-arch cola --low-rank-ranks q=6,down=10 {UNTIED}",
    "lax": "--low-rank-arch lax --lax-base svd",
    "dense": "--low-rank-arch dense",
    "none": f"--low-rank-arch none {UNTIED}",
    "annealed": "--low-rank-arch cola --low-rank-act-anneal 5",
}
"""Tied and untied; with 280 tokens the vocabulary is padded, and at TP 2 otherwise than at 1."""
TEXT = "the quick brown fox jumps over the lazy dog. " * 3 + "añ — 名字 and the dog\n"
LAYOUTS: dict[str, dict[str, int]] = {
    "tp2": {"tensor_parallel": 2},
    "pp2": {"pipeline_parallel": 2, "rows": 3},
    "dp2": {"rows": 2},
}


@dataclass(frozen=True)
class Checkpoints:
    folder: Path
    tokenizer: Path
    text: Path
    data: str
    ids: list[int]
    documents: list[list[int]]
    weights: dict[str, dict[str, torch.Tensor]]

    def request(self, name: str, **more: Any) -> Request:
        source = {} if "data" in more else {"text": (self.text,)}
        return Request(load=self.folder / name, device="cpu", **source, **more)

    def plain(self, name: str) -> PlainLlama:
        weights = self.weights[name]
        if name == "none":
            weights = canonical_of_stock(weights)
        settings: dict[str, Any] = {
            "cola": {
                "arch": "cola",
                "rank": 8,
                "ranks": {"q_proj": 6, "down_proj": 10},
                "mlp": "product",
            },
            "lax": {"arch": "cola", "rank": 8, "act": "identity", "lax": Lax(), "tied": True},
            "dense": {"arch": "dense", "tied": True},
            "none": {"arch": "dense"},
            # Two of five steps were made.
            "annealed": {
                "arch": "cola",
                "rank": 8,
                "mlp": "product",
                "tied": True,
                "act_amount": 0.4,
            },
        }[name]
        return plain_model(weights, VOCABULARY_SIZE, **settings)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Checkpoints]:
    folder = tmp_path_factory.mktemp("checkpoints")
    tokenizer = save_small_tokenizer(folder / "tokenizer")
    (weights,) = run_ranks(
        save_checkpoints, 1, RUNS, folder / "tokenizer", folder, init_process_group=False
    )
    text = folder / "text.txt"
    text.write_text(TEXT, encoding="utf-8")
    ids = tokenizer(TEXT)["input_ids"]
    documents = [
        [*tokenizer(part)["input_ids"], tokenizer.eos_token_id]
        for part in ("the quick brown fox", "a", "jumps over the lazy dog " * 5)
    ]
    data = indexed(folder / "data", [[document] for document in documents])
    eos = tokenizer.eos_token_id
    yield Checkpoints(folder, folder / "tokenizer", text, data, [eos, *ids], documents, weights)


@pytest.fixture(scope="module")
def alone(made: Checkpoints) -> dict[str, dict[str, Any]]:
    requests = {
        **{name: made.request(name) for name in RUNS},
        "stride": made.request("cola", window=11, stride=4),
        "joined": made.request("cola", data=made.data),
        "separate": made.request("cola", data=made.data, documents="separate", rows=3),
        "step": made.request("cola", step=2, window=48),
        "bf16": made.request("dense", dtype="bfloat16"),
    }
    (results,) = run_ranks(evaluate_in_turn, 1, list(requests.values()), init_process_group=False)
    return dict(zip(requests, results, strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("name", RUNS)
def test_the_loss_is_that_of_plain_pytorch(
    made: Checkpoints, alone: dict[str, dict[str, Any]], name: str
) -> None:
    expected, count = mean_loss(nats_of_plain(made.plain(name)), made.ids, 24)
    found = alone[name]

    assert found["loss_nats_per_token"] == pytest.approx(expected, rel=1e-5)
    assert found["perplexity"] == pytest.approx(np.exp(expected), rel=1e-4)
    assert found["tokens"] == count == len(made.ids) - 1
    assert found["text_bytes"] == len(TEXT.encode())
    bits = expected * count / np.log(2) / len(TEXT.encode())
    assert found["bits_per_byte"] == pytest.approx(bits, rel=1e-5)
    assert (found["window_tokens"], found["stride_tokens"]) == (24, 24)


@pytest.mark.slow
def test_windows_that_overlap_and_documents(
    made: Checkpoints, alone: dict[str, dict[str, Any]]
) -> None:
    nats = nats_of_plain(made.plain("cola"))
    expected, _ = mean_loss(nats, made.ids, 11, 4)
    assert alone["stride"]["loss_nats_per_token"] == pytest.approx(expected, rel=1e-5)
    assert alone["stride"]["tokens"] == len(made.ids) - 1

    # In another precision it is the same model.
    exact, coarse = (alone[name]["loss_nats_per_token"] for name in ("dense", "bf16"))
    assert exact != coarse == pytest.approx(exact, rel=2e-2)

    whole, _ = mean_loss(nats, made.ids, 48)
    assert alone["step"]["loss_nats_per_token"] == pytest.approx(whole, rel=1e-5)

    eos = made.documents[0][-1]
    joined, count = mean_loss(nats, [eos, *sum(made.documents, [])], 24)
    assert alone["joined"]["loss_nats_per_token"] == pytest.approx(joined, rel=1e-5)
    assert alone["joined"]["tokens"] == count == sum(map(len, made.documents))
    assert alone["joined"]["text_bytes"] == len("the quick brown fox" + "a") + 24 * 5

    apart = [mean_loss(nats, [eos, *document], 24) for document in made.documents]
    total = sum(loss * size for loss, size in apart)
    assert alone["separate"]["tokens"] == count
    assert alone["separate"]["loss_nats_per_token"] == pytest.approx(total / count, rel=1e-5)
    assert alone["separate"]["text_bytes"] == alone["joined"]["text_bytes"]
    assert alone["separate"]["loss_nats_per_token"] != alone["joined"]["loss_nats_per_token"]


@pytest.mark.slow
def test_every_layout_gives_the_same(made: Checkpoints, alone: dict[str, dict[str, Any]]) -> None:
    """Windows that ranks do not share evenly, of a length that TP does not divide, micro-batches
    that are not full."""
    cases = {
        (name, layout): made.request(name, **sizes)
        for name in RUNS
        for layout, sizes in LAYOUTS.items()
        if name != "annealed" or layout == "tp2"
    }
    cases["stride", "dp2"] = made.request("cola", window=11, stride=4, rows=2)
    cases["separate", "dp2"] = made.request("cola", data=made.data, documents="separate")
    results = run_ranks(evaluate_in_turn, 2, list(cases.values()), init_process_group=False)
    for (name, layout), *found in zip(cases, *results, strict=True):
        for one in found:
            message = f"{name} {layout}"
            for key in ("tokens", "text_bytes", "windows", "documents"):
                assert one[key] == alone[name][key], message
            assert one["loss_nats_per_token"] == pytest.approx(
                alone[name]["loss_nats_per_token"], rel=1e-6
            ), message


@pytest.mark.slow
def test_the_same_checkpoint_generates(
    made: Checkpoints, capsys: pytest.CaptureFixture[str]
) -> None:
    prompt, model = made.ids[1:9], made.plain("lax")
    ids = list(prompt)
    for _ in range(6):
        ids.append(int(model(torch.tensor([ids]))[0][0, -1].argmax()))
    tokenizer = AutoTokenizer.from_pretrained(made.tokenizer)
    text = tokenizer.decode(prompt)
    load_tool("generate").main(
        ["--load", str(made.folder / "lax"), "--prompt", text, "--max-new-tokens", "6"]
        + ["--device", "cpu", "--ckpt-step", "2"]
    )
    assert capsys.readouterr().out == tokenizer.decode(ids) + "\n"


CONVERTED = {
    "svd": description(LowRankConfig(arch="svd", rank=8), vocab_size=VOCABULARY_SIZE),
    "own": description(
        LowRankConfig(arch="dense"),
        vocab_size=VOCABULARY_SIZE,
        tied=True,
        rope=RopeSettings(theta=5000.0, kind="linear", factor=4.0),
    ),
}


@pytest.mark.slow
def test_converted_checkpoints_and_their_exports_have_one_loss(
    made: Checkpoints, tmp_path: Path
) -> None:
    """Those say less of themselves than what a run saves."""
    # Without a tokenizer nobody knows the text, or what to read before its first token.
    save_checkpoint(tmp_path / "untold", CONVERTED["svd"])
    requests = [Request(load=tmp_path / "untold", data=made.data, device="cpu", window=20)]
    for name, model in CONVERTED.items():
        save_checkpoint(tmp_path / name, model, megatrons_own=name == "own")
        shutil.copytree(made.tokenizer, tmp_path / name / "tokenizer")
        requests.append(
            Request(
                load=tmp_path / name, text=(made.text,), device="cpu", window=20, tensor_parallel=2
            )
        )
    (untold, *results), _ = run_ranks(evaluate_in_turn, 2, requests, init_process_group=False)
    assert untold["tokens"] == sum(map(len, made.documents)) - 1
    assert untold["text_bytes"] is untold["bits_per_byte"] is None
    for name, found in zip(CONVERTED, results, strict=True):
        model = load_as_transformers(tmp_path / name, dtype=torch.float64)

        @torch.no_grad()
        def nats(context: list[int], token: int, model: Any = model) -> float:
            return float(-model(torch.tensor([context])).logits[0, -1].log_softmax(-1)[token])

        expected, count = mean_loss(nats, made.ids, 20)
        assert found["tokens"] == count
        assert found["loss_nats_per_token"] == pytest.approx(expected, rel=1e-5), name


@pytest.mark.slow
def test_what_cannot_be_measured_is_refused_before_any_process_group(made: Checkpoints) -> None:
    too_large = made.folder / "too-large"
    data = indexed(too_large, [[[1, VOCABULARY_SIZE]]])
    tp, pp = "--tensor-model-parallel-size", "--pipeline-model-parallel-size"
    cases = [
        (1, {"name": "cola", "tensor_parallel": 2}, rf"{tp} 2 times {pp} 1: .* value: torchrun --"),
        (4, {"name": "none", "tensor_parallel": 3}, "does not divide the 4 ranks"),
        (8, {"name": "none", "tensor_parallel": 8}, rf"{tp} 8: .* 4 attention heads; .* value: 4$"),
        (4, {"name": "none", "pipeline_parallel": 4}, rf"{pp} 4: .* 2 layers; .* value: 2$"),
        (4, {"name": "cola", "tensor_parallel": 4}, rf"{tp} 4: .* 2 KV heads; .* value: 2$"),
        (3, {"name": "cola", "pipeline_parallel": 3}, rf"{pp} 3: .* 2 layers; .* value: 2$"),
        (1, {"name": "cola", "window": 49}, "--seq-length 49: the model has 48 positions"),
        (1, {"name": "cola", "step": 7}, "--ckpt-step 7: .*nearest legal value: --ckpt-step 2$"),
        (1, {"name": "cola", "data": data}, f"--data {data}: has token 280, and the model's are 0"),
        (1, {"name": "cola/iter_0000002"}, "is one iteration; nearest legal value: .*/cola$"),
        (1, {"name": "cola", "trust_remote_code": True}, "--trust-remote-code: a Megatron"),
    ]
    requests = [(ranks, made.request(**change)) for ranks, change, _ in cases]
    (said,) = run_ranks(refusals, 1, requests, init_process_group=False)
    assert len(said) == len(cases)
    for line, (_, _, expected) in zip(said, cases, strict=True):
        assert re.search(expected, line), line
