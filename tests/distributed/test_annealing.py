"""The annealed activation against the plain model: every strategy, at the beginning, on the way and
at the end, with gradients."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from boost_layers.annealing import set_activation_amount
from tests.distributed.test_latent_checkpointing import gemm_flops
from tests.distributed.test_parity import BTP, CASES, LATENT, LAX_CASES, LAYER_CASES
from tests.support.accounted import ADDED_IN_PLACE
from tests.support.distributed import run_ranks
from tests.support.parallel_gpt import Case, parallel_gpt, tensor_parallel_state
from tests.support.parity import batch, check
from tests.support.plain_llama import random_canonical

SHARDED = {**LATENT, "recompute_residual": True, "recompute_shard": True}
MODELS = {
    "btp": CASES["btp"],
    "btp-gelu": CASES["btp-swiglu-gelu"],
    "btp-sync-ungrouped": CASES["btp-sync-ungrouped"],
    "btp-latent-checkpointing": LAYER_CASES["btp-latent-checkpointing"],
    "btp-sharded-latents": replace(CASES["btp"], low_rank=replace(BTP, **SHARDED)),
    "btp-mixed-depth": LAYER_CASES["btp-mixed-depth"],
    "vanilla": CASES["vanilla"],
    "vanilla-replicated": CASES["vanilla-replicated"],
    "lax": LAX_CASES["lax"],
    "lax-latent-checkpointing": LAX_CASES["lax-latent-checkpointing"],
    "lax-full-recompute": LAX_CASES["lax-full-recompute"],
    "lax-vanilla": LAX_CASES["lax-vanilla"],
}
KINDS = ("btp", "vanilla", "lax")
STEPS = 10


def annealed(case: Case, amount: float) -> Case:
    return replace(
        case,
        plain=replace(case.plain, act_amount=amount),
        low_rank=replace(case.low_rank, act_anneal=STEPS),
        # 0 is what the layers begin with.
        activation_amount=amount or None,
    )


@pytest.mark.parametrize("tp", [1, 2])
def test_every_strategy_agrees_with_the_plain_model_in_fp64(tp: int) -> None:
    """On the way for all of them, at both ends and at TP 1 for one of each kind."""
    cases = {
        f"{name} {amount}": annealed(case, amount)
        for name, case in MODELS.items()
        for amount in (0.0, 0.3, 1.0)
        if name in KINDS or (amount == 0.3 and tp > 1)
    }
    check(cases, tp, 1e-12)


def work_at(case: Case, amounts: tuple[float, ...]) -> list[dict[str, Any]]:
    """On a rank, at each amount: the loss, and GEMM FLOPs of forward and backward."""
    tokens, labels = batch(case.plain.vocab_size)
    positions = torch.arange(tokens.shape[1]).expand_as(tokens)
    tensors = random_canonical(case.plain, seed=1, dtype=case.dtype)
    found = []
    with tensor_parallel_state(case.tp), parallel_gpt(case, tensors) as model:
        for amount in amounts:
            set_activation_amount([model], amount)
            with FlopCounterMode(display=False, custom_mapping=ADDED_IN_PLACE) as flops:
                loss = model(tokens, positions, None, labels=labels).mean()
                loss.backward()
            found.append({"loss": float(loss), "flops": gemm_flops(flops)})
    return found


def test_an_amount_changes_the_loss_and_no_gemm() -> None:
    (found,) = run_ranks(work_at, 1, annealed(CASES["btp"], 0.0), (0.0, 0.5, 1.0))
    assert len({result["flops"] for result in found}) == 1
    assert len({result["loss"] for result in found}) == 3


def test_an_amount_is_from_0_to_1() -> None:
    for amount, nearest in ((1.5, 1.0), (-0.1, 0.0)):
        with pytest.raises(ValueError, match=f"amount {amount}: .*nearest legal value: {nearest}"):
            set_activation_amount([], amount)
