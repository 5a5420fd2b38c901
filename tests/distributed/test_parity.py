"""One model, same weights: every strategy at every TP size against a plain single-process model.

The reference is `tests/support/plain_llama.py`, written from the definition of the architecture.
Weights have fan-in initialisation: at std 0.02 a wrong block would hardly change the loss.
"""

from __future__ import annotations

import math
import re
import statistics
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import replace
from itertools import product

import pytest
import torch

from boost_layers.config import LowRankConfig
from tests.support.distributed import run_ranks
from tests.support.parallel_gpt import Case
from tests.support.parity import check, compare, errors, possible, reference
from tests.support.plain_llama import Lax, PlainConfig

PLAIN = PlainConfig(
    vocab_size=52,
    hidden=32,
    ffn=48,
    heads=4,
    kv_heads=4,
    head_dim=8,
    layers=2,
    arch="cola",
    rank=12,
    mlp_rank=16,
    mlp="product",
)
BTP = LowRankConfig(arch="cola", attn_rank=12, mlp_rank=16)
VANILLA = replace(BTP, tp="vanilla")
REPLICATED = replace(VANILLA, vanilla_attention="replicated")
DENSE = LowRankConfig(arch="dense")
DENSE_PLAIN = replace(PLAIN, arch="dense", mlp="swiglu")
# Heads of another size than hidden/heads, and several query heads to a KV head.
GQA = {"heads": 8, "kv_heads": 4, "head_dim": 6}
MQA = {"kv_heads": 1}
ONE_HEAD = {"heads": 1, "kv_heads": 1, "head_dim": 32}

# Three layers, so that one latent has a layer before and one after it; 12 = 3·4, 16 = 4·4.
LAX_PLAIN = replace(PLAIN, layers=3, lax=Lax())
LAX = replace(BTP, arch="lax")
LAX_SVD_PLAIN = replace(LAX_PLAIN, act="identity", mlp="swiglu")
LATENT = {"recompute": True}
# Four layers of which the two in the middle are low-rank.
MIXED_PLAIN = replace(PLAIN, layers=4, low_rank_layers=(1, 2))
# k and v of another rank than q, down of another than gate and up.
TABLE = {"k_proj": 8, "v_proj": 4, "down_proj": 20}
# A norm over four numbers amplifies fp32's rounding beyond 1e-5.
LAX_TABLE = {**TABLE, "v_proj": 16}

LAX_CASES = {
    "svd": Case(
        plain=replace(PLAIN, act="identity", mlp="swiglu"), low_rank=replace(BTP, arch="svd")
    ),
    "svd-vanilla": Case(
        plain=replace(PLAIN, act="identity", mlp="swiglu"), low_rank=replace(VANILLA, arch="svd")
    ),
    "lax": Case(plain=LAX_PLAIN, low_rank=LAX),
    "lax-svd-base": Case(plain=LAX_SVD_PLAIN, low_rank=replace(LAX, lax_base="svd")),
    "lax-linear-rmsnorm": Case(
        plain=replace(LAX_PLAIN, lax=Lax("linear", "rmsnorm")),
        low_rank=replace(LAX, lax_gate="linear", lax_norm="rmsnorm"),
    ),
    "lax-identity-none": Case(
        plain=replace(LAX_SVD_PLAIN, lax=Lax("identity", "none")),
        low_rank=replace(LAX, lax_base="svd", lax_gate="identity", lax_norm="none"),
    ),
    "lax-ungrouped": Case(plain=LAX_PLAIN, low_rank=replace(LAX, grouping=False)),
    "lax-sync": Case(plain=LAX_PLAIN, low_rank=replace(LAX, norm="sync")),
    "lax-latent-checkpointing": Case(plain=LAX_PLAIN, low_rank=replace(LAX, **LATENT)),
    "lax-full-recompute": Case(
        plain=LAX_PLAIN,
        low_rank=LAX,
        transformer={
            "recompute_granularity": "full",
            "recompute_method": "uniform",
            "recompute_num_layers": 1,
        },
    ),
    "lax-vanilla": Case(plain=LAX_PLAIN, low_rank=replace(LAX, tp="vanilla")),
    "lax-vanilla-full-recompute": Case(
        plain=LAX_PLAIN,
        low_rank=replace(LAX, tp="vanilla"),
        transformer={
            "recompute_granularity": "full",
            "recompute_method": "block",
            "recompute_num_layers": 2,
        },
    ),
    "lax-vanilla-replicated-ungrouped": Case(
        plain=replace(LAX_PLAIN, lax=Lax("linear", "layernorm")),
        low_rank=replace(
            LAX, tp="vanilla", grouping=False, vanilla_attention="replicated", lax_gate="linear"
        ),
    ),
}
LAYER_CASES = {
    "btp-rank-table": Case(
        plain=replace(PLAIN, ranks=TABLE), low_rank=replace(BTP, ranks="k=8,v=4,down=20")
    ),
    "vanilla-rank-table": Case(
        plain=replace(PLAIN, ranks=TABLE), low_rank=replace(VANILLA, ranks="k=8,v=4,down=20")
    ),
    "lax-rank-table": Case(
        plain=replace(LAX_PLAIN, ranks=LAX_TABLE), low_rank=replace(LAX, ranks="k=8,v=16,down=20")
    ),
    "lax-vanilla-rank-table": Case(
        plain=replace(LAX_PLAIN, ranks=LAX_TABLE),
        low_rank=replace(LAX, tp="vanilla", ranks="k=8,v=16,down=20"),
    ),
    "btp-mixed-depth": Case(plain=MIXED_PLAIN, low_rank=replace(BTP, layers="1-2")),
    "vanilla-mixed-depth": Case(plain=MIXED_PLAIN, low_rank=replace(VANILLA, layers="1-2")),
    "lax-mixed-depth": Case(
        plain=replace(MIXED_PLAIN, lax=Lax()), low_rank=replace(LAX, layers="1-2")
    ),
    "btp-last-layers": Case(
        plain=replace(MIXED_PLAIN, low_rank_layers=(2, 3)), low_rank=replace(BTP, layers="2-3")
    ),
    "btp-first-layer": Case(
        plain=replace(MIXED_PLAIN, low_rank_layers=(0, 0)), low_rank=replace(BTP, layers="0-0")
    ),
    "btp-fused-embedding": Case(plain=PLAIN, low_rank=BTP, padded_vocab=64, fused_embedding=True),
    "btp-fused-embedding-tied": Case(
        plain=replace(PLAIN, tied=True), low_rank=BTP, fused_embedding=True
    ),
    "btp-latent-checkpointing": Case(plain=PLAIN, low_rank=replace(BTP, **LATENT)),
    "btp-latent-checkpointing-gqa-sync-ungrouped": Case(
        plain=replace(PLAIN, **GQA),
        low_rank=replace(BTP, **LATENT, norm="sync", grouping=False),
    ),
}
CASES = {
    "btp": Case(plain=PLAIN, low_rank=BTP),
    "btp-ungrouped": Case(plain=PLAIN, low_rank=replace(BTP, grouping=False)),
    "btp-sync": Case(plain=PLAIN, low_rank=replace(BTP, norm="sync")),
    "btp-sync-ungrouped": Case(plain=PLAIN, low_rank=replace(BTP, norm="sync", grouping=False)),
    "btp-swiglu-gelu": Case(
        plain=replace(PLAIN, act="gelu", mlp="swiglu"),
        low_rank=replace(BTP, act="gelu", mlp="swiglu"),
    ),
    "btp-identity": Case(
        plain=replace(PLAIN, act="identity"), low_rank=replace(BTP, act="identity")
    ),
    "btp-gqa": Case(plain=replace(PLAIN, **GQA), low_rank=BTP),
    "btp-tied": Case(plain=replace(PLAIN, tied=True), low_rank=BTP),
    "btp-padded": Case(plain=PLAIN, low_rank=BTP, padded_vocab=64),
    "btp-odd-rank": Case(
        plain=replace(PLAIN, rank=7, mlp_rank=13),
        low_rank=replace(BTP, attn_rank=7, mlp_rank=13),
    ),
    "btp-local-attention": Case(plain=PLAIN, low_rank=replace(BTP, core_attention="local")),
    "vanilla": Case(plain=PLAIN, low_rank=VANILLA),
    "vanilla-padded": Case(plain=PLAIN, low_rank=VANILLA, padded_vocab=64),
    "vanilla-ungrouped": Case(plain=PLAIN, low_rank=replace(VANILLA, grouping=False)),
    "vanilla-swiglu-gelu": Case(
        plain=replace(PLAIN, act="gelu", mlp="swiglu"),
        low_rank=replace(VANILLA, act="gelu", mlp="swiglu"),
    ),
    "vanilla-replicated": Case(plain=PLAIN, low_rank=REPLICATED),
    "vanilla-gqa": Case(plain=replace(PLAIN, **GQA), low_rank=VANILLA),
    "vanilla-replicated-gqa": Case(plain=replace(PLAIN, **GQA), low_rank=REPLICATED),
    "dense": Case(plain=DENSE_PLAIN, low_rank=DENSE),
    "dense-sequence-parallel": Case(plain=DENSE_PLAIN, low_rank=DENSE, sequence_parallel=True),
    "dense-local-attention-gqa": Case(
        plain=replace(DENSE_PLAIN, **GQA), low_rank=replace(DENSE, core_attention="local")
    ),
    "dense-gqa": Case(plain=replace(DENSE_PLAIN, **GQA), low_rank=DENSE),
}
# Head counts that no more than one rank can share.
SINGLE_RANK_CASES = {
    "btp-mqa": Case(plain=replace(PLAIN, **MQA), low_rank=BTP),
    "btp-one-head": Case(plain=replace(PLAIN, **ONE_HEAD), low_rank=BTP),
    "vanilla-mqa": Case(plain=replace(PLAIN, **MQA), low_rank=VANILLA),
    "vanilla-one-head": Case(plain=replace(PLAIN, **ONE_HEAD), low_rank=VANILLA),
    "dense-mqa": Case(plain=replace(DENSE_PLAIN, **MQA), low_rank=DENSE),
    "dense-one-head": Case(plain=replace(DENSE_PLAIN, **ONE_HEAD), low_rank=DENSE),
}


@pytest.mark.parametrize("tp", [1, 2, pytest.param(4, marks=pytest.mark.slow)])
def test_every_strategy_agrees_with_the_plain_model_in_fp64(tp: int) -> None:
    cases = {**CASES, **SINGLE_RANK_CASES} if tp == 1 else CASES
    check(possible(cases, tp), tp, 1e-12)


@pytest.mark.parametrize("tp", [1, 2, pytest.param(4, marks=pytest.mark.slow)])
def test_every_architecture_and_layer_setting_agrees_with_the_plain_model(tp: int) -> None:
    check({**LAX_CASES, **LAYER_CASES}, tp, 1e-12)


def test_the_three_strategies_agree_with_the_plain_model_on_four_ranks() -> None:
    names = ("btp", "vanilla", "dense-sequence-parallel")
    check({name: CASES[name] for name in names}, 4, 1e-12)


QUICK_FP32 = ("btp", "btp-sync", "vanilla", "dense")


@pytest.mark.parametrize("tp", [2, *(pytest.param(t, marks=pytest.mark.slow) for t in (1, 4))])
def test_agrees_with_the_plain_model_in_fp32(tp: int) -> None:
    every = {**CASES, **LAX_CASES, **LAYER_CASES} if tp == 1 else CASES
    names = QUICK_FP32 if tp == 2 else tuple(every)
    cases = {name: replace(every[name], dtype=torch.float32) for name in names}
    check(possible(cases, tp), tp, 1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("tp", [1, 2, 4])
def test_bf16_is_about_as_exact_as_a_plain_model_in_bf16(tp: int) -> None:
    """Errors are against fp64 arithmetic with the same weights, and their measure is the error of a
    plain model whose every operation is in bf16.

    On the whole they must be alike, but for the all-reduce: T partial sums of 1/T of the variance,
    each rounded, and their running sum at every hop, have √(1 + (T + 1)/2 − 1/T) times the error
    of one rounding. No single quantity may be 5/3 times worse than that. Errors are root mean
    squares over models: what one layer rounds badly the norms of LaX hand on to all, so that at
    TP 2 the mean of one LaX model is anywhere from 0.6 to 2.2, but 0.9 to 1.2 over 24 models.
    """
    every = {**CASES, **LAX_CASES}
    names = ["btp", "btp-sync", "btp-ungrouped", "vanilla", "dense"]
    names += ["svd", "lax", "lax-svd-base", "lax-linear-rmsnorm", "lax-vanilla"]
    names += ["dense-sequence-parallel"] if tp > 1 else []
    given, plainly = {}, {}
    for name, seed in product(names, range(1, 5)):
        case = replace(every[name], tp=tp, dtype=torch.bfloat16)
        exact = reference(case.plain, weights=torch.bfloat16, seed=seed)
        given[f"{name} {seed}"] = case, exact
        in_bf16 = reference(
            case.plain, weights=torch.bfloat16, arithmetic=torch.bfloat16, seed=seed
        )
        plainly[f"{name} {seed}"] = errors(in_bf16, exact)
    plain_errors = over_models(plainly)
    alike = max(1.5, math.sqrt(1 + (tp + 1) / 2 - 1 / tp))
    for found in run_ranks(compare, tp, given):
        for name, of_case in over_models(found).items():
            ratios = {what: error / plain_errors[name][what] for what, error in of_case.items()}
            wrong = {what: ratio for what, ratio in ratios.items() if not ratio <= alike * 5 / 3}
            assert wrong == {}
            assert statistics.geometric_mean(ratios.values()) <= alike


def over_models(found: Mapping[str, Mapping[str, float]]) -> dict[str, dict[str, float]]:
    """By case, the root mean square of each quantity's errors over its models ("case seed"). LaX's
    gates and norms, tensors of a few numbers whose errors are not averaged, are one of each kind.
    """
    squares: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for name, of_model in found.items():
        of_case = squares[name.rsplit(" ", 1)[0]]
        for what, error in of_model.items():
            kind = re.search(r"\b(gate|norm)_(weight|bias|left|right)$", what)
            of_case[kind.group() if kind else what].append(error**2)
    return {
        name: {what: math.sqrt(statistics.mean(each)) for what, each in of_case.items()}
        for name, of_case in squares.items()
    }
