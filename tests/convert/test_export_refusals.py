"""Exports that would not be the checkpoint: refused, and nothing is written."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from boost_layers.config import LowRankConfig
from megatron.boost.conversion import exporting
from megatron.boost.conversion.checking import check_export
from megatron.boost.conversion.exporting import Export, plan_export, write_export
from tests.support.checkpoints import description, random_tensors, save_checkpoint
from tests.support.distributed import run_ranks


def test_a_number_that_becomes_infinite_is_refused(tmp_path: Path) -> None:
    """1e5 is beyond float16: by name and before the result has its own."""
    tensors = random_tensors(description(LowRankConfig(arch="dense")))
    tensors["decoder.layers.1.mlp.down_proj.weight"][0, 0] = 1e5
    save_checkpoint(tmp_path / "dense", description(LowRankConfig(arch="dense")), tensors=tensors)
    export = plan_export(tmp_path / "dense", dtype=torch.float16)
    with pytest.raises(ValueError, match=r"float16: 100000 in model.layers.1.mlp.down_proj.weight"):
        write_export(export, tmp_path / "hf", max_shard_size=10**9)
    assert [path.name for path in tmp_path.iterdir()] == ["dense"]


def test_flags_that_contradict_the_checkpoint_are_refused(tmp_path: Path) -> None:
    save_checkpoint(tmp_path / "dense", description(LowRankConfig(arch="dense")))
    (tmp_path / "empty").mkdir()
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "tokenizer.json").write_text("{")
    refused: dict[str, dict[str, Any]] = {
        "--vocab-size 10: .* has 100 tokens": {"vocab_size": 10},
        "--merge: .* has no factors": {"merge": True},
        "--tokenizer .*empty: has no tokenizer": {"tokenizer": tmp_path / "empty"},
        "--tokenizer .*broken: cannot be read": {"tokenizer": tmp_path / "broken"},
    }
    for message, flags in refused.items():
        with pytest.raises(ValueError, match=message):
            plan_export(tmp_path / "dense", **flags)
    assert plan_export(tmp_path / "dense", vocab_size=100).description.vocab_size == 100


def check_in_turn(exports: list[tuple[Path, dict[str, Any]]]) -> list[str]:
    """On a rank: export and check each; what was refused."""
    said = []
    for load, flags in exports:
        export = plan_export(load, **flags)
        hf = load.with_name(f"hf{len(said)}")
        try:
            write_export(
                export, hf, max_shard_size=10**9, check=lambda at, of=export: check_export(of, at)
            )
            said.append("")
        except ValueError as refusal:
            said.append(str(refusal))
    # A fault in one number of one tensor.
    load, flags = exports[0]
    honest = Export.tensor

    def faulty(export: Export, entry: Any) -> torch.Tensor:
        tensor = honest(export, entry).clone()
        if entry.name.endswith("layers.0.mlp.up_proj.weight"):
            tensor[0, 0] += 0.1
        return tensor

    with mock.patch.object(exporting.Export, "tensor", faulty):
        export = plan_export(load, **flags)
        with pytest.raises(ValueError, match="the checkpoint rounded to torch.bfloat16"):
            write_export(
                export,
                load.with_name("faulty"),
                max_shard_size=10**9,
                check=lambda at: check_export(export, at),
            )
    return said


@pytest.mark.slow
def test_a_lower_precision_is_checked_as_closely_as_its_own(tmp_path: Path) -> None:
    save_checkpoint(tmp_path / "dense", description(LowRankConfig(arch="dense")))
    save_checkpoint(tmp_path / "svd", description(LowRankConfig(arch="svd", rank=8)))
    tensors = random_tensors(description(LowRankConfig(arch="dense")))
    tensors["decoder.final_layernorm.weight"][3] = torch.inf
    broken = tmp_path / "broken"
    save_checkpoint(broken, description(LowRankConfig(arch="dense")), tensors=tensors)
    exports: list[tuple[Path, dict[str, Any]]] = [
        (tmp_path / "dense", {"dtype": torch.bfloat16}),
        (tmp_path / "svd", {"dtype": torch.float16}),
        (tmp_path / "svd", {"dtype": torch.bfloat16, "merge": True}),
        (broken, {"dtype": torch.bfloat16}),
    ]
    ((*fine, refused),) = run_ranks(check_in_turn, 1, exports, init_process_group=False)
    assert fine == ["", "", ""]
    assert "infinite or no numbers" in refused and not (tmp_path / "hf3").exists()
    assert not (tmp_path / "faulty").exists()
