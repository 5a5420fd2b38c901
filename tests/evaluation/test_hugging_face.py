"""A Hugging Face folder's loss: that of plain PyTorch, and the same however ranks share it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from megatron.boost.evaluation.evaluate import Request, evaluate
from megatron.boost.evaluation.of_hugging_face import load_folder
from tests.support.distributed import run_ranks
from tests.support.evaluated import evaluate_in_turn, mean_loss
from tests.support.small_tokenizer import save_small_tokenizer

TEXT = "the quick brown fox jumps over the lazy dog. " * 3 + "añ — 名字 and the dog\n"


def save_small_llama(folder: Path, tokenizer: PreTrainedTokenizerFast, **more: Any) -> None:
    """A random LLaMA for a tokenizer, whose blocks matter to its loss."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        bos_token_id=tokenizer.bos_token_id,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=48,
        initializer_range=0.2,
        eos_token_id=None,
        **more,
    )
    LlamaForCausalLM(config).save_pretrained(folder)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llama")
    tokenizer = save_small_tokenizer(folder, begins_with="<s>")
    save_small_llama(folder, tokenizer)
    (folder / "text.txt").write_text(TEXT, encoding="utf-8")
    return folder


def request(folder: Path, **more: Any) -> Request:
    source = {} if "data" in more else {"text": (folder / "text.txt",)}
    return Request(hf=folder, device="cpu", **source, **more)


def measured(one: Request) -> dict[str, Any]:
    return evaluate(one, lambda read, total: None).as_flat_dict()


def test_the_loss_is_that_of_the_model_token_by_token(folder: Path) -> None:
    model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float64)
    tokenizer_ids = torch.tensor(request_ids(folder))

    @torch.no_grad()
    def nats(context: list[int], token: int) -> float:
        return float(-model(torch.tensor([context])).logits[0, -1].log_softmax(-1)[token])

    for sizes in ({}, {"window": 10}, {"window": 10, "stride": 3, "rows": 1}):
        found = measured(request(folder, **sizes))
        window = sizes.get("window", 48)
        expected, count = mean_loss(nats, tokenizer_ids.tolist(), window, sizes.get("stride"))
        assert found["loss_nats_per_token"] == pytest.approx(expected, rel=1e-5), sizes
        assert found["tokens"] == count == len(tokenizer_ids) - 1
        assert found["text_bytes"] == len(TEXT.encode())


def request_ids(folder: Path) -> list[int]:
    """The text's tokens; BOS, which the tokenizer puts before it, is among them."""
    from transformers import AutoTokenizer

    ids: list[int] = AutoTokenizer.from_pretrained(folder)(TEXT)["input_ids"]
    return ids


def test_ranks_that_share_the_windows_get_the_same(folder: Path) -> None:
    one = request(folder, window=10, stride=3, rows=2)
    alone = measured(one)
    for rank in run_ranks(evaluate_in_turn, 2, [one], init_process_group=False):
        assert rank[0]["tokens"] == alone["tokens"]
        assert rank[0]["text_bytes"] == alone["text_bytes"]
        assert rank[0]["loss_nats_per_token"] == pytest.approx(
            alone["loss_nats_per_token"], rel=1e-9
        )


def test_documents_of_text_are_apart_unless_joined(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("the quick")
    (tmp_path / "b.txt").write_text("brown fox")
    files = (tmp_path / "a.txt", tmp_path / "b.txt")
    apart = measured(Request(hf=folder, text=files, device="cpu"))
    each = [measured(Request(hf=folder, text=(file,), device="cpu")) for file in files]
    joined = measured(Request(hf=folder, text=files, device="cpu", documents="joined"))

    assert apart["tokens"] == sum(one["tokens"] for one in each)
    total = sum(one["tokens"] * one["loss_nats_per_token"] for one in each)
    assert apart["loss_nats_per_token"] == pytest.approx(total / apart["tokens"])
    assert apart["text_bytes"] == joined["text_bytes"] == 18
    # Joined, the second text's BOS is a token like any other.
    assert joined["tokens"] == apart["tokens"] + 1


@pytest.mark.parametrize(
    ("change", "refusal"),
    [
        ({"window": 49}, "--seq-length 49: the model has 48 positions; nearest legal value: 48"),
        ({"window": 8, "stride": 9}, "--stride 9: would leave tokens out .* value: 8$"),
        ({"tensor_parallel": 2}, "--tensor-model-parallel-size 2: a Hugging Face folder"),
        ({"hf": Path("/nowhere/llama")}, "--hf /nowhere/llama: no such folder"),
        ({"hf": Path("/")}, "--hf /: has no config.json; it wants"),
        ({"tokenizer_model": "/nowhere/tokenizer"}, "--tokenizer-model /nowhere/tokenizer: no "),
        ({"data": "/nowhere/data"}, "--data /nowhere/data: there is no /nowhere/data.idx"),
    ],
)
def test_what_cannot_be_measured_is_refused(
    folder: Path, change: dict[str, Any], refusal: str
) -> None:
    settings = {"hf": folder, "device": "cpu", "text": (folder / "text.txt",), **change}
    if "data" in change:
        settings["text"] = ()
    with pytest.raises(ValueError, match=refusal):
        measured(Request(**settings))


def test_folders_that_lack_something_are_refused(folder: Path, tmp_path: Path) -> None:
    for file in folder.iterdir():
        if "token" not in file.name:
            (tmp_path / file.name).write_bytes(file.read_bytes())
    with pytest.raises(ValueError, match="--text .*: needs a tokenizer, and --hf .* has none"):
        measured(request(tmp_path))

    weights = load_file(tmp_path / "model.safetensors")
    name = "model.layers.1.mlp.up_proj.weight"
    del weights[name]
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    cpu = torch.device("cpu")
    with pytest.raises(ValueError, match=f"--hf .*: lacks 1 of the model's tensors, {name} first"):
        load_folder(tmp_path, dtype=None, device=cpu, trust_remote_code=False)

    config = json.loads((tmp_path / "config.json").read_text())
    config["auto_map"] = {"AutoModelForCausalLM": "modeling_own.OwnForCausalLM"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "modeling_own.py").write_text("raise SystemExit('was run')\n")
    with pytest.raises(ValueError, match=r"code of its own \(modeling_own.py\); .*--trust-remote"):
        load_folder(tmp_path, dtype=None, device=cpu, trust_remote_code=False)


def test_a_text_of_too_few_tokens_is_refused(folder: Path, tmp_path: Path) -> None:
    unbegun = tmp_path / "tokenizer"
    save_small_tokenizer(unbegun, ends=False)
    (tmp_path / "a.txt").write_text("a")
    with pytest.raises(ValueError, match="--text .*a.txt: has 1 tokens, none of which follows an"):
        measured(
            Request(
                hf=folder, text=(tmp_path / "a.txt",), device="cpu", tokenizer_model=str(unbegun)
            )
        )
