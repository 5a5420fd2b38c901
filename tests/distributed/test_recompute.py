"""Megatron's recompute around our layers: it takes place, and gives the same bits as without."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F

from tests.distributed.test_parity import CASES, LAX_CASES
from tests.support.distributed import run_ranks
from tests.support.parallel_gpt import Case, loss_and_gradients, tensor_parallel_state
from tests.support.parity import batch
from tests.support.plain_llama import random_canonical

RECOMPUTE: dict[str, dict[str, Any]] = {
    "none": {},
    "full": {
        "recompute_granularity": "full",
        "recompute_method": "uniform",
        "recompute_num_layers": 1,
    },
    # One of the two layers again, the other kept.
    "block": {
        "recompute_granularity": "full",
        "recompute_method": "block",
        "recompute_num_layers": 1,
    },
    "selective": {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]},
}


def each(cases: Mapping[str, Case]) -> dict[str, dict[str, Any]]:
    """On a rank: loss, logits and gradients of every case, and how often an attention was computed
    in a forward without gradients, a forward and a backward."""
    tokens, labels = batch(52)
    found = {}
    with tensor_parallel_state(2):
        for name, case in cases.items():
            tensors = random_canonical(case.plain, seed=1, dtype=case.dtype)
            attend = mock.Mock(wraps=F.scaled_dot_product_attention)
            with mock.patch.object(F, "scaled_dot_product_attention", attend):
                found[name] = loss_and_gradients(case, tensors, tokens, labels)
            found[name]["attentions"] = attend.call_count
    return found


def test_recompute_changes_no_bit() -> None:
    cases = {
        f"{strategy} {kind}": replace(
            {**CASES, **LAX_CASES}[strategy], tp=2, dtype=torch.float32, transformer=settings
        )
        for strategy in ("btp", "vanilla", "dense-sequence-parallel", "lax", "lax-vanilla")
        for kind, settings in RECOMPUTE.items()
    }
    cases |= {
        f"btp-bf16 {kind}": replace(
            CASES["btp"], tp=2, dtype=torch.bfloat16, transformer=RECOMPUTE[kind]
        )
        for kind in ("none", "full")
    }
    for found in run_ranks(each, 2, cases):
        for name, result in found.items():
            strategy, kind = name.split()
            layers = cases[name].plain.layers
            recomputed = {"none": 0, "full": layers, "block": 1, "selective": layers}
            assert result["attentions"] == 2 * layers + recomputed[kind], name
            expected = found[f"{strategy} none"]
            assert torch.equal(result["loss"], expected["loss"])
            for parameter, gradient in result["gradients"].items():
                assert torch.equal(gradient, expected["gradients"][parameter]), (name, parameter)
