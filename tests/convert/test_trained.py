"""Imported checkpoints in real training runs, and the checkpoints of those exported."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from boost_layers.config import LowRankConfig
from megatron.boost.conversion.exporting import plan_export, write_export
from megatron.boost.conversion.importing import exact_plan, open_source, write_import
from tests.support.checkpoints import description, save_checkpoint
from tests.support.distributed import run_ranks
from tests.support.hf_models import VARIANTS, Variant, save_llama
from tests.support.runs import losses, relative_difference, train_in_turn

WIDE = "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2"
RUN = "--use-checkpoint-args --seq-length 32 --train-iters 2 --save-interval 2"
STILL = "--lr 0 --min-lr 0"
"""The weights stay as they are, at TP 2 · PP 2."""

# At TP 2 twice as much; Megatron's own loss counts padded rows, so its cases have none there.
UNPADDED, PADDED = (f"--make-vocab-size-divisible-by {number}" for number in (50, 48))


@dataclass(frozen=True)
class Case:
    """What is imported, and the flags of its run beside `RUN`."""

    variant: Variant | None
    """None: a low-rank model of our own."""
    flags: str


CASES = {
    "none, tied, llama3": Case(VARIANTS["gqa, tied, llama3"], UNPADDED),
    "none, bf16": Case(VARIANTS["bf16"], f"{UNPADDED} --bf16"),
    "dense, llama3 of factor 32": Case(VARIANTS["llama3 of factor 32"], PADDED),
    "lax": Case(None, f"{PADDED} --use-distributed-optimizer"),
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """By case: "source", the weights that were imported, and of the runs "trained" and "still" the
    losses and the exported weights of the last checkpoint."""
    root = tmp_path_factory.mktemp("trained")
    lines: dict[str, list[str]] = {"trained": [], "still": []}
    found: dict[str, dict[str, Any]] = {}
    for number, (name, case) in enumerate(CASES.items()):
        load = root / f"imported{number}"
        _import(root / f"hf{number}", load, case)
        found[name] = {"source": _exported(load)}
        common = f"{RUN} {case.flags} --load {load}"
        lines["trained"].append(f"{common} --save {root}/trained{number}")
        lines["still"].append(f"{common} {WIDE} {STILL} --save {root}/still{number}")
    for kind, ranks in (("trained", 1), ("still", 4)):
        by_rank = run_ranks(train_in_turn, ranks, lines[kind], model=(), init_process_group=False)
        for number, name in enumerate(CASES):
            found[name][kind] = {
                "losses": losses([results[number] for results in by_rank]),
                "weights": _exported(root / f"{kind}{number}"),
            }
    return found


def _import(source: Path, load: Path, case: Case) -> None:
    if case.variant is None:
        low_rank = LowRankConfig(arch="lax", rank=8)
        save_checkpoint(load, description(low_rank, num_layers=2))
        return
    save_llama(source, case.variant)
    write_import(exact_plan(open_source(source)), load)


def _exported(load: Path) -> dict[str, Tensor]:
    """Weights by name of a checkpoint's export."""
    folder = load.with_name(f"{load.name}-hf")
    write_export(plan_export(load), folder, max_shard_size=10**9)
    weights: dict[str, Tensor] = load_file(folder / "model.safetensors")
    return weights


def _differing(value: dict[str, Tensor], reference: dict[str, Tensor]) -> list[str]:
    assert value.keys() == reference.keys()
    return [name for name in reference if not torch.equal(value[name], reference[name])]


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_a_checkpoint_of_tp2_pp2_exports_the_bits_that_were_imported(
    case: str, runs: dict[str, dict[str, Any]]
) -> None:
    assert _differing(runs[case]["still"]["weights"], runs[case]["source"]) == []


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_the_imported_model_is_what_trains_at_any_layout(
    case: str, runs: dict[str, dict[str, Any]]
) -> None:
    trained, still = runs[case]["trained"], runs[case]["still"]
    assert len(trained["losses"]) == len(still["losses"]) == 2
    tolerance = 2e-4 if "bf16" in case else 2e-6
    assert relative_difference(still["losses"][:1], trained["losses"][:1]) <= tolerance
    # Each weight has learnt, and the export shows it, without the rows of padding.
    changed = _differing(trained["weights"], runs[case]["source"])
    assert changed == list(runs[case]["source"])
    assert trained["weights"]["model.embed_tokens.weight"].shape[0] == 100
