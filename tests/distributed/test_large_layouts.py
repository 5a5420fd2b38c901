"""Ranks of a 40B model at TP 8 · PP 8, built without memory and communication: on the meta device,
in a `fake` process group of 64, from the recipe's own command line. Shapes, bytes and collectives
are those of the accounting."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from boost_layers.config import LowRankConfig
from megatron.boost.accounting.collectives import layer_collectives
from megatron.boost.accounting.parameters import (
    layer_parameters,
    model_parameters,
    rank_parameters,
)
from megatron.boost.accounting.sizes import Layout, Model
from megatron.boost.cpu import megatron_on_cpu
from megatron.boost.recipes.commands import Command, Recipe, command_of
from megatron.boost.recipes.facts import RankFacts, accounted_facts, differences
from tests.support.distributed import run_ranks

TP = PP = 8
LAYOUT = f"--tensor-model-parallel-size {TP} --pipeline-model-parallel-size {PP}"
PLACES = ((0, 0), (5, 3), (7, 7))
"""(TP rank, PP rank): the first, a middle and the last stage, each at another place of its TP
group."""
D, F, HEADS, LAYERS, RANK, VOCAB, TOKENS = 8192, 22016, 64, 48, 2048, 32000, 4096
STRATEGIES: dict[str, tuple[str, str | None, str]] = {
    "btp": ("btp", "cola", ""),
    "dense": ("full-rank", None, ""),
    "vanilla": ("vanilla", "cola", ""),
    "svd": ("btp", "svd", ""),
    "lax": ("btp", "lax", ""),
    "lax vanilla": ("vanilla", "lax", ""),
    "mixed": ("btp", "cola", "--low-rank-layers 4-43"),
    "checkpointed": ("btp", "cola", "--low-rank-recompute"),
    "interleaved": ("btp", "lax", "--num-layers-per-virtual-pipeline-stage 3"),
    "fully recomputed": (
        *("vanilla", "lax"),
        "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
    ),
}


def command(strategy: str) -> Command:
    words, arch, flags = STRATEGIES[strategy]
    recipe = Recipe("llama2", "40B", words, arch)
    return replace(command_of(recipe, *LAYOUT.split(), *flags.split()), world_size=TP * PP)


def build_each(
    command: Command, places: tuple[tuple[int, int], ...]
) -> list[tuple[RankFacts, Model, Layout]]:
    """On a rank: what is built at each place, and what the command line says it is."""
    with megatron_on_cpu():
        from megatron.boost.recipes.meta_rank import built_facts, configured, fake_world

        found = []
        for tp_rank, pp_rank in places:
            with configured(command, pp_rank * TP + tp_rank) as run, fake_world(run):
                assert run.pp_rank == pp_rank
                found.append((built_facts(run), run.model, run.layout))
        return found


@pytest.mark.parametrize(
    "strategy",
    [s if s in ("btp", "dense") else pytest.param(s, marks=pytest.mark.slow) for s in STRATEGIES],
)
def test_ranks_of_a_40b_model_are_as_accounted(strategy: str) -> None:
    (built,) = run_ranks(build_each, 1, command(strategy), PLACES, init_process_group=False)
    for (_, pp_rank), (facts, model, layout) in zip(PLACES, built, strict=True):
        assert (model.num_layers, model.padded_vocab_size) == (LAYERS, 32768)
        assert len(layout.layers(model, pp_rank)) == LAYERS // PP
        assert facts.kept_bytes > 0 and facts.collectives
        assert differences(facts, accounted_facts(model, layout, pp_rank)) == []


def test_what_is_not_as_accounted_is_named() -> None:
    """One rank beside the accounting of other settings than its own."""
    (((facts, model, layout),),) = run_ranks(
        build_each, 1, command("btp"), ((5, 3),), init_process_group=False
    )

    def named(settings: dict[str, Any]) -> set[str]:
        other = replace(model, low_rank=replace(model.low_rank, **settings))
        lines = differences(facts, accounted_facts(other, layout, 3))
        return {line.split(":")[0].split(" of ")[0] for line in lines}

    assert named({}) == set()
    assert named({"norm": "sync"}) == {"collectives", "kept_bytes"}
    assert named({"recompute": True}) == {"kept_bytes"}
    assert named({"rank": RANK + 8}) == {"shapes", "parameter_bytes", "kept_bytes", "collectives"}
    assert named({"arch": "lax"}) >= {"shapes", "message_bytes"}


def test_the_40b_model_by_hand() -> None:
    """The accounting's own numbers of this model, typed out."""
    model = Model(
        hidden_size=D,
        ffn_hidden_size=F,
        num_attention_heads=HEADS,
        num_query_groups=HEADS,
        kv_channels=D // HEADS,
        num_layers=LAYERS,
        vocab_size=VOCAB,
        padded_vocab_size=32768,
        tied=False,
        low_rank=LowRankConfig(arch="cola", rank=RANK),
    )
    layout = Layout(
        sequence_length=TOKENS,
        micro_batch_size=1,
        micro_batches=PP,
        tensor_parallel=TP,
        pipeline_parallel=PP,
        dtype=torch.bfloat16,
    )
    factors = RANK * (4 * 2 * D + 3 * (D + F))
    assert layer_parameters(model, 0) == factors + 2 * D == 319_832_064
    assert model_parameters(model) == 48 * 319_832_064 + D + 2 * VOCAB * D
    assert rank_parameters(model, layout, 3) == 6 * 319_832_064 // TP
    vocabulary = 32768 * D // TP
    assert rank_parameters(model, layout, 0) == 6 * 319_832_064 // TP + vocabulary
    assert rank_parameters(model, layout, 7) == 6 * 319_832_064 // TP + vocabulary + D
    found = layer_collectives(model, layout, 0)
    assert {key: (traffic.calls, traffic.bytes) for key, traffic in found.items()} == {
        ("forward", "all_reduce"): (4, 2 * TOKENS * (7 * RANK + 2 * 3 * TP)),
        ("backward", "all_reduce"): (4, 2 * TOKENS * 7 * RANK),
    }
