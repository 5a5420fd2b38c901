"""What keeps the host busy: a layer so small that nothing else takes time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from boost_layers.config import LowRankConfig
from megatron.boost.accounting.sizes import Layout, Model
from megatron.boost.planner.cluster import Cluster
from megatron.boost.planner.implementation import BOOST
from megatron.boost.planner.layers import layer_phases

_TOKENS = 16
_SETTINGS = LowRankConfig(arch="cola", rank=16, core_attention="sdpa")
_MODEL = Model(
    hidden_size=64,
    ffn_hidden_size=128,
    num_attention_heads=2,
    num_query_groups=2,
    kv_channels=32,
    num_layers=1,
    vocab_size=128,
    padded_vocab_size=128,
    tied=True,
    low_rank=_SETTINGS,
    rotary_channels=0,
)


def tiny_layer(device: torch.device, dtype: torch.dtype) -> Callable[[], object]:
    """Forward and backward of one BTP layer without tensor parallelism, inside of
    `megatron.boost.ranks.megatron_group` with one rank."""
    from megatron.core.transformer.spec_utils import build_module
    from megatron.core.transformer.transformer_config import TransformerConfig

    from boost_layers.specs import low_rank_spec

    fields: dict[str, Any] = {
        "num_layers": _MODEL.num_layers,
        "hidden_size": _MODEL.hidden_size,
        "ffn_hidden_size": _MODEL.ffn_hidden_size,
        "num_attention_heads": _MODEL.num_attention_heads,
        "normalization": "RMSNorm",
        "add_bias_linear": False,
        "gated_linear_unit": True,
        "activation_func": torch.nn.functional.silu,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "gradient_accumulation_fusion": False,
        "params_dtype": dtype,
        "bf16": dtype == torch.bfloat16,
        "fp16": dtype == torch.float16,
        "pipeline_dtype": dtype,
    }
    config = TransformerConfig(**fields)
    (spec,) = low_rank_spec(config, _SETTINGS).layer_specs
    layer = build_module(spec, config=config, layer_number=1)
    x = torch.randn(_TOKENS, 1, _MODEL.hidden_size, device=device).to(dtype).requires_grad_()

    def run() -> None:
        layer.zero_grad(set_to_none=True)
        y, _ = layer(x)
        y.backward(torch.ones_like(y))

    return run


def tiny_layer_operations(cluster: Cluster, dtype: torch.dtype, name: str) -> float:
    """How many operations the planner counts in it."""
    layout = Layout(sequence_length=_TOKENS, micro_batch_size=1, dtype=dtype)
    phases = layer_phases(_MODEL, layout, 0, cluster, name, BOOST, checkpointed=False)
    return sum(phase.operations for phase in phases)
