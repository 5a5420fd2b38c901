"""There and back: Hugging Face to Megatron to Hugging Face, bit by bit; and factors merged."""

from __future__ import annotations

import json
from argparse import Namespace
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoTokenizer

from boost_layers.config import LowRankConfig
from megatron.boost.conversion.checkpoint_reader import CheckpointReader
from megatron.boost.conversion.checkpoint_writer import write_checkpoint
from megatron.boost.conversion.description import RopeSettings
from megatron.boost.conversion.exporting import (
    load_as_transformers,
    plan_export,
    write_export,
)
from megatron.boost.conversion.hf_config import description_from_hf
from megatron.boost.conversion.importing import exact_plan, open_source, write_import
from megatron.boost.conversion.megatron_arguments import (
    arguments_from_description,
    known_vocabulary,
)
from megatron.boost.conversion.modeling.modeling_boost import activate
from megatron.boost.conversion.names import megatron_entries
from megatron.boost.evaluation.tokenizers import tokenizer_of_checkpoint
from tests.support.checkpoints import description, random_tensors, save_checkpoint
from tests.support.hf_models import (
    VARIANTS,
    Variant,
    hf_logits,
    largest_difference,
    sample,
    save_llama,
)
from tests.support.small_tokenizer import VOCABULARY_SIZE, save_small_tokenizer


def weights(folder: Path) -> dict[str, Tensor]:
    return {
        name: tensor
        for path in folder.glob("*.safetensors")
        for name, tensor in load_file(path).items()
    }


def differing(value: dict[str, Tensor], reference: dict[str, Tensor]) -> list[str]:
    assert value.keys() == reference.keys()
    return [
        name
        for name, tensor in reference.items()
        if value[name].dtype != tensor.dtype or not torch.equal(value[name], tensor)
    ]


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_llama_comes_back_bit_by_bit(variant: str, tmp_path: Path) -> None:
    save_llama(tmp_path / "source", VARIANTS[variant])
    write_import(exact_plan(open_source(tmp_path / "source")), tmp_path / "checkpoint")
    write_export(plan_export(tmp_path / "checkpoint"), tmp_path / "back", max_shard_size=30_000)
    source, back = tmp_path / "source", tmp_path / "back"
    assert differing(weights(back), weights(source)) == []
    configs = [json.loads((folder / "config.json").read_text()) for folder in (source, back)]
    before, after = (description_from_hf(config) for config in configs)
    assert after == before


LOW_RANK = {
    "cola": LowRankConfig(arch="cola", ranks="q=8,k=4,v=6,o=8,gate=10,up=12,down=9"),
    "lax, two layers": LowRankConfig(arch="lax", rank=8, layers="1-2", lax_gate="linear"),
}


@pytest.mark.parametrize("name", LOW_RANK)
def test_an_exported_low_rank_model_comes_back_bit_by_bit(name: str, tmp_path: Path) -> None:
    model = description(LOW_RANK[name], rope=RopeSettings(kind="llama3", factor=32.0))
    tensors = save_checkpoint(tmp_path / "checkpoint", model)
    write_export(plan_export(tmp_path / "checkpoint"), tmp_path / "hf", max_shard_size=10**9)
    write_import(exact_plan(open_source(tmp_path / "hf")), tmp_path / "back")
    reader = CheckpointReader(tmp_path / "back")
    assert differing({name: reader.tensor(name) for name in tensors}, tensors) == []
    assert replace(reader.description, low_rank=model.low_rank) == model
    with pytest.raises(ValueError, match="holds a .* model; nearest legal value: leave it out"):
        exact_plan(open_source(tmp_path / "hf"), "dense")


def test_merged_factors_are_a_plain_llama_of_the_same_function(tmp_path: Path) -> None:
    model = description(LowRankConfig(arch="svd", rank=8, layers="0-1"), tied=True)
    tensors = save_checkpoint(tmp_path / "checkpoint", model)
    export = plan_export(tmp_path / "checkpoint", merge=True)
    assert export.exact
    write_export(export, tmp_path / "hf", max_shard_size=10**9)
    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert not list((tmp_path / "hf").glob("*.py"))
    a, b = (tensors[f"decoder.layers.1.mlp.up_proj.{factor}"].double() for factor in "AB")
    merged = weights(tmp_path / "hf")["model.layers.1.mlp.up_proj.weight"]
    torch.testing.assert_close(merged.double(), b @ a, rtol=0, atol=1e-6)
    factorised = load_as_transformers(tmp_path / "checkpoint")
    assert type(factorised).__name__ == "BoostForCausalLM"
    assert largest_difference(hf_logits(tmp_path / "hf"), hf_logits(factorised)) <= 1e-5


UNMERGEABLE = {
    "φ = silu": LowRankConfig(arch="cola", rank=8, mlp="swiglu"),
    "a latent crossing": LowRankConfig(arch="lax", lax_base="svd", rank=8),
    "this model's is product": LowRankConfig(arch="svd", mlp="product", rank=8),
}


@pytest.mark.parametrize("reason", UNMERGEABLE)
def test_what_is_no_plain_llama_is_not_merged(reason: str, tmp_path: Path) -> None:
    save_checkpoint(tmp_path / "checkpoint", description(UNMERGEABLE[reason]))
    with pytest.raises(ValueError, match=f"--merge: .*{reason}"):
        plan_export(tmp_path / "checkpoint", merge=True)


def test_a_model_whose_activation_has_not_begun_to_grow_is_linear(tmp_path: Path) -> None:
    model = description(LowRankConfig(arch="cola", rank=8, mlp="swiglu"))
    save_checkpoint(tmp_path / "checkpoint", model, act_anneal=100)
    export = plan_export(tmp_path / "checkpoint")
    assert export.description.activation_amount == 0.0
    write_export(export, tmp_path / "low-rank", max_shard_size=10**9)
    merged = plan_export(tmp_path / "checkpoint", merge=True)
    write_export(merged, tmp_path / "merged", max_shard_size=10**9)
    logits = [hf_logits(tmp_path / name) for name in ("low-rank", "merged")]
    assert largest_difference(*logits) <= 1e-5
    # With φ grown the function is another one.
    save_checkpoint(tmp_path / "grown", model)
    assert largest_difference(hf_logits(load_as_transformers(tmp_path / "grown")), logits[0]) > 0.1


def test_an_activation_grows_in_proportion() -> None:
    """φ_a(z) = (1 − a)·z + a·φ(z), in the modelling file against arithmetic."""
    z = torch.linspace(-3, 3, 13, dtype=torch.float64)
    silu = z / (1 + torch.exp(-z))
    for amount in (0.0, 0.25, 1.0):
        torch.testing.assert_close(activate(z, "silu", amount), (1 - amount) * z + amount * silu)


def test_another_dtype_is_that_of_every_tensor(tmp_path: Path) -> None:
    tensors = save_checkpoint(tmp_path / "checkpoint", description(LowRankConfig(arch="dense")))
    export = plan_export(tmp_path / "checkpoint", dtype=torch.bfloat16)
    assert not export.exact
    write_export(export, tmp_path / "hf", max_shard_size=10**9)
    found = weights(tmp_path / "hf")
    assert {tensor.dtype for tensor in found.values()} == {torch.bfloat16}
    norm = tensors["decoder.final_layernorm.weight"]
    assert torch.equal(found["model.norm.weight"], norm.bfloat16())
    assert json.loads((tmp_path / "hf" / "config.json").read_text())["dtype"] == "bfloat16"


def test_tokenizer_and_generation_settings_travel(tmp_path: Path) -> None:
    source = tmp_path / "source"
    save_llama(source, Variant({"vocab_size": VOCABULARY_SIZE}))
    save_small_tokenizer(source)
    (source / "generation_config.json").write_text('{"eos_token_id": [2, 5], "temperature": 0.6}')
    write_import(exact_plan(open_source(source)), tmp_path / "checkpoint")
    reader = CheckpointReader(tmp_path / "checkpoint")
    assert reader.arguments.tokenizer_type == "HuggingFaceTokenizer"
    assert reader.arguments.tokenizer_model == str(tmp_path / "checkpoint" / "tokenizer")

    # A checkpoint may be moved.
    (tmp_path / "checkpoint").rename(tmp_path / "moved")
    write_export(plan_export(tmp_path / "moved"), tmp_path / "back", max_shard_size=10**9)
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        assert (tmp_path / "back" / name).read_bytes() == (source / name).read_bytes()
    assert AutoTokenizer.from_pretrained(tmp_path / "back")("the fox").input_ids
    config = json.loads((tmp_path / "back" / "config.json").read_text())
    # Each file keeps its own ids.
    assert config["eos_token_id"] == 2
    assert load_as_transformers(tmp_path / "moved").generation_config.eos_token_id == [2, 5]


def test_special_tokens_are_kept_without_a_tokenizer(tmp_path: Path) -> None:
    """One by one: those of `config.json`, and where it has none, the generation settings'."""
    source = tmp_path / "source"
    save_llama(source, Variant({"bos_token_id": None, "eos_token_id": [2, 9], "pad_token_id": 5}))
    (source / "generation_config.json").write_text('{"bos_token_id": 7, "eos_token_id": 3}')
    write_import(exact_plan(open_source(source)), tmp_path / "checkpoint")
    export = plan_export(tmp_path / "checkpoint")
    assert export.tokenizer is None
    ids = export.description
    assert (ids.bos_token_id, ids.eos_token_id, ids.pad_token_id) == (7, (2, 9), 5)
    stored = CheckpointReader(tmp_path / "checkpoint").arguments
    assert tokenizer_of_checkpoint(tmp_path / "checkpoint", stored, None) is None


def test_rows_without_a_token_are_cut_off_by_the_tokenizer(tmp_path: Path) -> None:
    """A checkpoint of a program that does not leave the number of tokens."""
    padded = description(LowRankConfig(arch="dense"), vocab_size=384)
    tensors = save_checkpoint(tmp_path / "checkpoint", padded, megatrons_own=True)
    reader = CheckpointReader(tmp_path / "checkpoint")
    assert reader.description.vocab_size == 384
    save_small_tokenizer(tmp_path / "tokenizer")
    stored = reader.arguments
    del stored.true_vocab_size, stored.vocab_size
    assert known_vocabulary(stored, None) is None
    assert known_vocabulary(stored, tmp_path / "tokenizer") == VOCABULARY_SIZE
    reader = CheckpointReader(tmp_path / "checkpoint", vocab_size=VOCABULARY_SIZE)
    rows = reader.tensor("output_layer.weight")
    assert torch.equal(rows, tensors["output_layer.weight"][:VOCABULARY_SIZE])
    with pytest.raises(ValueError, match="has 384 rows, and there are 385 tokens"):
        CheckpointReader(tmp_path / "checkpoint", vocab_size=385)


def test_a_checkpoint_becomes_a_model_in_memory(tmp_path: Path) -> None:
    save_checkpoint(tmp_path / "dense", description(LowRankConfig(arch="dense"), tied=True))
    model = load_as_transformers(tmp_path / "dense", dtype=torch.bfloat16)
    assert type(model).__name__ == "LlamaForCausalLM"
    assert model.dtype == torch.bfloat16 and not model.training
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert model(sample()).logits.isfinite().all()


def test_megatrons_layers_are_read_whether_stacked_or_one_by_one(tmp_path: Path) -> None:
    """As its default and its heterogeneous checkpoints have them, the norms under their own names
    or those of Transformer Engine."""
    model = description(LowRankConfig(arch="dense"))
    tensors = random_tensors(model)
    for stacked in (True, False):
        for other_norms in (False, True):
            entries = megatron_entries(model, stacked=stacked)
            if other_norms:
                entries = [replace(each, name=[each.name, *each.also][-1]) for each in entries]
            folder = tmp_path / f"{stacked}-{other_norms}"
            folder.mkdir()
            write_checkpoint(
                folder,
                entries,
                tensors.__getitem__,
                dict.fromkeys(tensors, torch.float32),
                arguments_from_description(model, megatrons_own=True),
            )
            reader = CheckpointReader(folder)
            assert differing({name: reader.tensor(name) for name in tensors}, tensors) == []


def test_fused_tensors_want_one_dtype(tmp_path: Path) -> None:
    model = description(LowRankConfig(arch="dense"))
    dtypes = dict.fromkeys(model.tensors(), torch.float32)
    dtypes["decoder.layers.1.self_attention.k_proj.weight"] = torch.bfloat16
    entries = megatron_entries(model)
    with pytest.raises(ValueError, match="linear_qkv.weight: is made of tensors of different"):
        write_checkpoint(tmp_path, entries, lambda name: torch.empty(0), dtypes, Namespace())
