"""The functions that give Megatron our layers."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any
from unittest import mock

from tests.distributed.test_parity import BTP, CASES, DENSE, VANILLA
from tests.support.distributed import run_ranks
from tests.support.parallel_gpt import Case, tensor_parallel_state, transformer_config


def specs_of(tp: int, environments: Sequence[str | None]) -> list[dict[str, Any]]:
    """On a rank: what `gpt_spec` makes of each environment and a model without sequence
    parallelism."""
    from boost_layers import specs

    found = []
    for environment in environments:
        config = transformer_config(Case(plain=CASES["btp"].plain, low_rank=VANILLA, tp=tp))
        settings = {} if environment is None else {specs.ENVIRONMENT_VARIABLE: environment}
        with (
            tensor_parallel_state(tp),
            mock.patch.dict(os.environ, settings),
            mock.patch.object(specs, "logger", mock.create_autospec(logging.Logger)) as logger,
        ):
            block = specs.gpt_spec(SimpleNamespace(transformer=config))
        (spec,) = {spec.submodules.projections: spec for spec in block.layer_specs}.values()
        found.append(
            {
                "layers": len(block.layer_specs),
                "layer": spec.module.__name__,
                "projections": spec.submodules.projections.__name__,
                "settings": spec.params["low_rank"],
                "sequence_parallel": config.sequence_parallel,
                "warned": logger.warning.call_count,
                "final norm shards hidden": block.layer_norm.keywords["hidden_sharded"],
            }
        )
    return found


def test_gpt_spec_gives_btp_layers_and_switches_their_borders_on() -> None:
    environments = (None, "arch=cola,rank=8,tp=vanilla", "arch=dense")
    for by_default, vanilla, dense in run_ranks(specs_of, 2, 2, environments):
        settings = by_default.pop("settings")
        assert (settings.arch, settings.ratio) == ("cola", 0.25)
        assert by_default == {
            "layers": 2,
            "layer": "LowRankLayer",
            "projections": "BtpProjections",
            "sequence_parallel": True,
            "warned": 1,
            "final norm shards hidden": True,
        }
        for other, projections in ((vanilla, "VanillaProjections"), (dense, "FullRankProjections")):
            assert other["projections"] == projections
            assert not other["sequence_parallel"] and not other["warned"]
            assert not other["final norm shards hidden"]


def test_gpt_spec_leaves_one_rank_without_sequence_parallelism() -> None:
    ((found,),) = run_ranks(specs_of, 1, 1, ("arch=cola,rank=8",))
    assert found["projections"] == "BtpProjections"
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
