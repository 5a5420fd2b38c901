"""Ranks of a 40B model at TP 8 · PP 8, built without memory and communication: on the meta device,
in a `fake` process group of 64. Shapes, bytes and collectives are those of the accounting."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, distributed

from boost_layers.carry import width_between_stages
from boost_layers.communication import LEDGER
from boost_layers.config import LowRankConfig
from megatron.boost.accounting.activations import chunk_activation_bytes, head_activation_bytes
from megatron.boost.accounting.collectives import (
    border_collectives,
    layer_collectives,
    stage_message_bytes,
)
from megatron.boost.accounting.parameters import (
    layer_parameters,
    model_parameters,
    rank_parameters,
    stage_tensors,
)
from megatron.boost.accounting.sizes import Layout, Model, validate_layout
from tests.support.accounted import KeptMemory
from tests.support.distributed import run_ranks
from tests.support.parallel_gpt import canonical_name

TP = PP = 8
D, F, HEADS, LAYERS, RANK, VOCAB = 8192, 22016, 64, 48, 2048, 32000
COLA = LowRankConfig(arch="cola", rank=RANK)
MODEL = Model(
    hidden_size=D,
    ffn_hidden_size=F,
    num_attention_heads=HEADS,
    num_query_groups=HEADS,
    kv_channels=D // HEADS,
    num_layers=LAYERS,
    vocab_size=VOCAB,
    padded_vocab_size=32768,
    tied=False,
    low_rank=COLA,
)
LAYOUT = Layout(
    sequence_length=4096,
    micro_batch_size=1,
    micro_batches=PP,
    tensor_parallel=TP,
    pipeline_parallel=PP,
    dtype=torch.bfloat16,
)
STRATEGIES = {
    "btp": COLA,
    "vanilla": replace(COLA, tp="vanilla"),
    "dense": LowRankConfig(arch="dense"),
    "svd": replace(COLA, arch="svd"),
    "lax": replace(COLA, arch="lax"),
    "lax vanilla": replace(COLA, arch="lax", tp="vanilla"),
    "mixed": replace(COLA, layers="4-43"),
    "checkpointed": replace(COLA, recompute=True),
}


@dataclass(frozen=True)
class Built:
    """One rank."""

    shapes: dict[str, tuple[int, ...]]
    devices: set[str]
    parameter_bytes: int
    kept_bytes: int
    output_bytes: int
    layer_collectives: dict[tuple[str, str], tuple[int, int]]
    border_collectives: dict[tuple[str, str], tuple[int, int]]


@contextmanager
def fake_rank(rank: int) -> Iterator[None]:
    """Megatron on one rank of 64, whose collectives do nothing."""
    from megatron.core import parallel_state
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from megatron.boost.cpu import megatron_on_cpu

    with megatron_on_cpu():
        distributed.init_process_group("fake", rank=rank, world_size=TP * PP, store=FakeStore())
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=TP, pipeline_model_parallel_size=PP
        )
        try:
            yield
        finally:
            parallel_state.destroy_model_parallel()
            distributed.destroy_process_group()


def flash_attention(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    """What SDPA takes for such tensors on a CPU. For the meta device it would take the kernel that
    keeps all of softmax(Q·Kᵀ)."""
    assert options.pop("is_causal") and not options.pop("enable_gqa")
    flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    return flash(q, k, v, is_causal=True, **options)[0]


def build(low_rank: LowRankConfig, tp_rank: int, pp_rank: int) -> Built:
    """The stage of one rank, and a forward and backward through its layers."""
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel
    from megatron.core.transformer.transformer_config import TransformerConfig

    from boost_layers.specs import low_rank_spec

    with fake_rank(pp_rank * TP + tp_rank):
        assert parallel_state.get_tensor_model_parallel_rank() == tp_rank
        assert parallel_state.get_pipeline_model_parallel_rank() == pp_rank
        config = TransformerConfig(
            num_layers=LAYERS,
            hidden_size=D,
            ffn_hidden_size=F,
            num_attention_heads=HEADS,
            normalization="RMSNorm",
            add_bias_linear=False,
            gated_linear_unit=True,
            activation_func=torch.nn.functional.silu,
            hidden_dropout=0.0,
            attention_dropout=0.0,
            tensor_model_parallel_size=TP,
            pipeline_model_parallel_size=PP,
            sequence_parallel=low_rank.low_rank and low_rank.tp == "btp",
            bf16=True,
            params_dtype=torch.bfloat16,
            pipeline_dtype=torch.bfloat16,
            gradient_accumulation_fusion=False,
            init_model_with_meta_device=True,
            use_cpu_initialization=True,
            perform_initialization=False,
        )
        with torch.device("meta"):
            stage = GPTModel(
                config,
                low_rank_spec(config, low_rank),
                vocab_size=MODEL.padded_vocab_size,
                max_sequence_length=LAYOUT.sequence_length,
                pre_process=pp_rank == 0,
                post_process=pp_rank == PP - 1,
                share_embeddings_and_output_weights=False,
                position_embedding_type="rope",
            )
        tokens, split = LAYOUT.sequence_length, TP if config.sequence_parallel else 1
        width = D + (width_between_stages(low_rank, D, TP) if pp_rank > 0 else 0)
        x = torch.empty(
            tokens // split, 1, width, dtype=torch.bfloat16, device="meta", requires_grad=True
        )
        angles = torch.empty(tokens, 1, 1, D // HEADS, device="meta")
        kept = KeptMemory(stage)
        LEDGER.clear()
        with (
            kept.hooks(),
            mock.patch("torch.nn.functional.scaled_dot_product_attention", flash_attention),
        ):
            out, context = x, None
            for layer in stage.decoder.layers:
                out, context = layer(out, context=context, rotary_pos_emb=angles)
            output_bytes = out.numel() * out.element_size()
            if stage.post_process:
                out = stage.decoder.final_layernorm(out)
        out.sum().backward()
        assert x.grad is not None and x.grad.shape == x.shape

        def counts(scope: str) -> dict[tuple[str, str], tuple[int, int]]:
            return {
                (phase, operation): (count.calls, count.bytes)
                for (where, phase, operation), count in LEDGER.counts.items()
                if where == scope
            }

        parameters = dict(stage.named_parameters())
        return Built(
            shapes={canonical_name(stage, n): tuple(p.shape) for n, p in parameters.items()},
            devices={p.device.type for p in parameters.values()},
            parameter_bytes=sum(p.numel() * p.element_size() for p in parameters.values()),
            kept_bytes=kept.bytes,
            output_bytes=output_bytes,
            layer_collectives=counts("layer"),
            border_collectives=counts("border"),
        )


def build_each(low_rank: LowRankConfig, ranks: list[tuple[int, int]]) -> list[Built]:
    return [build(low_rank, *rank) for rank in ranks]


@pytest.mark.parametrize(
    "strategy",
    [s if s in ("btp", "dense") else pytest.param(s, marks=pytest.mark.slow) for s in STRATEGIES],
)
def test_ranks_of_a_40b_model_are_as_accounted(strategy: str) -> None:
    """The first, a middle and the last stage, each at another place in its TP group."""
    model = replace(MODEL, low_rank=STRATEGIES[strategy])
    validate_layout(model, LAYOUT)
    places = [(0, 0), (5, 3), (7, 7)]
    (built,) = run_ranks(build_each, 1, model.low_rank, places, init_process_group=False)
    for (_, pp_rank), found in zip(places, built, strict=True):
        expected = stage_tensors(model, LAYOUT, pp_rank)
        assert found.devices == {"meta"}
        assert found.shapes == {name: t.on_rank(TP) for name, t in expected.items()}
        assert found.parameter_bytes == 2 * rank_parameters(model, LAYOUT, pp_rank)
        stage = LAYOUT.layers(model, pp_rank)
        assert stage == tuple(range(6 * pp_rank, 6 * pp_rank + 6))
        assert found.layer_collectives == summed(
            layer_collectives(model, LAYOUT, layer) for layer in stage
        )
        borders = border_collectives(model, LAYOUT, pp_rank, fused_embedding=False)
        assert found.border_collectives == summed([borders])
        kept = chunk_activation_bytes(model, LAYOUT, stage)
        if pp_rank == PP - 1:
            head = head_activation_bytes(model, LAYOUT)
            kept += head["input of the final norm"] + head["rho"]
        else:
            assert found.output_bytes == stage_message_bytes(model, LAYOUT)
        assert found.kept_bytes == kept


def summed(parts: Iterable[Any]) -> dict[tuple[str, str], tuple[int, int]]:
    """Collectives of several layers as calls and bytes."""
    total: dict[tuple[str, str], tuple[int, int]] = {}
    for part in parts:
        for key, traffic in part.items():
            calls, size = total.get(key, (0, 0))
            total[key] = (calls + traffic.calls, size + traffic.bytes)
    return total


def test_the_40b_model_by_hand() -> None:
    """The accounting's own numbers of this model, typed out."""
    factors = RANK * (4 * 2 * D + 3 * (D + F))
    assert layer_parameters(MODEL, 0) == factors + 2 * D == 319_832_064
    assert model_parameters(MODEL) == 48 * 319_832_064 + D + 2 * VOCAB * D
    assert rank_parameters(MODEL, LAYOUT, 3) == 6 * 319_832_064 // TP
    vocabulary = 32768 * D // TP
    assert rank_parameters(MODEL, LAYOUT, 0) == 6 * 319_832_064 // TP + vocabulary
    assert rank_parameters(MODEL, LAYOUT, 7) == 6 * 319_832_064 // TP + vocabulary + D
    tokens = 4096
    found = layer_collectives(MODEL, LAYOUT, 0)
    assert {key: (traffic.calls, traffic.bytes) for key, traffic in found.items()} == {
        ("forward", "all_reduce"): (4, 2 * tokens * (7 * RANK + 2 * 3 * TP)),
        ("backward", "all_reduce"): (4, 2 * tokens * 7 * RANK),
    }
