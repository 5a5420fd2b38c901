"""CoLA's and CoLA-M's Hugging Face checkpoints against a plain CoLA that was written from the
definition, with the names that the reference code gives its tensors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from megatron.boost.conversion.checkpoint_reader import CheckpointReader
from megatron.boost.conversion.exporting import load_as_transformers
from megatron.boost.conversion.importing import exact_plan, open_source, write_import
from tests.support.plain_llama import PlainConfig, PlainLlama, random_canonical

PLAIN = PlainConfig(
    vocab_size=60,
    hidden=32,
    ffn=48,
    heads=4,
    kv_heads=4,
    head_dim=8,
    layers=3,
    arch="cola",
    rank=8,
    mlp="product",
    norm_eps=1e-6,
)
SWIGLU = PlainConfig(**{**vars(PLAIN), "mlp": "swiglu"})
LAST = PLAIN.layers - 1


def cola_name(layer: int, projection: str, factor: str) -> str:
    block = "self_attn" if projection in ("q", "k", "v", "o") else "mlp"
    return f"{block}.{projection}_proj.cola_{factor}"


def cola_m_name(layer: int, projection: str, factor: str) -> str:
    """As the reference code cuts a layer for its checkpoints."""
    name = {
        "qa": "pre_attn.pre_q_proj",
        "ka": "pre_attn.pre_k_proj",
        "va": "pre_attn.pre_v_proj",
        "qb": "self_attn.post_q_proj",
        "kb": "self_attn.post_k_proj",
        "vb": "self_attn.post_v_proj",
        "oa": "self_attn.pre_o_proj",
        "ob": "post_attn.post_o_proj",
        "gatea": "pre_mlp.pre_gate_proj",
        "upa": "pre_mlp.pre_up_proj",
        "gateb": "self_mlp.post_gate_proj",
        "upb": "self_mlp.post_up_proj",
        "downa": "self_mlp.pre_down_proj",
        "downb": "post_mlp.post_down_proj"
        if layer == LAST
        else "last_layer_post_mlp.post_down_proj",
    }[projection + factor]
    return f"{name}.cola_{factor}"


NAMES = {"ColaForCausalLM": cola_name, "ColaMForCausalLM": cola_m_name}


def save_cola(folder: Path, plain: PlainConfig, architecture: str) -> dict[str, Tensor]:
    """A checkpoint of the reference code's kind with random weights; those by canonical name."""
    tensors = random_canonical(plain, seed=3, dtype=torch.float32)
    saved = {}
    for name, tensor in tensors.items():
        parts = name.split(".")
        if parts[-1] in ("A", "B"):
            layer, projection, factor = int(parts[2]), parts[4].removesuffix("_proj"), parts[5]
            theirs = NAMES[architecture](layer, projection, factor.lower())
            # CoLA-M leaves down's B to the next layer.
            at = layer + 1 if theirs.startswith("last_layer_post_mlp") else layer
            saved[f"model.layers.{at}.{theirs}"] = tensor.t().contiguous()
            continue
        name = name.replace("decoder.layers", "model.layers")
        name = name.replace("pre_mlp_layernorm", "post_attention_layernorm")
        name = name.replace("embedding.word_embeddings", "model.embed_tokens")
        name = name.replace("decoder.final_layernorm", "model.norm")
        saved[name.replace("output_layer", "lm_head")] = tensor
    folder.mkdir()
    save_file(saved, folder / "model.safetensors", metadata={"format": "pt"})
    config: dict[str, Any] = {
        "architectures": [architecture],
        "model_type": "cola",
        "vocab_size": plain.vocab_size,
        "hidden_size": plain.hidden,
        "intermediate_size": plain.ffn,
        "num_hidden_layers": plain.layers,
        "num_attention_heads": plain.heads,
        "max_position_embeddings": 64,
        "rms_norm_eps": plain.norm_eps,
        "hidden_act": "silu",
        "rank": plain.rank,
        "lr_act_type": "silu",
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
    }
    if plain.mlp == "swiglu":
        config["only_lr_act"] = False
    (folder / "config.json").write_text(json.dumps(config))
    return tensors


@pytest.mark.parametrize("architecture", NAMES)
@pytest.mark.parametrize("plain", [PLAIN, SWIGLU], ids=["product", "swiglu"])
def test_is_imported_exactly(plain: PlainConfig, architecture: str, tmp_path: Path) -> None:
    tensors = save_cola(tmp_path / "hf", plain, architecture)
    write_import(exact_plan(open_source(tmp_path / "hf")), tmp_path / "checkpoint")

    reader = CheckpointReader(tmp_path / "checkpoint")
    assert reader.description.low_rank.arch == "cola"
    assert reader.description.activation_amount == 1.0
    assert set(reader.description.tensors()) == set(tensors)
    for name, tensor in tensors.items():
        assert torch.equal(reader.tensor(name), tensor), name

    tokens = torch.randint(60, (2, 40), generator=torch.Generator().manual_seed(1))
    expected, _ = PlainLlama(plain, torch.float64).load_canonical(tensors)(tokens)
    with torch.no_grad():
        found = load_as_transformers(tmp_path / "checkpoint")(tokens).logits
    assert (found - expected).abs().max() <= 1e-5
    assert expected.std() > 0.3


@pytest.mark.parametrize("architecture", NAMES)
def test_a_factor_that_is_missing_is_named(architecture: str, tmp_path: Path) -> None:
    from safetensors.torch import load_file

    save_cola(tmp_path / "hf", PLAIN, architecture)
    path = tmp_path / "hf" / "model.safetensors"
    tensors = load_file(path)
    name = f"model.layers.{LAST}.{NAMES[architecture](LAST, 'down', 'b')}"
    del tensors[name]
    save_file(tensors, path, metadata={"format": "pt"})
    with pytest.raises(ValueError, match=f"{name}: the tensor is missing"):
        open_source(tmp_path / "hf")
