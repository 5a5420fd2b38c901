"""`--spec boost_layers.specs gpt_spec`: settings from the environment."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from boost_layers.config import LowRankConfig
from boost_layers.projection import BtpProjections, FullRankProjections, VanillaProjections
from boost_layers.specs import (
    ENVIRONMENT_VARIABLE,
    gpt_spec,
    projections_class,
    settings_from_environment,
)


def parsed(monkeypatch: pytest.MonkeyPatch, text: str) -> LowRankConfig:
    monkeypatch.setenv(ENVIRONMENT_VARIABLE, text)
    return settings_from_environment()


def test_the_variable_is_the_documented_one() -> None:
    assert ENVIRONMENT_VARIABLE == "BOOST_LOW_RANK"


def test_unset_means_cola_at_a_quarter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(ENVIRONMENT_VARIABLE, raising=False)
    assert settings_from_environment() == LowRankConfig(arch="cola", ratio=0.25)


@pytest.mark.parametrize(
    ("text", "settings"),
    [
        ("arch=cola,ratio=0.5", {"arch": "cola", "ratio": 0.5}),
        ("arch=dense", {"arch": "dense"}),
        (" arch=cola , rank=64, ", {"arch": "cola", "rank": 64}),
        (
            "arch=cola,attn_rank=8,mlp_rank=16,seed=7",
            {"arch": "cola", "attn_rank": 8, "mlp_rank": 16, "seed": 7},
        ),
        (
            "arch=cola,tp=vanilla,vanilla_attention=replicated,core_attention=sdpa",
            {
                "arch": "cola",
                "tp": "vanilla",
                "vanilla_attention": "replicated",
                "core_attention": "sdpa",
            },
        ),
        (
            "arch=cola,act=gelu,mlp=swiglu,norm=sync",
            {"arch": "cola", "act": "gelu", "mlp": "swiglu", "norm": "sync"},
        ),
        ("arch=cola,grouping=false", {"arch": "cola", "grouping": False}),
        ("arch=cola,grouping=0", {"arch": "cola", "grouping": False}),
        ("arch=cola,grouping=True", {"arch": "cola", "grouping": True}),
        ("arch=cola,ratio=1", {"arch": "cola", "ratio": 1.0}),
        ("rank=64", {"arch": "cola", "rank": 64}),
        ("", {"arch": "cola"}),
        ("ranks=q=64;k=32,layers=0-1", {"arch": "cola", "ranks": "q=64;k=32", "layers": "0-1"}),
        ("arch=lax,lax_base=svd", {"arch": "lax", "lax_base": "svd"}),
    ],
)
def test_pairs_become_settings_of_their_types(
    monkeypatch: pytest.MonkeyPatch, text: str, settings: dict[str, object]
) -> None:
    found = parsed(monkeypatch, text)
    assert found == LowRankConfig(**settings)  # type: ignore[arg-type]
    for name, value in settings.items():
        assert type(getattr(found, name)) is type(value)


def test_defaults_fill_what_the_variable_leaves_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ENVIRONMENT_VARIABLE, "rank=8")
    assert settings_from_environment(seed=7) == LowRankConfig(arch="cola", rank=8, seed=7)
    monkeypatch.setenv(ENVIRONMENT_VARIABLE, "rank=8,seed=9")
    assert settings_from_environment(seed=7) == LowRankConfig(arch="cola", rank=8, seed=9)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("arch=lora", "BOOST_LOW_RANK: arch=lora; legal values: none, dense, cola"),
        ("arch=cola,tp=sideways", "tp=sideways; legal values: btp, vanilla"),
        ("arch=cola,grouping=maybe", "grouping=maybe; legal values: true, false"),
        ("arch=cola,rank=many", "rank=many is not a number of type int"),
        ("arch=cola,rank=", "rank= is not a number of type int"),
        ("arch=cola,rank=1.5", "rank=1.5 is not a number of type int"),
        ("arch=cola,ratio=half", "ratio=half is not a number of type float"),
        ("arch=cola,rnak=3", "unknown setting 'rnak'; known: arch, tp, ratio, rank, "),
        ("cola", "unknown setting 'cola'"),
        ("arch=cola;rank=3", "arch=cola;rank=3; legal values"),
        ("arch=cola,rank=0", "--low-rank-rank 0: .*nearest legal value: 1"),
        ("arch=cola,ratio=2", "--low-rank-ratio 2.0: .*nearest legal value: 1.0"),
    ],
)
def test_mistakes_are_named(monkeypatch: pytest.MonkeyPatch, text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parsed(monkeypatch, text)


def test_a_spec_cannot_anneal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ENVIRONMENT_VARIABLE, "arch=cola,act_anneal=10")
    model = SimpleNamespace(transformer=SimpleNamespace(inference_sampling_seed=1))
    with pytest.raises(ValueError, match="BOOST_LOW_RANK: act_anneal=10: .*legal value: 0"):
        gpt_spec(model)


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        (LowRankConfig(arch="dense"), FullRankProjections),
        (LowRankConfig(arch="dense", tp="vanilla"), FullRankProjections),
        (LowRankConfig(arch="cola"), BtpProjections),
        (LowRankConfig(arch="cola", tp="vanilla"), VanillaProjections),
    ],
)
def test_settings_choose_the_strategy(settings: LowRankConfig, expected: type) -> None:
    assert projections_class(settings) is expected
