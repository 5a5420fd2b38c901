"""Every figure of the accounting against a model that is built and run, exactly."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from boost_layers.config import LowRankConfig
from megatron.boost.accounting.activations import kept_activation_bytes
from megatron.boost.accounting.collectives import (
    border_collectives,
    layer_collectives,
)
from megatron.boost.accounting.flops import Work, checkpointed_layers, rank_hardware_flops
from megatron.boost.accounting.parameters import stage_tensors
from megatron.boost.accounting.sizes import Layout, Model
from tests.support.accounted import Measured, accounted_layout, accounted_model, measure
from tests.support.distributed import run_ranks
from tests.support.parallel_gpt import Case, tensor_parallel_state
from tests.support.plain_llama import PlainConfig

SEQUENCE, BATCH = 8, 3
PLAIN = PlainConfig(
    vocab_size=50,
    hidden=32,
    ffn=48,
    heads=8,
    kv_heads=8,
    head_dim=4,
    layers=3,
    arch="cola",
    rank=12,
    mlp_rank=20,
    mlp="product",
)
BTP = LowRankConfig(arch="cola", attn_rank=12, mlp_rank=20)
VANILLA = replace(BTP, tp="vanilla")
REPLICATED = replace(VANILLA, vanilla_attention="replicated")
DENSE = LowRankConfig(arch="dense")
FULL = {
    "recompute_granularity": "full",
    "recompute_method": "uniform",
    "recompute_num_layers": 1,
}
BLOCK = {**FULL, "recompute_method": "block", "recompute_num_layers": 2}
SELECTIVE = {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]}

CASES: dict[str, dict[str, Any]] = {
    "btp": {"low_rank": BTP},
    "btp bf16": {"low_rank": BTP, "dtype": torch.bfloat16},
    "btp fp64": {"low_rank": BTP, "dtype": torch.float64},
    "btp ungrouped": {"low_rank": replace(BTP, grouping=False)},
    "btp sync bf16": {"low_rank": replace(BTP, norm="sync"), "dtype": torch.bfloat16},
    "btp swiglu": {"low_rank": replace(BTP, mlp="swiglu")},
    "btp full recompute": {"low_rank": BTP, "transformer": FULL},
    "btp block recompute": {"low_rank": BTP, "transformer": BLOCK},
    "btp selective recompute": {"low_rank": BTP, "transformer": SELECTIVE},
    "svd": {"low_rank": replace(BTP, arch="svd")},
    "vanilla": {"low_rank": VANILLA},
    "vanilla bf16": {"low_rank": VANILLA, "dtype": torch.bfloat16},
    "vanilla ungrouped": {"low_rank": replace(VANILLA, grouping=False)},
    "vanilla replicated": {"low_rank": REPLICATED},
    "vanilla full recompute": {"low_rank": VANILLA, "transformer": FULL},
    "vanilla selective recompute": {"low_rank": VANILLA, "transformer": SELECTIVE},
    "dense": {"low_rank": DENSE},
    "dense sequence-parallel": {"low_rank": DENSE, "sequence_parallel": True},
    "dense sequence-parallel bf16": {
        "low_rank": DENSE,
        "sequence_parallel": True,
        "dtype": torch.bfloat16,
    },
    "dense full recompute": {"low_rank": DENSE, "transformer": FULL},
    "dense selective recompute": {"low_rank": DENSE, "transformer": SELECTIVE},
}


def cases_of(tp: int) -> dict[str, Case]:
    cases = {}
    for name, settings in CASES.items():
        if tp == 1 and settings.get("sequence_parallel"):
            continue
        for suffix, kv_heads in (("", 8), (" gqa", 4)):
            plain = replace(PLAIN, kv_heads=kv_heads, tied=bool(suffix))
            cases[name + suffix] = Case(
                plain=plain,
                tp=tp,
                padded_vocab=56,
                **{"dtype": torch.float32, **settings},
            )
    return cases


def measure_each(cases: dict[str, Case]) -> dict[str, Measured]:
    with tensor_parallel_state(next(iter(cases.values())).tp):
        return {name: measure(case, SEQUENCE, BATCH) for name, case in cases.items()}


def accounted_collectives(model: Model, layout: Layout) -> dict[tuple[str, str, str], Any]:
    again = checkpointed_layers(model, layout, 0)
    total: dict[tuple[str, str, str], Any] = {}
    parts = [
        ("layer", layer_collectives(model, layout, layer, checkpointed=layer in again))
        for layer in range(model.num_layers)
    ]
    for scope, collectives in [*parts, ("border", border_collectives(model, layout, 0))]:
        for (phase, operation), traffic in collectives.items():
            calls, size = total.get((scope, phase, operation), (0, 0))
            total[scope, phase, operation] = (calls + traffic.calls, size + traffic.bytes)
    return total


@pytest.mark.parametrize("tp", [1, 2])
def test_a_built_model_is_as_accounted(tp: int) -> None:
    cases = cases_of(tp)
    for found in run_ranks(measure_each, tp, cases):
        for name, case in cases.items():
            model, layout = accounted_model(case), accounted_layout(case, SEQUENCE, BATCH)
            uncausal = Work(BATCH * SEQUENCE, 2 * BATCH * SEQUENCE**2)
            expected = Measured(
                shapes={n: t.on_rank(tp) for n, t in stage_tensors(model, layout, 0).items()},
                kept_bytes=kept_activation_bytes(model, layout, 0),
                flops=rank_hardware_flops(model, layout, 0, uncausal),
                collectives=accounted_collectives(model, layout),
            )
            assert (name, found[name]) == (name, expected)
