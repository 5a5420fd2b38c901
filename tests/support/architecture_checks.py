"""What is asked of any low-rank architecture, a line each: parity, accounting, resharding.

    GATED = UserArchitecture(Path("examples/gated_latent.py"), "gated", "GatedProjection")
    check_parity(GATED, tp=2)

The file is loaded on the ranks alone, as in a program of its user's: what it registers is unknown
to other tests.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from boost_layers.config import LowRankConfig
from tests.support.accounted import Measured, accounted, measure
from tests.support.distributed import run_ranks
from tests.support.parallel_gpt import Case, tensor_parallel_state
from tests.support.parity import beyond, compare, reference
from tests.support.plain_llama import PlainConfig, random_canonical
from tests.support.resharding import load, save

SEQUENCE, BATCH = 8, 3
PLAIN = PlainConfig(
    vocab_size=52,
    hidden=32,
    ffn=48,
    heads=4,
    kv_heads=4,
    head_dim=8,
    layers=3,
    arch="cola",
    rank=12,
    mlp_rank=16,
)
TABLE = {"k_proj": 8, "v_proj": 4, "down_proj": 20}
FULL = {
    "recompute_granularity": "full",
    "recompute_method": "uniform",
    "recompute_num_layers": 1,
}
BTP: dict[str, dict[str, Any]] = {
    "btp": {},
    "ungrouped": {"grouping": False},
    "sync": {"norm": "sync"},
    "gelu, swiglu": {"act": "gelu", "mlp": "swiglu"},
    "rank table": {"ranks": "k=8,v=4,down=20"},
    "middle layer": {"layers": "1-1"},
    "checkpointed": {"recompute": True},
    "checkpointed, ungrouped, sync": {"recompute": True, "grouping": False, "norm": "sync"},
    "checkpointed shares": {"recompute": True, "recompute_residual": True, "recompute_shard": True},
}
VANILLA: dict[str, dict[str, Any]] = {
    "vanilla": {"tp": "vanilla"},
    "vanilla, ungrouped": {"tp": "vanilla", "grouping": False},
    "vanilla, replicated": {"tp": "vanilla", "vanilla_attention": "replicated"},
}


@dataclass(frozen=True)
class UserArchitecture:
    """An architecture in a file of its own, and what it is compared with."""

    file: Path
    name: str
    """That it registers."""
    projection: str
    """A class of the file: one projection in plain PyTorch, made of (in, out, rank, φ), whose
    parameters are whole and have the checkpoint's names."""

    def cases(self, tp: int, dtype: torch.dtype = torch.float64) -> dict[str, Case]:
        """Every strategy and setting that it has, by name. Loads the file."""
        spec = importlib.util.spec_from_file_location(self.file.stem, self.file)
        assert spec is not None and spec.loader is not None
        module = sys.modules.get(spec.name)
        if module is None:
            module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(module)
        common = LowRankConfig(arch=self.name, attn_rank=12, mlp_rank=16)
        architecture = common.architecture
        assert architecture is not None
        splits = architecture.combine is None or architecture.elementwise
        plain = replace(PLAIN, projection=getattr(module, self.projection))
        cases = {}
        for name, settings in (BTP | VANILLA if splits else BTP).items():
            low_rank = replace(common, **settings)
            cases[name] = Case(
                plain=replace(
                    plain,
                    act=low_rank.activation,
                    mlp=low_rank.mlp_kind,
                    ranks=TABLE if low_rank.ranks else None,
                    low_rank_layers=(1, 1) if low_rank.layers else None,
                ),
                low_rank=low_rank,
                tp=tp,
                dtype=dtype,
            )
        whole = cases["btp"]
        cases["full recompute"] = replace(whole, transformer=FULL)
        if common.activation != "identity":
            half_grown = replace(whole.plain, act_amount=0.3)
            cases["half-grown φ"] = replace(whole, plain=half_grown, activation_amount=0.3)
        return cases


def check_parity(architecture: UserArchitecture, tp: int, tolerance: float = 1e-12) -> None:
    """Loss, logits and every gradient agree with the plain model in fp64, in every strategy and
    setting."""
    for found in run_ranks(_errors, tp, architecture, tp):
        assert beyond(found, tolerance) == {}


def _errors(architecture: UserArchitecture, tp: int) -> dict[str, dict[str, float]]:
    cases = architecture.cases(tp)
    return compare({name: (case, reference(case.plain)) for name, case in cases.items()})


def check_accounting(architecture: UserArchitecture, tp: int) -> None:
    """Shapes, bytes that are kept, operations and collectives of a built model, as the ledger and
    torch count them, are exactly those of the accounting."""
    for found in run_ranks(_measured_and_accounted, tp, architecture, tp):
        for name, (of_model, of_accounting) in found.items():
            assert (name, of_model) == (name, of_accounting)


def _measured_and_accounted(
    architecture: UserArchitecture, tp: int
) -> dict[str, tuple[Measured, Measured]]:
    cases = architecture.cases(tp, torch.float32)
    for dtype in (torch.bfloat16, torch.float16):
        cases[f"{dtype}"] = replace(cases["btp"], dtype=dtype)
    with tensor_parallel_state(tp):
        return {
            name: (measure(case, SEQUENCE, BATCH), accounted(case, SEQUENCE, BATCH))
            for name, case in cases.items()
        }


def check_resharding(architecture: UserArchitecture, folder: Path) -> None:
    """Weights that BTP has saved on two ranks are the same to the bit on one, two and four, in
    every strategy and grouping, and give the same loss."""
    (loss, *_) = run_ranks(_save, 2, architecture, str(folder))
    for tp in (1, 2, 4):
        for found in run_ranks(_load, tp, architecture, tp, str(folder)):
            for name, (wrong, loaded_loss) in found.items():
                assert wrong == [], name
                torch.testing.assert_close(loaded_loss, loss, rtol=1e-12, atol=0)


def _save(architecture: UserArchitecture, folder: str) -> Tensor:
    case = architecture.cases(2)["btp"]
    return save(case, random_canonical(case.plain, seed=1), folder)


def _load(
    architecture: UserArchitecture, tp: int, folder: str
) -> dict[str, tuple[list[str], Tensor]]:
    every = architecture.cases(tp)
    names = ("btp", "ungrouped", "vanilla")
    cases = {name: every[name] for name in names if name in every}
    tensors = random_canonical(every["btp"].plain, seed=1)
    found = {}
    for name, (weights, loss) in load(cases, folder).items():
        found[name] = _differing(weights, tensors), loss
    return found


def _differing(weights: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> list[str]:
    """Names that only one has, or whose tensors are not the same."""
    shared = weights.keys() & expected.keys()
    unequal = {name for name in shared if not torch.equal(weights[name], expected[name])}
    return sorted((weights.keys() ^ expected.keys()) | unequal)
