"""Checkpointing at the latents: the same bits as without, no collective again, no GEMM too many."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import distributed
from torch.utils.flop_counter import FlopCounterMode

from boost_layers.communication import LEDGER
from boost_layers.config import LowRankConfig
from boost_layers.kept import KeptTokens
from boost_layers.latent import Latent, LatentKind, activated
from tests.distributed.test_parity import CASES, LAX_CASES, LAYER_CASES
from tests.support.accounted import ADDED_IN_PLACE
from tests.support.distributed import run_ranks
from tests.support.parallel_gpt import Case, gather_canonical, parallel_gpt, tensor_parallel_state
from tests.support.parity import batch
from tests.support.plain_llama import random_canonical

OPTIONS: dict[str, dict[str, bool]] = {
    "off": {},
    "on": {"recompute": True},
    "residual": {"recompute": True, "recompute_residual": True},
    "shard": {"recompute": True, "recompute_shard": True},
    "both": {"recompute": True, "recompute_residual": True, "recompute_shard": True},
}
MODELS = {
    "cola": CASES["btp"],
    "gqa-swiglu": replace(
        CASES["btp-gqa"],
        plain=replace(CASES["btp-gqa"].plain, mlp="swiglu"),
        low_rank=replace(CASES["btp-gqa"].low_rank, mlp="swiglu"),
    ),
    "sync-ungrouped": CASES["btp-sync-ungrouped"],
    "svd": LAX_CASES["svd"],
    "lax": LAX_CASES["lax"],
    "lax-ungrouped": LAX_CASES["lax-ungrouped"],
    "rank-table": LAYER_CASES["btp-rank-table"],
    "mixed-depth": LAYER_CASES["btp-mixed-depth"],
}


def gemm_flops(counter: FlopCounterMode) -> int:
    """2·m·n·k of every matrix product, without those within attention."""
    by_operator = counter.get_flop_counts()["Global"]
    return sum(count for name, count in by_operator.items() if "attention" not in str(name))


def each(cases: Mapping[str, Case]) -> dict[str, dict[str, Any]]:
    """On a rank: loss, gradients, GEMM FLOPs and collectives in backward, and the numbers kept of
    sharded latents."""
    found = {}
    tokens, labels = batch(52)
    positions = torch.arange(tokens.shape[1]).expand_as(tokens)
    with tensor_parallel_state(next(iter(cases.values())).tp):
        for name, case in cases.items():
            tensors = random_canonical(case.plain, seed=1, dtype=case.dtype)
            with parallel_gpt(case, tensors) as model:
                LEDGER.clear()
                loss = model(tokens, positions, None, labels=labels)
                with FlopCounterMode(display=False, custom_mapping=ADDED_IN_PLACE) as flops:
                    loss.mean().backward()
                gradients = {n: p.grad for n, p in model.named_parameters()}
                found[name] = {
                    "loss": loss.detach(),
                    "gradients": gather_canonical(model, gradients, 52),
                    "flops": gemm_flops(flops),
                    "collectives": {
                        key: (count.calls, count.bytes)
                        for key, count in LEDGER.counts.items()
                        if key[1] != "forward"
                    },
                    "recomputed": LEDGER.layer_passes["recompute"],
                }
    return found


def variants(tp: int, dtype: torch.dtype = torch.float32) -> dict[str, Case]:
    return {
        f"{model} {option}": replace(
            case, tp=tp, dtype=dtype, low_rank=replace(case.low_rank, **settings)
        )
        for model, case in MODELS.items()
        for option, settings in OPTIONS.items()
    }


def low_rank_layers(case: Case) -> int:
    return sum(case.plain.is_low_rank(layer) for layer in range(case.plain.layers))


def expected_extra_flops(case: Case, option: str, tp: int) -> float:
    """The up-projections of q, k, v, gate and up again, that of o too where the second residual is
    made again, and LaX's tensor gates nothing: their products are not in the segments."""
    plain = case.plain
    tokens = 3 * 16
    outputs = {
        "q_proj": plain.heads * plain.head_dim,
        "k_proj": plain.kv_heads * plain.head_dim,
        "v_proj": plain.kv_heads * plain.head_dim,
        "gate_proj": plain.ffn,
        "up_proj": plain.ffn,
    }
    if option in ("residual", "both"):
        outputs["o_proj"] = plain.hidden
    per_layer = sum(2 * tokens * plain.rank_of(name) * width for name, width in outputs.items())
    return low_rank_layers(case) * per_layer / tp


def check(tp: int, dtype: torch.dtype, models: Sequence[str] = tuple(MODELS)) -> None:
    every = variants(tp, dtype).items()
    cases = {name: case for name, case in every if name.split()[0] in models}
    for found in run_ranks(each, tp, cases):
        for name, result in found.items():
            model, option = name.split()
            plain = found[f"{model} off"]
            assert torch.equal(result["loss"], plain["loss"]), name
            for parameter, gradient in result["gradients"].items():
                assert torch.equal(gradient, plain["gradients"][parameter]), (name, parameter)
            if option == "off":
                continue
            case = cases[name]
            extra = result["flops"] - plain["flops"]
            assert extra == expected_extra_flops(case, option, tp), name
            assert result["recomputed"] == low_rank_layers(case)
            if option in ("on", "residual") or tp == 1:
                assert result["collectives"] == plain["collectives"], name


@pytest.mark.parametrize("tp", [2, pytest.param(1, marks=pytest.mark.slow)])
def test_no_bit_no_collective_and_no_gemm_more_than_needed(tp: int) -> None:
    check(tp, torch.float32)


@pytest.mark.slow
def test_the_same_in_bf16_on_four_ranks() -> None:
    check(4, torch.bfloat16, ("cola", "gqa-swiglu", "lax", "mixed-depth"))


def test_a_sharded_latent_costs_one_all_gather_of_each_group() -> None:
    """Four groups a layer; with LaX also w, which is not u, of the layers that something crosses
    into (the first layer's w is its u)."""
    cases = {name: case for name, case in variants(2).items() if name.split()[1] == "shard"}
    for found in run_ranks(each, 2, cases):
        for model, gathers in (("cola", 2 * 4), ("sync-ungrouped", 2 * 7), ("mixed-depth", 2 * 4)):
            case = cases[f"{model} shard"]
            plain = case.plain
            ranks = 4 * plain.rank + 3 * (plain.mlp_rank or 0)
            size = low_rank_layers(case) * 3 * 16 * ranks // 2 * 4
            counted = found[f"{model} shard"]["collectives"]["layer", "recompute", "all_gather"]
            assert counted == (gathers, size), model
        calls, _ = found["lax shard"]["collectives"]["layer", "recompute", "all_gather"]
        # Of o and down, u itself serves nobody once w = u + G(z) is there.
        assert calls == 4 + 2 * (4 + 2)


def gathered_twice() -> tuple[bool, int]:
    """On a rank: whether two consumers of a kept tensor get all of it, and their all-gathers."""
    LEDGER.clear()
    group = distributed.group.WORLD
    whole = torch.arange(24.0).view(4, 2, 3)
    kept = KeptTokens(group)
    kept.keep(whole)
    kept.add_consumer()
    kept.add_consumer()
    first, second = kept.whole(), kept.whole()
    right = torch.equal(first, whole.view(8, 3)) and torch.equal(second, first)
    return right, LEDGER.counts["layer", "recompute", "all_gather"].calls


def test_two_consumers_share_one_all_gather() -> None:
    assert run_ranks(gathered_twice, 2) == [(True, 1), (True, 1)]


def gradients_of_what_is_trained(trained: str) -> list[dict[str, torch.Tensor]]:
    """On a rank: the gradients when only the named parameters are trained, without and with."""
    case = replace(CASES["btp"], tp=distributed.get_world_size(), dtype=torch.float32)
    tensors = random_canonical(case.plain, seed=1, dtype=case.dtype)
    tokens, labels = batch(52)
    positions = torch.arange(tokens.shape[1]).expand_as(tokens)
    found = []
    with tensor_parallel_state(case.tp):
        for settings in (OPTIONS["off"], OPTIONS["both"]):
            of_option = replace(case, low_rank=replace(case.low_rank, **settings))
            with parallel_gpt(of_option, tensors) as model:
                for name, parameter in model.named_parameters():
                    parameter.requires_grad_(trained in name)
                model(tokens, positions, None, labels=labels).mean().backward()
                grads = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
                found.append({name: gradient.clone() for name, gradient in grads.items()})
    return found


def test_frozen_parameters_are_left_alone() -> None:
    """Also where a segment has nothing to train but its last factor, or nothing at all."""
    for trained in ("layers.0.self_attention.o_proj.A", "layers.1.mlp.down_proj.A", "gate_proj.B"):
        for plain, checkpointed in run_ranks(gradients_of_what_is_trained, 2, trained):
            assert plain and plain.keys() == checkpointed.keys()
            for name, gradient in plain.items():
                assert torch.equal(checkpointed[name], gradient), name


def activated_from_a_share() -> tuple[bool, bool]:
    """On a rank: whether z of a sharded latent, as it is sent to another stage, keeps nothing
    whole, and whether its gradient is that of a latent that is kept whole."""
    generator = torch.Generator().manual_seed(3)
    w, dz = (torch.randn(4, 2, 6, generator=generator) for _ in range(2))
    kind = LatentKind((6,), "silu")
    gradients, sizes = [], []
    for share in (None, KeptTokens(distributed.group.WORLD)):
        value = w.clone().requires_grad_()
        kept = KeptTokens.of(value, share)
        with torch.autograd.graph.saved_tensors_hooks(
            lambda t: sizes.append(t.numel()) or t, lambda t: t
        ):
            z = activated(Latent(value, kind, kept=kept))
        (gradient,) = torch.autograd.grad(z, value, dz)
        gradients.append(gradient)
    return sizes == [w.numel()], torch.equal(*gradients)


def test_what_a_stage_sends_is_kept_as_a_share_too() -> None:
    assert run_ranks(activated_from_a_share, 2) == [(True, True)] * 2


def test_only_btp_layers_can_be_checkpointed_at_latents() -> None:
    for settings in ({"arch": "dense"}, {"arch": "cola", "tp": "vanilla"}):
        with pytest.raises(ValueError, match="--low-rank-recompute: keeps the latents that BTP"):
            LowRankConfig(recompute=True, **settings)
    with pytest.raises(ValueError, match="--low-rank-recompute-shard: is an option of"):
        LowRankConfig(arch="cola", recompute_shard=True)
