"""Exported checkpoints, used in a process that has transformers alone, against Megatron."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from boost_layers.config import LowRankConfig
from megatron.boost.conversion.description import RopeSettings
from megatron.boost.conversion.exporting import plan_export, write_export
from tests.support import fresh_process
from tests.support.checkpoints import description, save_checkpoint
from tests.support.distributed import run_ranks
from tests.support.hf_models import largest_difference, logits_by_megatron

pytestmark = pytest.mark.slow

LLAMA3 = RopeSettings(kind="llama3", factor=32.0)
DENSE = LowRankConfig(arch="dense")
MODELS: dict[str, dict[str, Any]] = {
    "none": {"low_rank": DENSE, "megatrons_own": True},
    "none, tied, linear": {
        "low_rank": DENSE,
        "tied": True,
        "rope": RopeSettings(theta=7000.0, kind="linear", factor=4.0),
        "megatrons_own": True,
    },
    "dense, llama3": {"low_rank": DENSE, "num_kv_heads": 4, "rope": LLAMA3},
    "cola": {"low_rank": LowRankConfig(arch="cola", ranks="q=8,k=4,v=6,o=8,gate=10,up=12,down=9")},
    "cola, gelu, swiglu, tied, llama3": {
        "low_rank": LowRankConfig(arch="cola", rank=8, act="gelu", mlp="swiglu"),
        "tied": True,
        "rope": LLAMA3,
    },
    "cola, middle layer only": {"low_rank": LowRankConfig(arch="cola", rank=8, layers="1-1")},
    "svd": {"low_rank": LowRankConfig(arch="svd", rank=8), "num_kv_heads": 1},
    "lax": {"low_rank": LowRankConfig(arch="lax", rank=8)},
    "lax, svd base, linear gate, rmsnorm, two layers": {
        "low_rank": LowRankConfig(
            arch="lax", lax_base="svd", lax_gate="linear", lax_norm="rmsnorm", rank=6, layers="1-2"
        )
    },
    "lax, identity gate, no norm": {
        "low_rank": LowRankConfig(arch="lax", lax_gate="identity", lax_norm="none", rank=8)
    },
    "lax, bf16": {"low_rank": LowRankConfig(arch="lax", rank=8), "dtype": torch.bfloat16},
}


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """By model: "tensors" of the checkpoint, "folder" of the export, "logits" by Megatron, and what
    `fresh_process` found."""
    root = tmp_path_factory.mktemp("exported")
    models: dict[str, dict[str, Any]] = {}
    for number, (name, settings) in enumerate(MODELS.items()):
        sizes = {key: value for key, value in settings.items() if key != "megatrons_own"}
        model = description(**sizes)
        load, folder = root / f"checkpoint{number}", root / f"hf{number}"
        own = settings.get("megatrons_own", False)
        tensors = save_checkpoint(load, model, megatrons_own=own)
        write_export(plan_export(load), folder, max_shard_size=20_000)
        models[name] = {"tensors": tensors, "folder": folder, "load": load}
    found = in_fresh_process(root, [model["folder"] for model in models.values()])
    (logits,) = run_ranks(
        logits_by_megatron, 1, [each["load"] for each in models.values()], init_process_group=False
    )
    for model, by_megatron in zip(models.values(), logits, strict=True):
        model |= found[str(model["folder"])] | {"megatron": by_megatron, "ours": found["ours"]}
    return models


def in_fresh_process(root: Path, folders: list[Path]) -> dict[str, Any]:
    """What `fresh_process` finds in exported folders: without our packages and without network."""
    environment = {
        **os.environ,
        "HF_HUB_OFFLINE": "1",
        "HF_HOME": str(root / "hf-home"),
        "PYTHONPATH": "",
    }
    target = root / "found.pt"
    command = [sys.executable, fresh_process.__file__, str(target), *map(str, folders)]
    subprocess.run(command, check=True, cwd=root, env=environment, timeout=240)
    found: dict[str, Any] = torch.load(target, weights_only=False)
    return found


@pytest.mark.parametrize("name", MODELS)
def test_logits_are_megatrons_at_every_position(
    name: str, exported: dict[str, dict[str, Any]]
) -> None:
    model = exported[name]
    assert largest_difference(model["logits"], model["megatron"]) <= 1e-5
    assert model["megatron"].std() > 0.1
    assert model["ours"] == []
    dense = MODELS[name]["low_rank"].arch == "dense"
    assert model["class"] == ("LlamaForCausalLM" if dense else "BoostForCausalLM")


@pytest.mark.parametrize("name", MODELS)
def test_generation_with_a_cache_is_that_without(
    name: str, exported: dict[str, dict[str, Any]]
) -> None:
    model = exported[name]
    assert model["cached"].shape == (2, 7 + 12)
    assert torch.equal(model["cached"], model["uncached"])
    assert largest_difference(model["left_padded"], model["logits"]) <= 1e-5


@pytest.mark.parametrize("name", MODELS)
def test_an_export_trains_and_is_saved_again(
    name: str, exported: dict[str, dict[str, Any]]
) -> None:
    model = exported[name]
    before, after = model["losses"]
    assert after < before
    assert model["reloaded_equal"]
    for weight, grad in model["grads"].items():
        assert grad is not None and grad.any(), weight
        torch.testing.assert_close(model["checkpointed_grads"][weight], grad)
    assert model["hidden_widths"] == {32}


@pytest.mark.parametrize("name", MODELS)
def test_weights_keep_their_bits_and_their_dtype(
    name: str, exported: dict[str, dict[str, Any]]
) -> None:
    model, tensors = exported[name], exported[name]["tensors"]
    dtype = MODELS[name].get("dtype", torch.float32)
    assert model["dtype"] == dtype
    weights = dict(model["weights"])
    if MODELS[name].get("tied"):
        assert torch.equal(weights.pop("lm_head.weight"), weights["model.embed_tokens.weight"])
    assert sorted(value.flatten().tolist() for value in weights.values()) == sorted(
        value.flatten().tolist() for value in tensors.values()
    )


def test_large_exports_are_sharded_as_transformers_shards(
    exported: dict[str, dict[str, Any]],
) -> None:
    files = {path.name for path in exported["none"]["folder"].glob("*.safetensors")}
    count = len(files)
    assert count > 3
    assert files == {
        f"model-{number:05d}-of-{count:05d}.safetensors" for number in range(1, count + 1)
    }
