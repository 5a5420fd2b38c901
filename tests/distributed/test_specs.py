"""The functions that give Megatron our layers."""

from __future__ import annotations

import logging
import os
from types import SimpleNamespace
from typing import Any
from unittest import mock

from tests.distributed.test_parity import BTP, CASES, DENSE, VANILLA
from tests.support.distributed import run_ranks
from tests.support.parallel_gpt import Case, tensor_parallel_state, transformer_config


def spec_of(tp: int, environment: str | None) -> dict[str, Any]:
    """On a rank: what `gpt_spec` makes of the environment and of a model without sequence
    parallelism."""
    from boost_layers import specs

    config = transformer_config(Case(plain=CASES["btp"].plain, low_rank=VANILLA, tp=tp))
    settings = {} if environment is None else {specs.ENVIRONMENT_VARIABLE: environment}
    with (
        tensor_parallel_state(tp),
        mock.patch.dict(os.environ, settings),
        mock.patch.object(specs, "logger", mock.create_autospec(logging.Logger)) as logger,
    ):
        block = specs.gpt_spec(SimpleNamespace(transformer=config))
        (spec,) = {id(spec): spec for spec in block.layer_specs}.values()
        return {
            "layers": len(block.layer_specs),
            "layer": spec.module.__name__,
            "projections": spec.submodules.projections.__name__,
            "settings": spec.params["low_rank"],
            "sequence_parallel": config.sequence_parallel,
            "warned": logger.warning.call_count,
            "final norm shards hidden": block.layer_norm.keywords["hidden_sharded"],
        }


def test_gpt_spec_gives_btp_layers_and_switches_their_borders_on() -> None:
    for found in run_ranks(spec_of, 2, 2, None):
        settings = found.pop("settings")
        assert (settings.arch, settings.ratio) == ("cola", 0.25)
        assert found == {
            "layers": 2,
            "layer": "LowRankLayer",
            "projections": "BtpProjections",
            "sequence_parallel": True,
            "warned": 1,
            "final norm shards hidden": True,
        }


def test_gpt_spec_leaves_other_strategies_and_one_rank_as_they_are() -> None:
    for tp, environment, projections in (
        (2, "arch=cola,rank=8,tp=vanilla", "VanillaProjections"),
        (2, "arch=dense", "FullRankProjections"),
        (1, "arch=cola,rank=8", "BtpProjections"),
    ):
        found = run_ranks(spec_of, tp, tp, environment)[0]
        assert found["projections"] == projections
        assert not found["sequence_parallel"] and not found["warned"]


def refusals_of_the_python_entry() -> list[str]:
    from boost_layers import LowRankConfig, low_rank_spec

    refusals = []
    for low_rank, field, value in (
        (LowRankConfig(), "hidden_size", 32),
        (BTP, "ffn_hidden_size", 31),
        (DENSE, "qk_layernorm", True),
    ):
        config = transformer_config(Case(plain=CASES["btp"].plain, low_rank=BTP, tp=2))
        setattr(config, field, value)
        try:
            low_rank_spec(config, low_rank)
        except ValueError as refusal:
            refusals.append(str(refusal))
    return refusals


def test_the_python_entry_checks_the_model() -> None:
    none, size, feature = run_ranks(refusals_of_the_python_entry, 1)[0]
    assert none.startswith("--low-rank-arch none")
    assert size.startswith("--ffn-hidden-size 31")
    assert feature.startswith("--qk-layernorm")
