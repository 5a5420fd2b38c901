"""Every figure of the accounting against a model that is built and run, exactly."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from boost_layers.config import LowRankConfig
from tests.support.accounted import Measured, accounted, measure
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
LAX = replace(BTP, arch="lax")
CHECKPOINTED = replace(BTP, recompute=True)
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
    "btp fp16": {"low_rank": BTP, "dtype": torch.float16},
    "btp fp16 ungrouped": {"low_rank": replace(BTP, grouping=False), "dtype": torch.float16},
    "btp fp16 sync": {"low_rank": replace(BTP, norm="sync"), "dtype": torch.float16},
    "btp fused embedding": {"low_rank": BTP},
    "btp fused embedding full recompute": {"low_rank": BTP, "transformer": FULL},
    "btp ranks": {
        "low_rank": LowRankConfig(arch="cola", ranks="q=2,k=4,v=6,o=8,gate=10,up=12,down=14")
    },
    "btp local": {"low_rank": replace(BTP, core_attention="local")},
    "btp local bf16": {
        "low_rank": replace(BTP, core_attention="local"),
        "dtype": torch.bfloat16,
    },
    "btp local selective recompute": {
        "low_rank": replace(BTP, core_attention="local"),
        "transformer": SELECTIVE,
    },
    "dense local": {"low_rank": replace(DENSE, core_attention="local")},
    "svd": {"low_rank": replace(BTP, arch="svd")},
    "checkpointed": {"low_rank": CHECKPOINTED},
    "checkpointed bf16": {"low_rank": CHECKPOINTED, "dtype": torch.bfloat16},
    "checkpointed ungrouped": {"low_rank": replace(CHECKPOINTED, grouping=False)},
    "checkpointed residual": {"low_rank": replace(CHECKPOINTED, recompute_residual=True)},
    "checkpointed shard": {"low_rank": replace(CHECKPOINTED, recompute_shard=True)},
    "checkpointed residual shard": {
        "low_rank": replace(CHECKPOINTED, recompute_residual=True, recompute_shard=True)
    },
    "lax": {"low_rank": LAX},
    "lax bf16": {"low_rank": LAX, "dtype": torch.bfloat16},
    "lax ungrouped": {"low_rank": replace(LAX, grouping=False)},
    "lax linear rmsnorm": {"low_rank": replace(LAX, lax_gate="linear", lax_norm="rmsnorm")},
    "lax identity none svd": {
        "low_rank": replace(LAX, lax_gate="identity", lax_norm="none", lax_base="svd")
    },
    "lax full recompute": {"low_rank": LAX, "transformer": FULL},
    "lax block recompute": {"low_rank": LAX, "transformer": BLOCK},
    "lax checkpointed": {"low_rank": replace(LAX, recompute=True)},
    "lax checkpointed residual shard": {
        "low_rank": replace(LAX, recompute=True, recompute_residual=True, recompute_shard=True)
    },
    "lax vanilla": {"low_rank": replace(LAX, tp="vanilla")},
    "lax vanilla ungrouped": {"low_rank": replace(LAX, tp="vanilla", grouping=False)},
    "lax vanilla identity none svd": {
        "low_rank": replace(LAX, tp="vanilla", lax_gate="identity", lax_norm="none", lax_base="svd")
    },
    "lax vanilla full recompute": {"low_rank": replace(LAX, tp="vanilla"), "transformer": FULL},
    "lax vanilla block identity none svd": {
        "low_rank": replace(
            LAX, tp="vanilla", lax_gate="identity", lax_norm="none", lax_base="svd"
        ),
        "transformer": BLOCK,
    },
    "lax mixed": {"low_rank": replace(LAX, layers="1-2")},
    "btp mixed": {"low_rank": replace(BTP, layers="1-1")},
    "btp mixed first": {"low_rank": replace(BTP, layers="0-0")},
    "btp mixed checkpointed": {"low_rank": replace(CHECKPOINTED, layers="1-1")},
    "btp mixed full recompute": {"low_rank": replace(BTP, layers="1-1"), "transformer": FULL},
    "vanilla mixed": {"low_rank": replace(VANILLA, layers="0-1")},
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


GQA_CASES = (
    "btp",
    "btp ungrouped",
    "btp selective recompute",
    "btp local",
    "checkpointed",
    "lax vanilla",
    "vanilla",
    "vanilla ungrouped",
    "vanilla replicated",
    "dense",
    "dense sequence-parallel",
)


def cases_of(tp: int) -> dict[str, Case]:
    cases = {}
    for name, settings in CASES.items():
        if tp == 1 and settings.get("sequence_parallel"):
            continue
        for suffix, kv_heads in (("", 8), (" gqa", 4)):
            if suffix and name not in GQA_CASES:
                continue
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
        return {
            name: measure(case, SEQUENCE, BATCH, fused_embedding="fused" in name)
            for name, case in cases.items()
        }


@pytest.mark.parametrize(
    "tp, names",
    [
        (2, ("btp bf16", "vanilla", "dense sequence-parallel", "lax checkpointed")),
        pytest.param(1, tuple(CASES), marks=pytest.mark.slow),
        pytest.param(2, tuple(CASES), marks=pytest.mark.slow),
    ],
    ids=["some", "all, one rank", "all"],
)
def test_a_built_model_is_as_accounted(tp: int, names: tuple[str, ...]) -> None:
    cases = {
        name: case for name, case in cases_of(tp).items() if name.removesuffix(" gqa") in names
    }
    for found in run_ranks(measure_each, tp, cases):
        for name, case in cases.items():
            expected = accounted(case, SEQUENCE, BATCH, fused_embedding="fused" in name)
            assert (name, found[name]) == (name, expected)
