"""A LLaMA of transformers gives the same logits in Megatron, in every variant."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from megatron.boost.conversion.checkpoint_reader import CheckpointReader
from megatron.boost.conversion.importing import exact_plan, open_source, write_import
from tests.support.distributed import run_ranks
from tests.support.hf_models import (
    VARIANTS,
    hf_logits,
    largest_difference,
    logits_by_megatron,
    save_llama,
)

CASES = {
    **{name: (name, None) for name in VARIANTS},
    "mha, our layers": ("mha", "dense"),
    "mqa, our layers": ("mqa, wide heads, linear", "dense"),
}


@pytest.fixture(scope="module")
def imported(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """By case: "folder", "source" and "logits" of both sides."""
    root = tmp_path_factory.mktemp("imported")
    cases: dict[str, dict[str, Any]] = {}
    for number, (case, (variant, arch)) in enumerate(CASES.items()):
        source = root / f"hf{number}"
        model = save_llama(source, VARIANTS[variant])
        folder = root / f"checkpoint{number}"
        write_import(exact_plan(open_source(source), arch), folder)
        weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        cases[case] = {"folder": folder, "source": source, "weights": weights}
        cases[case]["theirs"] = hf_logits(source)
    (ours,) = run_ranks(
        logits_by_megatron, 1, [case["folder"] for case in cases.values()], init_process_group=False
    )
    for case, logits in zip(cases.values(), ours, strict=True):
        case["ours"] = logits
    return cases


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_logits_are_the_sources_at_every_position(
    case: str, imported: dict[str, dict[str, Any]]
) -> None:
    ours, theirs = imported[case]["ours"], imported[case]["theirs"]
    assert largest_difference(ours, theirs) <= 1e-5
    # The models say something, or any two would agree.
    assert theirs.std() > 0.5


@pytest.mark.parametrize("case", CASES)
def test_weights_keep_their_bits_and_their_dtype(
    case: str, imported: dict[str, dict[str, Any]]
) -> None:
    reader = CheckpointReader(imported[case]["folder"])
    weights: dict[str, Tensor] = imported[case]["weights"]
    dtype = VARIANTS[CASES[case][0]].dtype
    for layer in range(reader.description.num_layers):
        for projection in ("q_proj", "k_proj", "v_proj", "o_proj"):
            found = reader.tensor(f"decoder.layers.{layer}.self_attention.{projection}.weight")
            assert torch.equal(
                found, weights[f"model.layers.{layer}.self_attn.{projection}.weight"]
            )
            assert found.dtype == dtype
    assert torch.equal(
        reader.tensor("embedding.word_embeddings.weight"), weights["model.embed_tokens.weight"]
    )


def test_layers_that_would_ignore_a_scaling_factor_are_not_taken(
    imported: dict[str, dict[str, Any]],
) -> None:
    source = open_source(imported["llama3 of factor 32"]["source"])
    assert not exact_plan(source).megatrons_own
    with pytest.raises(ValueError, match="factor of 32; nearest legal value: dense"):
        exact_plan(source, "none")


def test_scaled_positions_matter_to_the_comparison(imported: dict[str, dict[str, Any]]) -> None:
    """Each scaling moves the logits by far more than what the comparison lets pass."""
    for scaled, kind in (
        ("gqa, sharded, llama3, old spelling", "llama3"),
        ("mqa, wide heads, linear", "linear"),
    ):
        source = imported[scaled]["source"]
        config = LlamaConfig.from_pretrained(source)
        assert config.rope_parameters["rope_type"] == kind
        config.rope_parameters = {
            "rope_type": "default",
            "rope_theta": config.rope_parameters["rope_theta"],
        }
        plain = LlamaForCausalLM.from_pretrained(source, config=config)
        assert largest_difference(hf_logits(plain), imported[scaled]["theirs"]) > 1e-3


def test_the_parameter_count_is_transformers(imported: dict[str, dict[str, Any]]) -> None:
    for case in imported.values():
        description = CheckpointReader(case["folder"]).description
        total = sum(tensor.numel() for tensor in case["weights"].values())
        total -= case["weights"]["lm_head.weight"].numel() if description.tied else 0
        assert description.parameter_count() == total
