"""One of our layers in this process, on one rank and without process groups."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from megatron.core.transformer.spec_utils import build_module
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import nn

from boost_layers.config import LowRankConfig
from boost_layers.specs import layer_spec

ONE_RANK: Any = SimpleNamespace(size=lambda: 1, rank=lambda: 0)
"""As much of a process group as a layer needs when it is alone."""


def llama_config(**changes: Any) -> TransformerConfig:
    """A small LLaMA that the layers can run on one rank."""
    return TransformerConfig(
        **{
            "num_layers": 1,
            "hidden_size": 16,
            "ffn_hidden_size": 24,
            "num_attention_heads": 4,
            "num_query_groups": 4,
            "normalization": "RMSNorm",
            "add_bias_linear": False,
            "gated_linear_unit": True,
            "activation_func": torch.nn.functional.silu,
            "hidden_dropout": 0.0,
            "attention_dropout": 0.0,
            "use_cpu_initialization": True,
            **changes,
        }
    )


def single_layer(low_rank: LowRankConfig, config: TransformerConfig) -> nn.Module:
    """The model's first layer."""
    groups = SimpleNamespace(tp=ONE_RANK, pp=ONE_RANK, cp=ONE_RANK)
    return build_module(layer_spec(low_rank), config=config, layer_number=1, pg_collection=groups)
