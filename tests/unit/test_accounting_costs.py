"""FLOPs, bytes and collectives against published figures and against Megatron's own schedule."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from boost_layers.config import LowRankConfig
from megatron.boost.accounting.activations import (
    chunk_activation_bytes,
    kept_activation_bytes,
    layer_activation_bytes,
    micro_batches_in_flight,
    rank_activation_bytes,
)
from megatron.boost.accounting.collectives import (
    Collectives,
    layer_collectives,
    stage_message_bytes,
    wire_bytes,
)
from megatron.boost.accounting.flops import (
    Work,
    hardware_flops,
    layer_forward_flops,
    layer_gate_flops_per_token,
    layer_projection_flops_per_token,
    model_flops,
    rank_hardware_flops,
    rank_layer_recompute_flops,
)
from megatron.boost.accounting.memory_report import memory_footprint, memory_report_lines
from megatron.boost.accounting.of_megatron import stage_layers_of_config
from megatron.boost.accounting.sizes import Layout, Model
from megatron.boost.accounting.state import rank_state_bytes, state_bytes_per_parameter
from tests.support.single_layer import llama_config

# d, f, heads, layers, r (arXiv 2512.12131); sequence 4096, vocabulary 32000.
PAPER = {
    "3B": (3072, 8192, 24, 28, 768),
    "7B": (4096, 11008, 32, 32, 1024),
    "13B": (5120, 13824, 40, 40, 1280),
}


def paper_model(size: str, **settings: Any) -> Model:
    d, f, heads, layers, rank = PAPER[size]
    settings = {"arch": "cola", "rank": rank, **settings}
    return Model(
        hidden_size=d,
        ffn_hidden_size=f,
        num_attention_heads=heads,
        num_query_groups=heads,
        kv_channels=d // heads,
        num_layers=layers,
        vocab_size=32000,
        padded_vocab_size=32000,
        tied=False,
        low_rank=LowRankConfig(**settings),
    )


TP4 = Layout(sequence_length=4096, micro_batch_size=4, tensor_parallel=4)


def of_phase(collectives: Collectives, phase: str) -> Collectives:
    return {key: traffic for key, traffic in collectives.items() if key[0] == phase}


@pytest.mark.parametrize(
    "size, micro_batch, full_rank, vanilla, btp",
    [("3B", 4, 192, 992, 168), ("7B", 4, 256, 1328, 224), ("13B", 4, 320, 1664, 280)]
    + [("7B", 1, 64, 332, 56), ("7B", 8, 512, 2656, 448)],
)
def test_the_papers_payload_of_a_layers_forward(
    size: str, micro_batch: int, full_rank: int, vanilla: int, btp: int
) -> None:
    """In MiB of all-reduces at TP 4 in bf16; the paper's leave out the norms' statistics."""
    layout = replace(TP4, micro_batch_size=micro_batch)
    statistics = 2 * layout.tokens * 3 * 4 * 2
    for model, mib, more in (
        (paper_model(size, arch="dense", rank=None), full_rank, 0),
        (paper_model(size, tp="vanilla", vanilla_attention="replicated"), vanilla, 0),
        (paper_model(size), btp, statistics),
    ):
        forward = of_phase(layer_collectives(model, layout, 0), "forward")
        (((_, operation), traffic),) = forward.items()
        assert operation == "all_reduce"
        assert traffic.bytes - more == mib * 1024**2


def test_bytes_on_the_wire_are_the_designs() -> None:
    """In elements per token, × (T − 1)/T."""
    d, f, _, _, r = PAPER["7B"]
    for settings, forward, backward in (
        ({}, 14 * r + 2 * 2 * 12, 14 * r),
        ({"arch": "dense", "rank": None}, 4 * d, 4 * d),
        (
            {"tp": "vanilla", "vanilla_attention": "replicated"},
            10 * d + 4 * f,
            6 * d + 2 * f,
        ),
        ({"tp": "vanilla"}, 11 * d + 4 * f, 8 * d + 2 * f),
    ):
        collectives = layer_collectives(paper_model("7B", **settings), TP4, 0)
        per_element = TP4.tokens * 2 * 3 / 4
        for phase, elements in (("forward", forward), ("backward", backward)):
            assert wire_bytes(of_phase(collectives, phase), 4) == elements * per_element


def test_what_checkpointing_at_the_latents_computes_again() -> None:
    """At 7B in n·d·r: the layer's products 38.1 (46.1 with causal attention at s 4096), those
    computed again 16.75 (24.75)."""
    model = paper_model("7B", recompute=True)
    one_rank = Layout(sequence_length=4096, micro_batch_size=1)
    work = Work.of_sequences(1, 4096)
    unit = 4096 * 4096 * 1024
    assert layer_projection_flops_per_token(model, 0) / (4096 * 1024) == 38.125
    assert layer_forward_flops(model, 0, work) / unit == 46.125
    again = rank_layer_recompute_flops(model, one_rank, 0, work, checkpointed=False)
    assert again / unit == 24.75
    with_residual = paper_model("7B", recompute=True, recompute_residual=True)
    more = rank_layer_recompute_flops(with_residual, one_rank, 0, work, checkpointed=False)
    assert (more - again) / unit == 2
    total = model_flops(model, work) + 32 * again
    assert hardware_flops(model, one_rank) == total
    assert hardware_flops(model, replace(one_rank, tensor_parallel=4)) == total
    piped = replace(one_rank, tensor_parallel=2, pipeline_parallel=4)
    assert hardware_flops(model, piped) == total
    head = 3 * 2 * 4096 * 4096 * 32000 / 2
    stages = [rank_hardware_flops(model, piped, pp_rank) for pp_rank in range(4)]
    assert stages[0] == stages[1] == stages[2] == stages[3] - head


def test_replicated_attention_is_computed_by_every_rank() -> None:
    sliced = paper_model("7B", tp="vanilla")
    replicated = paper_model("7B", tp="vanilla", vanilla_attention="replicated")
    attention = 2 * 4096 * 4 * 4096**2
    more = rank_hardware_flops(replicated, TP4, 0) - rank_hardware_flops(sliced, TP4, 0)
    assert more == 3 * 32 * attention * 3 / 4


def test_break_even_rank_with_dense() -> None:
    """r* = (4d² + 3df)/(11d + 3f): where the low-rank products equal the full-rank ones."""
    d, f = 1700, 3400
    rank, left = divmod(4 * d * d + 3 * d * f, 11 * d + 3 * f)
    assert (rank, left) == (1000, 0)
    model = replace(paper_model("7B", rank=rank), hidden_size=d, ffn_hidden_size=f)
    model = replace(model, kv_channels=d, num_attention_heads=1, num_query_groups=1)
    low = layer_projection_flops_per_token(model, 0)
    dense = layer_projection_flops_per_token(model.dense_equivalent(), 0)
    assert low == dense


@pytest.mark.parametrize(
    "gate, flops", [("identity", 0), ("linear", 2 * 12 * 12), ("tensor", 2 * 12 * (3 + 4))]
)
def test_gates(gate: str, flops: int) -> None:
    model = paper_model("7B", arch="lax", rank=12, lax_gate=gate)
    assert layer_gate_flops_per_token(model, 0) == 0
    assert layer_gate_flops_per_token(model, 1) == 7 * flops
    # Under tensor parallelism every rank computes them.
    work = Work.of_sequences(4, 4096)
    plain = paper_model("7B", rank=12)
    gates = model_flops(model, work) - model_flops(plain, work)
    assert gates == 3 * 31 * 7 * flops * work.tokens
    extra = hardware_flops(model, TP4) - hardware_flops(plain, TP4)
    again = 31 * 7 * 2 * 12 * 4 * work.tokens if gate == "tensor" else 0
    assert extra == 4 * (gates + again)


@pytest.mark.parametrize("stages, chunks", [(1, 1), (4, 1), (2, 2), (4, 2), (4, 3)])
@pytest.mark.parametrize("micro_batches", [1, 2, 4, 8, 10, 24])
def test_micro_batches_in_flight_are_those_of_megatrons_schedule(
    stages: int, chunks: int, micro_batches: int
) -> None:
    """Played through with Megatron's own order of forwards and number of warm-up passes."""
    from megatron.core.pipeline_parallel.schedules import (
        get_pp_rank_microbatches,
        get_schedule_table,
    )

    layout = Layout(
        sequence_length=8,
        micro_batch_size=1,
        micro_batches=micro_batches,
        pipeline_parallel=stages,
        virtual_stages=chunks,
    )
    for pp_rank in range(stages):
        pipeline = SimpleNamespace(
            pp_group=SimpleNamespace(size=lambda: stages, rank=lambda p=pp_rank: p),
            virtual_pipeline_model_parallel_size=None if chunks == 1 else chunks,
        )
        total, _, warm_up, _ = get_pp_rank_microbatches(
            micro_batches, chunks, stages, p2p_communicator=pipeline
        )
        order = [chunk for _, chunk in get_schedule_table(micro_batches, chunks, stages)]
        forwards = order[: min(warm_up + 1, total)]
        expected = tuple(forwards.count(chunk) for chunk in range(chunks))
        assert micro_batches_in_flight(layout, pp_rank) == expected


@pytest.mark.parametrize(
    "changes, expected",
    [
        ({}, (((0, 1, 2, 3, 4, 5, 6, 7),),)),
        ({"pipeline_model_parallel_size": 2}, (((0, 1, 2, 3),), ((4, 5, 6, 7),))),
        (
            {"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 2},
            (((0, 1), (4, 5)), ((2, 3), (6, 7))),
        ),
        (
            {"pipeline_model_parallel_size": 2, "num_layers_in_first_pipeline_stage": 3},
            (((0, 1, 2),), ((3, 4, 5, 6, 7),)),
        ),
        (
            {
                "pipeline_model_parallel_size": 3,
                "num_layers": 7,
                "account_for_embedding_in_pipeline_split": True,
                "account_for_loss_in_pipeline_split": True,
            },
            (((0, 1),), ((2, 3, 4),), ((5, 6),)),
        ),
        (
            {
                "pipeline_model_parallel_size": 2,
                "pipeline_model_parallel_layout": "Et|ttt|tt|ttL",
                "virtual_pipeline_model_parallel_size": 2,
            },
            (((0,), (4, 5)), ((1, 2, 3), (6, 7))),
        ),
    ],
    ids=["one", "two", "interleaved", "uneven", "embedding and loss counted", "explicit"],
)
def test_layers_of_stages_are_megatrons(changes: dict[str, Any], expected: Any) -> None:
    config = llama_config(**{"num_layers": 8, "pipeline_dtype": torch.float32, **changes})
    assert stage_layers_of_config(config) == expected


def test_activations_of_a_pipeline() -> None:
    model = paper_model("7B")
    layout = replace(TP4, pipeline_parallel=4, micro_batches=16)
    layer = sum(layer_activation_bytes(model, layout, 9).values())
    n, indices = layout.tokens, 9 * layout.tokens
    assert kept_activation_bytes(model, layout, 1) == 3 * 8 * layer
    assert kept_activation_bytes(model, layout, 0) == 4 * (8 * layer + indices)
    head = 2 * n * 1024 * 2 + 4 * n // 4 + n * 8000 * 4 + indices
    assert kept_activation_bytes(model, layout, 3) == 8 * layer + head
    full = replace(layout, recompute="full")
    checkpoints = 8 * n * 1024 * 2 + 4096 * 128 * 4
    assert chunk_activation_bytes(model, full, tuple(range(8))) == checkpoints
    assert rank_activation_bytes(model, full, 1) == 3 * checkpoints + layer
    halves = replace(full, recompute_layers=4)
    assert rank_activation_bytes(model, halves, 1) == (
        3 * (2 * n * 1024 * 2 + 4096 * 128 * 4) + 4 * layer
    )


def test_what_checkpointing_at_the_latents_keeps() -> None:
    """At 7B and TP 4, in numbers per token: latents 7r, residual inputs, statistics."""
    numbers = {
        (): 7 * 1024 + 2 * 1024,
        ("recompute_residual",): 7 * 1024 + 1024,
        ("recompute_shard",): 7 * 256 + 2 * 1024,
    }
    for options, expected in numbers.items():
        model = paper_model("7B", recompute=True, **dict.fromkeys(options, True))
        parts = layer_activation_bytes(model, TP4, 3)
        rest = 2 * 4 + (0 if "recompute_shard" in options else 2 * 12 * 2)
        assert sum(parts.values()) == TP4.tokens * (2 * expected + rest)


def test_a_stages_message_carries_the_latents_of_lax() -> None:
    n = TP4.tokens
    assert stage_message_bytes(paper_model("7B"), TP4) == 2 * n * 1024
    assert stage_message_bytes(paper_model("7B", arch="lax"), TP4) == 2 * n * (1024 + 7 * 256)
    vanilla = paper_model("7B", arch="lax", tp="vanilla")
    assert stage_message_bytes(vanilla, TP4) == 2 * n * (4096 + 7 * 256)


@pytest.mark.parametrize(
    "changes, expected",
    [
        ({"dtype": torch.float32}, 16),
        ({"dtype": torch.float32, "distributed_optimizer": True}, 8 + 8 / 4),
        ({}, 18),
        ({"distributed_optimizer": True}, 6 + 12 / 4),
        ({"gradients_in_fp32": False}, 20),
        ({"dtype": torch.float16, "gradients_in_fp32": False}, 20),
        ({"gradients_in_fp32": False, "distributed_optimizer": True}, 4 + 16 / 4),
    ],
)
def test_state_of_one_parameter(changes: dict[str, Any], expected: float) -> None:
    """18 and 6 + 12/D are also what Megatron's report assumes of every run."""
    layout = replace(TP4, data_parallel=4, **changes)
    assert state_bytes_per_parameter(layout).total == expected


def test_the_report_is_of_the_stage_that_needs_most() -> None:
    model = paper_model("7B")
    layout = replace(TP4, pipeline_parallel=4, micro_batches=8)
    footprint = memory_footprint(model, layout)
    assert footprint.pp_rank == 0
    state = rank_state_bytes(model, layout, 0).total
    assert footprint.weight_and_optimizer_mib == state / 1024**2
    # With as many micro-batches in flight everywhere, the head's softmax decides.
    assert memory_footprint(model, replace(layout, micro_batches=1)).pp_rank == 3
    lines = memory_report_lines(model, layout)
    assert "Total number of parameters in billions: 2.82" in lines
    assert "Number of in-flight microbatches: 4" in lines
    assert sum("the most loaded" in line for line in lines) == 1
