"""`config.json`: both spellings of transformers, what cannot be run, and the way back."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import LlamaConfig

from boost_layers.config import LowRankConfig
from megatron.boost.conversion.description import ModelDescription, RopeSettings
from megatron.boost.conversion.hf_config import description_from_hf, hf_from_description
from megatron.boost.conversion.modeling.configuration_boost import BoostConfig
from tests.support.checkpoints import description
from tests.support.hf_models import LLAMA3, SIZES, spell_as_transformers_4


def llama(**settings: Any) -> dict[str, Any]:
    """A `config.json` as the installed transformers writes it."""
    config = LlamaConfig(**{**SIZES, **settings}).to_dict()
    return {**config, "architectures": ["LlamaForCausalLM"], "dtype": "bfloat16"}


ROPES = {
    "default": ({"rope_type": "default", "rope_theta": 5e5}, RopeSettings(theta=5e5)),
    "linear": (
        {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0},
        RopeSettings(kind="linear", factor=4.0),
    ),
    "llama3": (LLAMA3, RopeSettings(kind="llama3", factor=8.0)),
}


@pytest.mark.parametrize("old", [False, True], ids=["transformers 5", "transformers 4"])
@pytest.mark.parametrize("rope", ROPES)
def test_both_spellings_say_the_same(rope: str, old: bool) -> None:
    parameters, expected = ROPES[rope]
    config = llama(rope_parameters=dict(parameters), head_dim=16, num_key_value_heads=2)
    if old:
        spell_as_transformers_4(config)
        assert "rope_parameters" not in config and "dtype" not in config
    found = description_from_hf(config)
    assert found.rope == expected
    assert found.dtype == torch.bfloat16
    assert (found.num_heads, found.num_kv_heads, found.head_dim) == (4, 2, 16)
    assert (found.vocab_size, found.norm_eps, found.max_positions) == (100, 3e-6, 64)
    assert (found.bos_token_id, found.eos_token_id) == (1, 2)


REFUSED = [
    ({"hidden_act": "gelu"}, "hidden_act gelu"),
    ({"attention_bias": True}, "attention_bias True"),
    ({"mlp_bias": True}, "mlp_bias True"),
    ({"architectures": ["LlamaForSequenceClassification"]}, "the nearest is LlamaForCausalLM"),
    ({"architectures": ["MistralForCausalLM"]}, "architecture MistralForCausalLM"),
    ({"architectures": None, "model_type": "llamma"}, "the nearest is llama"),
    ({"rope_parameters": {"rope_type": "yarn", "factor": 4.0}}, "rope_type yarn"),
    ({"rope_parameters": {**LLAMA3, "low_freq_factor": 2.0}}, "low_freq_factor 2.0"),
    (
        {"rope_parameters": {**LLAMA3, "original_max_position_embeddings": 4096}},
        "original_max_position 4096",
    ),
    ({"rope_parameters": {"rope_type": "linear", "factor": 2.5}}, "factor 2.5.*nearest.*: 2"),
    ({"rope_parameters": {"rope_theta": 10000.5}}, "rope_theta 10000.5"),
    ({"dtype": "float8_e4m3fn"}, "dtype float8_e4m3fn"),
    ({"quantization_config": {"bits": 4}}, "quantization_config"),
    ({"num_hidden_layers": None}, "num_hidden_layers None"),
    ({"architectures": "LlamaForCausalLM"}, "config.json: architectures 'LlamaForCausalLM'"),
    ({"rope_parameters": [1]}, r"config.json: rope_parameters \[1\]"),
    ({"rope_parameters": {"rope_theta": "abc"}}, "config.json: rope_theta 'abc'"),
    ({"rope_parameters": {**LLAMA3, "factor": None}}, "rope_parameters .* llama3: has no factor"),
    ({"rms_norm_eps": "x"}, "config.json: rms_norm_eps 'x'"),
    ({"num_key_value_heads": -1}, "config.json: num_key_value_heads -1"),
    ({"num_key_value_heads": 3}, "config.json: num_key_value_heads 3: does not divide"),
    ({"head_dim": 7}, "config.json: head_dim 7: .* nearest legal value: 8"),
    (
        {"hidden_size": 30, "head_dim": None},
        "config.json: hidden_size 30: .* of 7 channels.* legal value: 32",
    ),
    ({"model_type": "gpt2"}, "config.json: model_type gpt2: .* nearest legal value: llama"),
    ({"head_dim": "8"}, "config.json: head_dim 8: is not a positive whole number"),
    ({"max_position_embeddings": "x"}, "config.json: max_position_embeddings x"),
    ({"eos_token_id": "x"}, "config.json: eos_token_id 'x'"),
    ({"eos_token_id": [2, "x"]}, r"config.json: eos_token_id \[2, 'x'\]"),
    ({"bos_token_id": [1]}, r"config.json: bos_token_id \[1\]"),
    ({"initializer_range": True}, "config.json: initializer_range True"),
]


@pytest.mark.parametrize(("change", "message"), REFUSED, ids=[message for _, message in REFUSED])
def test_what_cannot_be_run_is_refused_by_name(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        description_from_hf({**llama(), **change})


DESCRIPTIONS = {
    "dense": description(LowRankConfig(arch="dense"), eos_token_id=(2, 3), pad_token_id=0),
    "dense, llama3": description(
        LowRankConfig(arch="dense"), rope=RopeSettings(kind="llama3", factor=32.0), tied=True
    ),
    "cola": description(LowRankConfig(arch="cola", ranks="q=8,k=4,v=6,o=8,gate=10,up=12,down=9")),
    "svd": description(LowRankConfig(arch="svd", ratio=0.5), dtype=torch.float16),
    "lax": description(
        LowRankConfig(arch="lax", lax_base="svd", lax_gate="linear", lax_norm="none", layers="1-2")
    ),
    "annealed": replace(
        description(LowRankConfig(arch="cola", mlp="swiglu")), activation_amount=0.25
    ),
}


@pytest.mark.parametrize("name", DESCRIPTIONS)
def test_a_model_comes_back_from_its_configuration(name: str) -> None:
    model = DESCRIPTIONS[name]
    again = description_from_hf(hf_from_description(model))
    # A rank may be spelled otherwise than it was.
    assert again.tensors() == model.tensors()
    for setting in ("arch", "activation", "mlp_kind", "lax_gate", "lax_norm", "layers"):
        assert getattr(again.low_rank, setting) == getattr(model.low_rank, setting)
    assert replace(again, low_rank=model.low_rank) == model


@pytest.mark.parametrize("name", DESCRIPTIONS)
def test_transformers_reads_the_configuration_as_it_is_meant(name: str) -> None:
    model: ModelDescription = DESCRIPTIONS[name]
    written = hf_from_description(model)
    kind = BoostConfig if model.low_rank.low_rank else LlamaConfig
    read = kind(**{key: value for key, value in written.items() if key != "auto_map"})
    assert read.rope_parameters["rope_theta"] == model.rope.theta
    assert read.rope_parameters["rope_type"] == model.rope.kind
    assert read.rope_parameters.get("factor", 1.0) == model.rope.factor
    assert str(read.dtype).removeprefix("torch.") == str(model.dtype).removeprefix("torch.")
    assert description_from_hf({**read.to_dict(), "architectures": written["architectures"]}) == (
        description_from_hf(written)
    )


def test_colas_settings_are_read_as_its_code_reads_them() -> None:
    cola = {**llama(), "architectures": ["ColaForCausalLM"], "model_type": "cola", "rank": 8}
    # Its code sizes k and v with all heads, and takes hidden_act for φ.
    cola |= {"num_key_value_heads": 2, "lr_act_type": "gelu"}
    found = description_from_hf(cola)
    assert (found.low_rank.arch, found.low_rank.activation) == ("cola", "silu")
    assert found.low_rank.mlp_kind == "product"
    assert found.num_kv_heads == 4
    assert found.rank_of("down_proj") == 8
    assert description_from_hf({**cola, "only_lr_act": False}).low_rank.mlp_kind == "swiglu"
