"""Damaged, incomplete and foreign folders: refused by name, before anything is written."""

from __future__ import annotations

import json
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from boost_layers.config import LowRankConfig
from megatron.boost.conversion.checkpoint_reader import CheckpointReader
from megatron.boost.conversion.importing import exact_plan, open_source, write_import
from megatron.boost.conversion.megatron_arguments import (
    arguments_from_description,
    description_from_arguments,
)
from megatron.boost.conversion.output_folder import refuse_occupied
from tests.support.checkpoints import description, save_checkpoint
from tests.support.hf_models import Variant, change_config, save_llama

INDEX = "model.safetensors.index.json"
SHARDED = Variant(max_shard_size="20KB")


@pytest.fixture(scope="module")
def sharded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sharded") / "llama"
    save_llama(folder, SHARDED)
    return folder


def shard(folder: Path, number: int) -> Path:
    return sorted(folder.glob("*.safetensors"))[number]


def truncate(path: Path, missing: int = 100) -> None:
    path.write_bytes(path.read_bytes()[:-missing])


def change_index(folder: Path, change: Callable[[dict[str, str]], object]) -> None:
    index = json.loads((folder / INDEX).read_text())
    change(index["weight_map"])
    (folder / INDEX).write_text(json.dumps(index))


def change_shard(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    tensors = load_file(shard(folder, 1))
    change(tensors)
    save_file(tensors, shard(folder, 1))


def drop_norm(folder: Path) -> None:
    """Remove a tensor from shards and index alike: the folder is whole, the model is not."""
    name = "model.layers.1.input_layernorm.weight"
    change_index(folder, lambda files: files.pop(name))
    for path in folder.glob("*.safetensors"):
        tensors = load_file(path)
        if tensors.pop(name, None) is not None:
            save_file(tensors, path)


def add_bias(folder: Path) -> None:
    name = "model.layers.0.self_attn.q_proj.bias"
    change_index(folder, lambda files: files.update({name: shard(folder, 1).name}))
    change_shard(folder, lambda tensors: tensors.update({name: torch.zeros(32)}))


FAULTS: dict[str, tuple[Callable[[Path], object], str]] = {
    "no configuration": (lambda f: (f / "config.json").unlink(), "has no config.json"),
    "broken configuration": (lambda f: (f / "config.json").write_text("{"), "config.json: is no J"),
    "truncated shard": (lambda f: truncate(shard(f, 1)), "model-00002-of-.*is truncated"),
    "shard cut in its header": (
        lambda f: shard(f, 0).write_bytes(shard(f, 0).read_bytes()[:20]),
        "model-00001-of-.*is truncated",
    ),
    "empty shard": (lambda f: shard(f, 2).write_bytes(b""), "model-00003-of-.*is truncated"),
    "missing shard": (lambda f: shard(f, 1).unlink(), "the shard model-00002-of-.* is missing"),
    "index lists too much": (
        lambda f: change_index(f, lambda w: w.update({"model.extra": shard(f, 0).name})),
        "the index lists model.extra, which no shard holds",
    ),
    "index lists too little": (
        lambda f: change_index(f, lambda w: w.pop("model.norm.weight")),
        "holds model.norm.weight, which the index does not list",
    ),
    "index names another shard": (
        lambda f: change_index(f, lambda w: w.update({"model.norm.weight": shard(f, 0).name})),
        "the index says that model.norm.weight is in model-00001-of-.*, and it is in",
    ),
    "index leads out of the folder": (
        lambda f: change_index(f, lambda w: w.update({"model.norm.weight": "../model.bin"})),
        "is not the name of a file beside it",
    ),
    "no index": (lambda f: (f / INDEX).unlink(), "neither model.safetensors nor its index"),
    "missing tensor": (drop_norm, "model.layers.1.input_layernorm.weight: the tensor is missing"),
    "extra tensor": (add_bias, "q_proj.bias: the tensor has no place in the model"),
    "other width": (
        lambda f: change_config(f, lambda c: c.update(intermediate_size=64)),
        r"gate_proj.weight: has the shape \[48, 32\] where the configuration says \[64, 32\]",
    ),
    "other KV heads": (
        lambda f: change_config(f, lambda c: c.update(num_key_value_heads=2)),
        r"k_proj.weight: has the shape \[32, 32\] where the configuration says \[16, 32\]",
    ),
    "tied with another head": (
        lambda f: change_config(f, lambda c: c.update(tie_word_embeddings=True)),
        "says tie_word_embeddings, and lm_head.weight differs",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_faulty_folder_is_refused_by_name(fault: str, sharded: Path, tmp_path: Path) -> None:
    folder = tmp_path / "llama"
    shutil.copytree(sharded, folder)
    open_source(folder)
    damage, message = FAULTS[fault]
    damage(folder)
    with pytest.raises(ValueError, match=message):
        open_source(folder)


def test_a_tied_model_that_was_saved_with_its_head_is_taken(tmp_path: Path) -> None:
    save_llama(tmp_path / "llama", Variant({"tie_word_embeddings": True}))
    weights = tmp_path / "llama" / "model.safetensors"
    tensors = load_file(weights)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(4)
    save_file(tensors, weights)
    source = open_source(tmp_path / "llama")
    assert source.description.tied
    assert len(source.ignored) == 2


class Bomb:
    """Leaves a trace when it is unpickled."""

    def __init__(self, trace: Path):
        self.trace = trace

    def __reduce__(self) -> tuple[Callable[..., object], tuple[object, ...]]:
        return Path.touch, (self.trace,)


def test_pickled_weights_are_read_only_when_they_are_trusted(tmp_path: Path) -> None:
    folder, trace = tmp_path / "llama", tmp_path / "trace"
    model = save_llama(folder, Variant())
    (folder / "model.safetensors").unlink()
    torch.save(model.state_dict(), folder / "pytorch_model.bin")
    with pytest.raises(ValueError, match="pytorch_model.bin.*nearest legal value: --trust-pickle"):
        open_source(folder)
    source = open_source(folder, trust_pickle=True)
    weight = source.tensor("decoder.layers.1.mlp.gate_proj.weight")
    assert torch.equal(weight, model.state_dict()["model.layers.1.mlp.gate_proj.weight"])

    torch.save({"bomb": Bomb(trace), **model.state_dict()}, folder / "pytorch_model.bin")
    with pytest.raises(ValueError, match="--trust-pickle"):
        open_source(folder)
    assert not trace.exists()
    open_source(folder, trust_pickle=True)
    assert trace.exists()

    truncate(folder / "pytorch_model.bin")
    with pytest.raises(ValueError, match="pytorch_model.bin: is truncated"):
        open_source(folder, trust_pickle=True)


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    folder = tmp_path / "checkpoint"
    save_checkpoint(folder, description(LowRankConfig(arch="cola")))
    CheckpointReader(folder)
    return folder


def test_a_damaged_checkpoint_is_refused_by_name(checkpoint: Path) -> None:
    data = checkpoint / "release" / "__0_2.distcp"
    reader = CheckpointReader(checkpoint)
    data.write_bytes(bytes(data.stat().st_size))
    with pytest.raises(ValueError, match="decoder.layers.0.* is damaged"):
        for name in reader.description.tensors():
            reader.tensor(name)
    truncate(data)
    with pytest.raises(ValueError, match="__0_2.distcp: is truncated"):
        CheckpointReader(checkpoint)
    data.unlink()
    with pytest.raises(ValueError, match="__0_2.distcp: is missing"):
        CheckpointReader(checkpoint)
    truncate(checkpoint / "release" / ".metadata")
    with pytest.raises(ValueError, match=".metadata: is truncated"):
        CheckpointReader(checkpoint)
    with pytest.raises(ValueError, match="iter_0000007: there is no complete.*complete: release"):
        CheckpointReader(checkpoint, step=7)
    tracker = checkpoint / "latest_checkpointed_iteration.txt"
    tracker.write_text("soon")
    with pytest.raises(ValueError, match="latest_checkpointed_iteration.txt: names no iteration"):
        CheckpointReader(checkpoint)
    tracker.write_bytes(b"\xff")
    with pytest.raises(ValueError, match="iteration.txt: names no iteration, it is no UTF-8 text"):
        CheckpointReader(checkpoint)
    tracker.unlink()
    with pytest.raises(ValueError, match="holds no checkpoint"):
        CheckpointReader(checkpoint)


OTHER_MODELS = [
    ({"normalization": "LayerNorm"}, "--normalization LayerNorm"),
    ({"swiglu": False}, "--swiglu False"),
    ({"add_bias_linear": True}, "--disable-bias-linear True"),
    ({"num_experts": 8}, "--num-experts 8"),
    ({"qk_layernorm": True}, "--qk-layernorm True"),
    ({"position_embedding_type": "learned_absolute"}, "--position-embedding-type learned"),
    ({"low_rank_arch": "dense", "low_rank_mlp": "product"}, "--low-rank-mlp product"),
    (
        {"use_rope_scaling": True, "rotary_seq_len_interpolation_factor": 2},
        "--rotary-seq-len-interpolation-factor 2",
    ),
]


@pytest.mark.parametrize(
    ("change", "message"), OTHER_MODELS, ids=[each for _, each in OTHER_MODELS]
)
def test_a_checkpoint_of_another_model_is_refused_by_flag(
    change: dict[str, object], message: str
) -> None:
    arguments = arguments_from_description(description(LowRankConfig(arch="dense")))
    sizes = {"vocab_size": 100, "iteration": 0, "dtype": torch.float32}
    assert description_from_arguments(arguments, **sizes).vocab_size == 100
    vars(arguments).update(change)
    with pytest.raises(ValueError, match=message):
        description_from_arguments(arguments, **sizes)


def test_nothing_pickled_in_a_checkpoint_is_executed(checkpoint: Path, tmp_path: Path) -> None:
    trace = tmp_path / "trace"
    torch.save({"args": Bomb(trace)}, checkpoint / "release" / "common.pt")
    with pytest.raises(ValueError, match="holds no arguments"):
        CheckpointReader(checkpoint)
    (checkpoint / "release" / ".metadata").write_bytes(pickle.dumps(Bomb(trace)))
    with pytest.raises(ValueError, match=".metadata: is of another format"):
        CheckpointReader(checkpoint)
    assert not trace.exists()


def test_an_occupied_target_is_refused_and_left_as_it_is(sharded: Path, tmp_path: Path) -> None:
    target = tmp_path / "checkpoint"
    target.mkdir()
    (target / "mine").write_text("kept")
    with pytest.raises(ValueError, match="not empty; nearest legal value: .*checkpoint-2"):
        write_import(exact_plan(open_source(sharded)), target)
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint"]
    assert (target / "mine").read_text() == "kept"


def test_a_target_that_cannot_be_made_is_refused_by_flag(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("kept")
    (tmp_path / "link").symlink_to("nowhere")
    with pytest.raises(ValueError, match="^--save .*file/below: .*file is a file; nearest"):
        refuse_occupied(tmp_path / "file" / "below", "--save")
    for path in (tmp_path / "link", tmp_path / "link" / "below"):
        with pytest.raises(ValueError, match="^--hf .*: .*link is a link to nowhere, which is not"):
            refuse_occupied(path, "--hf")
    refuse_occupied(tmp_path / "new" / "folder", "--save")


def test_an_import_that_fails_leaves_nothing(sharded: Path, tmp_path: Path) -> None:
    def refuse(folder: Path) -> None:
        assert (folder / "release" / "metadata.json").is_file()
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        write_import(exact_plan(open_source(sharded)), tmp_path / "checkpoint", check=refuse)
    assert list(tmp_path.iterdir()) == []


def test_what_a_killed_run_left_is_swept_up(sharded: Path, tmp_path: Path) -> None:
    # No process has this number: the kernel's largest is 2^22.
    (tmp_path / ".checkpoint.4194305.partial").mkdir()
    (tmp_path / ".other.4194305.partial").mkdir()
    write_import(exact_plan(open_source(sharded)), tmp_path / "checkpoint")
    left = sorted(path.name for path in tmp_path.iterdir())
    assert left == [".other.4194305.partial", "checkpoint"]
