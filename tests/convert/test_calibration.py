"""Inputs of projections, layer by layer, against hooks in a whole model of transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from megatron.boost.conversion.calibration import LayerInputs, calibration_tokens
from megatron.boost.conversion.truncation import decompose, fit

LAYERS = 3


def llama(**settings: Any) -> LlamaForCausalLM:
    torch.manual_seed(3)
    sizes = {
        "vocab_size": 61,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 6,
        "max_position_embeddings": 64,
        "initializer_range": 0.3,
    }
    model = LlamaForCausalLM(LlamaConfig(**{**sizes, **settings})).eval()
    for name, parameter in model.named_parameters():
        if "norm" in name:
            nn.init.uniform_(parameter, 0.5, 2.0)
    return model


def layer_weights(model: LlamaForCausalLM, layer: int) -> dict[str, Tensor]:
    prefix = f"model.layers.{layer}."
    state = model.state_dict()
    return {name.removeprefix(prefix): t for name, t in state.items() if name.startswith(prefix)}


def inputs_of_projections(model: LlamaForCausalLM, tokens: Tensor) -> dict[str, Tensor]:
    """`[n, in]` by name, all tokens of a forward of the whole model."""
    seen: dict[str, Tensor] = {}
    hooks = [
        module.register_forward_pre_hook(
            lambda _, given, name=name: seen.update({name: given[0].flatten(0, 1).double()})
        )
        for name, module in model.named_modules()
        if name.endswith("_proj")
    ]
    with torch.no_grad():
        model(tokens)
    for hook in hooks:
        hook.remove()
    return {name.removeprefix("model.layers."): x for name, x in seen.items()}


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 500.0,
                "factor": 4.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 16,
            }
        },
    ],
    ids=["default", "llama3-rope"],
)
def test_moments_are_those_of_the_whole_models_inputs(settings: dict[str, Any]) -> None:
    model = llama(**settings)
    # More sequences than go through a layer at a time, and not a multiple of them.
    tokens = torch.randint(61, (7, 20), generator=torch.Generator().manual_seed(1))
    expected = inputs_of_projections(model, tokens)
    states = LayerInputs(model.config, tokens, model.get_input_embeddings().weight.detach())
    for layer in range(LAYERS):
        moments = states.next(layer_weights(model, layer))
        assert len(moments) == 7
        for name, moment in moments.items():
            block = "self_attn" if name[0] in "qkvo" else "mlp"
            x = expected[f"{layer}.{block}.{name}"]
            assert moment.dtype == torch.float64
            torch.testing.assert_close(moment, x.t() @ x / len(x), rtol=1e-4, atol=1e-5)


def test_calibrated_truncation_changes_the_models_own_outputs_less_than_plain() -> None:
    model = llama()
    tokens = torch.randint(61, (6, 30), generator=torch.Generator().manual_seed(2))
    x = inputs_of_projections(model, tokens)["0.mlp.down_proj"]
    weight = model.model.layers[0].mlp.down_proj.weight.detach()
    states = LayerInputs(model.config, tokens, model.get_input_embeddings().weight.detach())
    moment = states.next(layer_weights(model, 0))["down_proj"]
    lost = []
    for given in (None, moment):
        factors = decompose(weight, given).factors(6, torch.float32)
        outputs = x @ weight.double().t()
        kept = x @ factors.A.double().t() @ factors.B.double().t()
        lost.append(float((outputs - kept).norm() / outputs.norm()))
        assert fit(weight, factors, moment).output_error == pytest.approx(lost[-1], rel=1e-4)
    assert lost[1] < 0.95 * lost[0]


def tokenizer(*, with_bos: bool) -> PreTrainedTokenizerFast:
    """Words to numbers: `<s>` is 0, `w1` is 1, …"""
    words = {"<s>": 0, **{f"w{i}": i for i in range(1, 50)}}
    inner = Tokenizer(models.WordLevel(words, unk_token="w49"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    if with_bos:
        inner.post_processor = processors.TemplateProcessing(
            single="<s> $A", special_tokens=[("<s>", 0)]
        )
    return PreTrainedTokenizerFast(tokenizer_object=inner, bos_token="<s>")


def write(folder: Path, content: bytes) -> Path:
    path = folder / "calibration.txt"
    path.write_bytes(content)
    return path


TEXT = " ".join(f"w{i}" for i in range(1, 24)).encode()


def test_a_text_becomes_sequences_with_the_tokenizers_own_beginning(tmp_path: Path) -> None:
    path = write(tmp_path, b"\xef\xbb\xbf" + TEXT)
    found = calibration_tokens(path, tokenizer(with_bos=True), length=6, limit=1000)
    assert found.tolist() == [[0, *range(i, i + 5)] for i in (1, 6, 11, 16)]
    found = calibration_tokens(path, tokenizer(with_bos=False), length=6, limit=13)
    assert found.tolist() == [list(range(1, 7)), list(range(7, 13))]
    short = calibration_tokens(path, tokenizer(with_bos=True), length=64, limit=1000)
    assert short.tolist() == [[0, *range(1, 24)]]


def test_files_that_cannot_be_used_are_refused_by_name(tmp_path: Path) -> None:
    known = tokenizer(with_bos=True)
    missing = tmp_path / "none.txt"
    with pytest.raises(ValueError, match=f"--calibration {missing}: no such file"):
        calibration_tokens(missing, known, 8, 100)
    for content, message in ((b"", "no text"), (b"w1 \xff\xfe w2", "no UTF-8")):
        with pytest.raises(ValueError, match=f"--calibration .*: .*{message}"):
            calibration_tokens(write(tmp_path, content), known, 8, 100)


def test_another_models_tokenizer_and_broken_weights_are_refused() -> None:
    model = llama()
    embedding = model.get_input_embeddings().weight.detach()
    with pytest.raises(ValueError, match="gave token 61, and the model has 61"):
        LayerInputs(model.config, torch.tensor([[5, 61]]), embedding)
    states = LayerInputs(model.config, torch.tensor([[5, 6]]), embedding)
    weights = layer_weights(model, 0)
    weights["mlp.up_proj.weight"] = weights["mlp.up_proj.weight"] * float("inf")
    with pytest.raises(ValueError, match="input of layer 0's mlp.down_proj is not finite"):
        states.next(weights)
