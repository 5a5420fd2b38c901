"""`LowRankConfig`: what it refuses by itself, and what its settings mean."""

from __future__ import annotations

from dataclasses import FrozenInstanceError, fields
from typing import Any

import pytest

from boost_layers.config import ATTENTION_PROJECTIONS, MLP_PROJECTIONS, LowRankConfig, flag_of

PROJECTIONS = (*ATTENTION_PROJECTIONS, *MLP_PROJECTIONS)


@pytest.mark.parametrize(
    ("settings", "message", "legal"),
    [
        ({"rank": 0}, "--low-rank-rank 0: .*nearest legal value: 1$", {"rank": 1}),
        ({"rank": -5}, "--low-rank-rank -5: .*nearest legal value: 1$", {"rank": 1}),
        ({"attn_rank": 0}, "--low-rank-attn-rank 0: .*value: 1$", {"attn_rank": 1}),
        ({"mlp_rank": -1}, "--low-rank-mlp-rank -1: .*value: 1$", {"mlp_rank": 1}),
        ({"ratio": 0.0}, "--low-rank-ratio 0.0: .*nearest legal value: 0.01$", {"ratio": 0.01}),
        ({"ratio": -2.0}, "--low-rank-ratio -2.0: .*value: 0.01$", {"ratio": 0.01}),
        ({"ratio": 1.5}, "--low-rank-ratio 1.5: .*value: 1.0$", {"ratio": 1.0}),
        ({"ratio": float("nan")}, "--low-rank-ratio nan: .*value: 0.01$", {"ratio": 0.01}),
        ({"ratio": float("inf")}, "--low-rank-ratio inf: .*value: 1.0$", {"ratio": 1.0}),
        (
            {"arch": "dense", "act": "silu"},
            "--low-rank-act silu: --low-rank-arch dense .*nearest legal value: auto$",
            {"arch": "dense", "act": "auto"},
        ),
        (
            {"arch": "cola", "act_anneal": -3},
            "--low-rank-act-anneal -3: .*nearest legal value: 0$",
            {"arch": "cola", "act_anneal": 0},
        ),
        (
            {"arch": "cola", "act_anneal": 2.6},
            "--low-rank-act-anneal 2.6: .*nearest legal value: 3$",
            {"arch": "cola", "act_anneal": 3},
        ),
        (
            {"arch": "svd", "act_anneal": 10},
            "--low-rank-act-anneal 10: .*svd is the identity.*legal value: 0 .*-act silu",
            {"arch": "svd", "act": "silu", "act_anneal": 10},
        ),
        (
            {"arch": "lax", "lax_base": "svd", "act_anneal": 10},
            "--low-rank-act-anneal 10: .*lax is the identity.*legal value: 0 .*-act silu",
            {"arch": "lax", "act_anneal": 10},
        ),
        (
            {"arch": "dense", "act_anneal": 10},
            "--low-rank-act-anneal 10: .*dense .*legal value: 0 .*--low-rank-arch cola",
            {"arch": "cola", "act_anneal": 10},
        ),
    ],
)
def test_refuses_by_flag_and_value_and_names_a_value_that_is_accepted(
    settings: dict[str, Any], message: str, legal: dict[str, Any]
) -> None:
    with pytest.raises(ValueError, match=message):
        LowRankConfig(**settings)
    LowRankConfig(**legal)


def test_the_activation_grows_to_its_whole_and_stays() -> None:
    annealed = LowRankConfig(arch="cola", act_anneal=4)
    amounts = [annealed.activation_amount(step) for step in (0, 1, 3, 4, 5, 10**6)]
    assert amounts == [0.0, 0.25, 0.75, 1.0, 1.0, 1.0]
    assert LowRankConfig(arch="cola").activation_amount(0) == 1.0
    assert LowRankConfig(arch="svd").activation_amount(0) == 1.0


def test_the_nearest_ratio_gives_a_rank_even_in_a_tiny_model() -> None:
    assert LowRankConfig(ratio=0.01).rank_of("q_proj", hidden_size=8) == 1


@pytest.mark.parametrize(
    ("settings", "attention", "mlp", "flags"),
    [
        ({}, 25, 25, ("--low-rank-ratio", "--low-rank-ratio")),
        ({"ratio": 0.5}, 50, 50, ("--low-rank-ratio", "--low-rank-ratio")),
        ({"ratio": 0.5, "rank": 7}, 7, 7, ("--low-rank-rank", "--low-rank-rank")),
        (
            {"rank": 7, "attn_rank": 3},
            3,
            7,
            ("--low-rank-attn-rank", "--low-rank-rank"),
        ),
        (
            {"mlp_rank": 9},
            25,
            9,
            ("--low-rank-ratio", "--low-rank-mlp-rank"),
        ),
        (
            {"attn_rank": 3, "mlp_rank": 9},
            3,
            9,
            ("--low-rank-attn-rank", "--low-rank-mlp-rank"),
        ),
    ],
)
def test_the_specific_rank_wins(
    settings: dict[str, Any], attention: int, mlp: int, flags: tuple[str, str]
) -> None:
    config = LowRankConfig(arch="cola", **settings)
    for projections, rank, flag in (
        (ATTENTION_PROJECTIONS, attention, flags[0]),
        (MLP_PROJECTIONS, mlp, flags[1]),
    ):
        for projection in projections:
            assert config.rank_of(projection, hidden_size=100) == rank
            assert config.rank_flag(projection) == flag


def test_the_ratio_is_rounded_to_the_nearest_rank() -> None:
    for hidden, rank in ((64, 21), (65, 21), (68, 22), (1, 1)):
        assert LowRankConfig(ratio=0.33).rank_of("q_proj", hidden) == rank
    # The published 1B model has 2048 and 512.
    assert LowRankConfig().rank_of("down_proj", 2048) == 512


def test_auto_is_what_the_architecture_is_published_with() -> None:
    cola, dense = LowRankConfig(arch="cola"), LowRankConfig(arch="dense")
    assert (cola.activation, cola.mlp_kind, cola.low_rank) == ("silu", "product", True)
    assert (dense.activation, dense.mlp_kind, dense.low_rank) == ("identity", "swiglu", False)
    chosen = LowRankConfig(arch="cola", act="gelu", mlp="swiglu")
    assert (chosen.activation, chosen.mlp_kind) == ("gelu", "swiglu")


def test_it_is_frozen_and_by_keyword_only() -> None:
    with pytest.raises(FrozenInstanceError):
        LowRankConfig().rank = 3  # type: ignore[misc]
    with pytest.raises(TypeError):
        LowRankConfig("cola")  # type: ignore[misc]


def test_every_field_but_the_seed_is_a_flag() -> None:
    flags = [flag_of(field.name) for field in fields(LowRankConfig) if field.name != "seed"]
    assert len(set(flags)) == len(flags) == len(fields(LowRankConfig)) - 1
    assert all(flag.startswith("--") for flag in flags)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"arch": "cola", "lax_gate": "linear"}, "--lax-gate linear: .*--low-rank-arch lax$"),
        ({"arch": "svd", "lax_base": "svd"}, "--lax-base svd: .*--low-rank-arch lax$"),
        ({"arch": "dense", "lax_norm": "none"}, "--lax-norm none: .*--low-rank-arch lax$"),
        ({"arch": "cola", "ranks": "q=0"}, "--low-rank-ranks q=0: .*nearest legal value: q=1$"),
        ({"arch": "cola", "ranks": "q=x"}, "--low-rank-ranks q=x: .*nearest legal value: q=1$"),
        ({"arch": "cola", "ranks": "q=1,q=2"}, "--low-rank-ranks q=1,q=2: q takes one rank"),
        ({"arch": "cola", "ranks": "qkv=8"}, "'qkv' is no projection; legal names: q, k, v, o,"),
        ({"arch": "cola", "ranks": ""}, "'' is no projection"),
        ({"arch": "cola", "layers": "3"}, "--low-rank-layers 3: is A-B.*nearest legal value: 0-0$"),
        ({"arch": "cola", "layers": "3-2"}, "--low-rank-layers 3-2: is A-B"),
    ],
)
def test_refuses_settings_of_layers_and_latents(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LowRankConfig(**settings)


def test_a_rank_table_wins_over_every_other_rank() -> None:
    low_rank = LowRankConfig(arch="cola", rank=7, attn_rank=3, ranks="k=5;down=9")
    ranks = {name: low_rank.rank_of(name, 100) for name in PROJECTIONS}
    assert ranks == {
        "q_proj": 3,
        "k_proj": 5,
        "v_proj": 3,
        "o_proj": 3,
        "gate_proj": 7,
        "up_proj": 7,
        "down_proj": 9,
    }
    assert [low_rank.rank_flag(n) for n in ("k_proj", "q_proj", "up_proj")] == [
        "--low-rank-ranks",
        "--low-rank-attn-rank",
        "--low-rank-rank",
    ]


@pytest.mark.parametrize(
    ("settings", "activation", "mlp"),
    [
        ({"arch": "svd"}, "identity", "swiglu"),
        ({"arch": "lax"}, "silu", "product"),
        ({"arch": "lax", "lax_base": "svd"}, "identity", "swiglu"),
        ({"arch": "lax", "act": "gelu", "mlp": "swiglu"}, "gelu", "swiglu"),
    ],
)
def test_auto_follows_the_architecture(settings: dict[str, Any], activation: str, mlp: str) -> None:
    low_rank = LowRankConfig(**settings)
    assert (low_rank.activation, low_rank.mlp_kind) == (activation, mlp)


def test_mixed_depth_is_dense_outside_its_layers() -> None:
    low_rank = LowRankConfig(arch="lax", lax_gate="linear", recompute=True, layers="1-2", seed=5)
    archs = [low_rank.of_layer(index).arch for index in range(5)]
    assert archs == ["dense", "lax", "lax", "dense", "dense"]
    assert (low_rank.first_layer, low_rank.last_layer) == (1, 2)
    dense = low_rank.of_layer(0)
    assert (dense.mlp_kind, dense.hidden_sharded, dense.seed) == ("swiglu", False, 5)
    assert low_rank.of_layer(1) is low_rank
