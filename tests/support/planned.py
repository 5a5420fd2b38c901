"""Models, layouts and a cluster for the planner's tests."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import torch

from boost_layers.config import LowRankConfig
from megatron.boost.accounting.sizes import Layout, Model
from megatron.boost.planner.cluster import Cluster, load_cluster
from megatron.boost.planner.models import SIZES, model_of_size

A100 = load_cluster("a100-80")

STRATEGIES = {
    "full-rank": LowRankConfig(arch="dense"),
    "vanilla": LowRankConfig(arch="cola", tp="vanilla"),
    "vanilla replicated": LowRankConfig(arch="cola", tp="vanilla", vanilla_attention="replicated"),
    "btp": LowRankConfig(arch="cola"),
    "btp ungrouped": LowRankConfig(arch="cola", grouping=False),
    "btp latents": LowRankConfig(arch="cola", recompute=True),
    "svd": LowRankConfig(arch="svd"),
    "lax": LowRankConfig(arch="lax"),
    "some layers": LowRankConfig(arch="cola", layers="1-2"),
}
"""Settings by name."""


def model(low_rank: LowRankConfig, size: str = "1B", **changes: Any) -> Model:
    """A LLaMA-2, untied."""
    return replace(model_of_size(SIZES[size], low_rank, tied=False), **changes)


def layout(tensor_parallel: int = 1, **changes: Any) -> Layout:
    """A micro-batch of one short sequence in bf16."""
    settings: dict[str, Any] = {
        "sequence_length": 1024,
        "micro_batch_size": 1,
        "tensor_parallel": tensor_parallel,
        "dtype": torch.bfloat16,
    }
    return Layout(**settings | changes)


def with_node_rate(cluster: Cluster, gb_per_s: float, latency_us: float = 0.0) -> Cluster:
    """The cluster with another link within a node."""
    node = replace(cluster.node, latency_us=latency_us, bus_gb_per_s={"2": gb_per_s})
    return replace(cluster, node=node)


def some_models(number: int) -> list[Model]:
    """Low-rank models with grouped queries and sizes by chance, always the same ones; TP up to 4
    divides them."""
    chance = random.Random(7)
    return [
        Model(
            hidden_size=(hidden := 64 * chance.randint(2, 40)),
            ffn_hidden_size=64 * chance.randint(2, 80),
            num_attention_heads=(heads := 4 * chance.choice([1, 2, 4])),
            num_query_groups=chance.choice([4, heads]),
            kv_channels=chance.choice([hidden // heads // 2 * 2 or 2, 64]),
            num_layers=2 * chance.randint(1, 6),
            vocab_size=512 * chance.randint(1, 60),
            padded_vocab_size=512 * 60,
            tied=chance.random() < 0.5,
            low_rank=LowRankConfig(
                arch=chance.choice(["cola", "svd"]), rank=16 * chance.randint(1, 6)
            ),
        )
        for _ in range(number)
    ]
