"""Small LLaMAs made by transformers, in the variants that Hugging Face folders come in."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from megatron.boost.conversion.checkpoint_reader import CheckpointReader
from megatron.boost.conversion.megatron_model import megatron_logits

LENGTH = 48
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


@dataclass(frozen=True)
class Variant:
    """A model and how it is saved."""

    config: dict[str, Any] = field(default_factory=dict)
    """LLaMA's settings, where they differ from `SIZES`."""
    old_spelling: bool = False
    """Whether `config.json` is as transformers 4 wrote it."""
    dtype: torch.dtype = torch.float32
    max_shard_size: str = "5GB"


SIZES: dict[str, Any] = {
    "vocab_size": 100,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 64,
    "rms_norm_eps": 3e-6,
    "initializer_range": 0.2,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
VARIANTS = {
    "mha": Variant(),
    "mha, old spelling": Variant({"rope_theta": 5000.0}, old_spelling=True),
    "gqa, tied, llama3": Variant(
        {"num_key_value_heads": 2, "tie_word_embeddings": True, "rope_parameters": LLAMA3}
    ),
    "gqa, sharded, llama3, old spelling": Variant(
        {"num_key_value_heads": 2, "rope_parameters": LLAMA3},
        old_spelling=True,
        max_shard_size="20KB",
    ),
    "mqa, wide heads, linear": Variant(
        {
            "num_key_value_heads": 1,
            "head_dim": 16,
            "rope_parameters": {"rope_type": "linear", "rope_theta": 7000.0, "factor": 4.0},
        }
    ),
    "mqa, wide heads, tied, linear, old spelling": Variant(
        {
            "num_key_value_heads": 1,
            "head_dim": 16,
            "tie_word_embeddings": True,
            "rope_parameters": {"rope_type": "linear", "rope_theta": 7000.0, "factor": 4.0},
        },
        old_spelling=True,
    ),
    "llama3 of factor 32": Variant(
        {"num_key_value_heads": 2, "rope_parameters": {**LLAMA3, "factor": 32.0}}
    ),
    "bf16": Variant({"num_key_value_heads": 2}, dtype=torch.bfloat16, max_shard_size="10KB"),
}


def make_llama(variant: Variant, seed: int = 7) -> LlamaForCausalLM:
    """The model of a variant, with norms that are not all ones."""
    torch.manual_seed(seed)
    model = LlamaForCausalLM(LlamaConfig(**{**SIZES, **variant.config})).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.uniform_(0.5, 1.5)
    return model.to(variant.dtype)


def save_llama(folder: Path, variant: Variant, seed: int = 7) -> LlamaForCausalLM:
    """Save the model of a variant to `folder`, and return it."""
    model = make_llama(variant, seed)
    model.save_pretrained(folder, max_shard_size=variant.max_shard_size)
    if variant.old_spelling:
        change_config(folder, spell_as_transformers_4)
    return model


def spell_as_transformers_4(config: dict[str, Any]) -> None:
    """Rewrite RoPE and dtype as transformers 4 has them."""
    rope = config.pop("rope_parameters")
    config["rope_theta"] = rope.pop("rope_theta")
    kind = rope.pop("rope_type")
    # 4.43 renamed "type"; llama3 came later.
    scaling = {"rope_type" if kind == "llama3" else "type": kind, **rope}
    config["rope_scaling"] = None if kind == "default" else scaling
    config["torch_dtype"] = config.pop("dtype")


def change_config(folder: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    """Let `change` alter the contents of a folder's `config.json`."""
    path = folder / "config.json"
    config = json.loads(path.read_text())
    change(config)
    path.write_text(json.dumps(config))


def sample(vocab_size: int = SIZES["vocab_size"]) -> Tensor:
    """Tokens `[2, 48]`."""
    generator = torch.Generator().manual_seed(3)
    return torch.randint(vocab_size, (2, LENGTH), generator=generator)


@torch.no_grad()
def hf_logits(model: Any, tokens: Tensor | None = None) -> Tensor:
    """Logits of a model, or in fp32 of the folder that holds it."""
    if isinstance(model, Path):
        model = AutoModelForCausalLM.from_pretrained(
            model, trust_remote_code=True, dtype=torch.float32
        )
    logits: Tensor = model.eval()(sample() if tokens is None else tokens).logits
    return logits


def logits_by_megatron(folders: list[Path]) -> list[Tensor]:
    """Logits of `sample()` by Megatron, of checkpoints; for a rank without a world."""
    return [megatron_logits(CheckpointReader(folder), sample()) for folder in folders]


def largest_difference(value: Tensor, reference: Tensor) -> float:
    """The largest absolute difference over all positions."""
    assert value.shape == reference.shape
    return float((value - reference).abs().max())
