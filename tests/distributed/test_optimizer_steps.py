"""Five steps of Megatron's optimizer: grad norms and weights agree over TP sizes and strategies,
and with the plain model under `torch.optim.AdamW`.

What a single backward cannot show, this does: a sharded parameter that the gradient norm does not
know of, a replicated norm whose gradient is not summed over the ranks, a shard that drifts.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, distributed, nn

from tests.distributed.test_parity import CASES
from tests.support.distributed import run_ranks
from tests.support.parallel_gpt import Case, gather_canonical, parallel_gpt, tensor_parallel_state
from tests.support.parity import batch, relative_error
from tests.support.plain_llama import PlainLlama, adamw_steps, random_canonical

STEPS = 5
LR = 3e-3
CLIP = 0.5


def _grad_norm(optimizer: Any) -> float:
    """The norm of the gradients that Megatron counts on this rank, over its group, in fp64."""
    counted = [g for part in optimizer.chained_optimizers for g in part.get_grads_for_grad_norm()]
    total = torch.stack([g.double().square().sum() for g in counted]).sum()
    distributed.all_reduce(total, group=optimizer.get_grad_stats_parallel_group())
    return math.sqrt(float(total))


def _wrapped(model: nn.Module, config: Any) -> tuple[nn.Module, Any]:
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

    ddp = DistributedDataParallel(config, DistributedDataParallelConfig(), model)
    settings = OptimizerConfig(
        optimizer="adam",
        lr=LR,
        min_lr=LR,
        weight_decay=0.1,
        adam_beta1=0.9,
        adam_beta2=0.999,
        adam_eps=1e-8,
        clip_grad=CLIP,
        params_dtype=torch.float32,
    )
    optimizer = get_megatron_optimizer(settings, [ddp], use_gloo_process_groups=False)
    # The schedule is what spares the norms the weight decay.
    OptimizerParamScheduler(
        optimizer,
        init_lr=LR,
        max_lr=LR,
        min_lr=LR,
        lr_warmup_steps=0,
        lr_decay_steps=STEPS,
        lr_decay_style="constant",
        start_wd=0.1,
        end_wd=0.1,
        wd_incr_steps=STEPS,
        wd_incr_style="constant",
    )
    return ddp, optimizer


def train(
    case: Case, tensors: Mapping[str, Tensor], batches: Sequence[tuple[Tensor, Tensor]]
) -> dict[str, Any]:
    """On a rank: `norms` and `losses` by step, and whole `weights` after the last one."""
    from megatron.core.distributed import finalize_model_grads

    with parallel_gpt(case, tensors) as model:
        ddp, optimizer = _wrapped(model, model.config)
        norms, losses = [], []
        for tokens, labels in batches:
            ddp.zero_grad_buffer()
            optimizer.zero_grad()
            positions = torch.arange(tokens.shape[1]).expand_as(tokens)
            loss = ddp(tokens, positions, None, labels=labels).mean()
            loss.backward()
            finalize_model_grads([ddp], None)
            optimizer.prepare_grads()
            norms.append(_grad_norm(optimizer))
            successful, norm, _ = optimizer.step()
            assert successful and math.isclose(norm, norms[-1], rel_tol=1e-5)
            losses.append(float(loss))
        parameters = dict(model.named_parameters())
        weights = gather_canonical(model, parameters, case.plain.vocab_size)
        return {"norms": norms, "losses": losses, "weights": weights}


def train_each(
    cases: Mapping[str, Case],
    tensors: Mapping[str, Mapping[str, Tensor]],
    batches: Sequence[tuple[Tensor, Tensor]],
) -> dict[str, dict[str, Any]]:
    """On a rank: `train` of every case; all have the same TP size."""
    with tensor_parallel_state(next(iter(cases.values())).tp):
        return {name: train(case, tensors[name], batches) for name, case in cases.items()}


SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    ("tp", "names"),
    [
        (2, ("btp", "vanilla", "dense", "dense-sequence-parallel")),
        pytest.param(1, ("btp", "vanilla", "dense"), marks=SLOW),
        pytest.param(2, ("btp-sync", "btp-tied", "btp-padded", "vanilla-replicated"), marks=SLOW),
        pytest.param(4, ("btp", "vanilla", "dense", "dense-sequence-parallel"), marks=SLOW),
    ],
)
def test_five_steps_agree_with_the_plain_model(tp: int, names: tuple[str, ...]) -> None:
    """With it also over TP sizes and between BTP and vanilla, whose weights are the same."""
    cases = {name: replace(CASES[name], tp=tp, dtype=torch.float32) for name in names}
    batches = [batch(52, seed=step) for step in range(STEPS)]
    tensors = {
        name: random_canonical(case.plain, seed=1, dtype=torch.float32)
        for name, case in cases.items()
    }
    results = run_ranks(train_each, tp, cases, tensors, batches)
    for name, case in cases.items():
        plain = PlainLlama(case.plain, torch.float32).load_canonical(tensors[name])
        history = adamw_steps(
            plain, batches, LR, weight_decay=0.1, clip_grad=CLIP, decay_norms=False
        )
        assert all(norm > CLIP for _, norm in history), "clipping must matter"
        expected = dict(plain.named_parameters())
        for result in (of_rank[name] for of_rank in results):
            for (loss, norm), got_loss, got_norm in zip(
                history, result["losses"], result["norms"], strict=True
            ):
                assert math.isclose(got_loss, loss, rel_tol=2e-6)
                assert math.isclose(got_norm, norm, rel_tol=1e-5)
            assert result["weights"].keys() == expected.keys()
            errors = {n: relative_error(w, expected[n]) for n, w in result["weights"].items()}
            assert {n: e for n, e in errors.items() if not e <= 1e-5} == {}
            moved = {n: relative_error(w, tensors[name][n]) for n, w in result["weights"].items()}
            assert min(moved.values()) > 1e-3
