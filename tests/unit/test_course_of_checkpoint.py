"""A run that plans another course than its checkpoint's is refused exactly where Megatron's
scheduler would end in an assertion, and names the flag."""

from __future__ import annotations

from argparse import Namespace
from typing import Any
from unittest import mock

import pytest
import torch
from megatron.training import training

from megatron.boost.learning_rate import check_course

PLAN: dict[str, Any] = {
    "train_iters": 60,
    "train_samples": None,
    "lr_decay_iters": None,
    "lr_decay_samples": None,
    "lr_wsd_decay_iters": None,
    "lr_wsd_decay_samples": None,
    "lr_warmup_fraction": None,
    "lr_warmup_iters": 4,
    "lr_warmup_samples": 0,
    "lr_warmup_init": 0.0,
    "lr": 1e-3,
    "min_lr": 1e-4,
    "lr_decay_style": "cosine",
    "lr_wsd_decay_style": "exponential",
    "start_weight_decay": 0.1,
    "end_weight_decay": 0.1,
    "weight_decay_incr_style": "constant",
    "global_batch_size": 16,
    "use_checkpoint_opt_param_scheduler": False,
    "override_opt_param_scheduler": False,
}
SAMPLES = {"train_iters": None, "train_samples": 960, "lr_warmup_samples": 64}
CHANGES: dict[str, tuple[dict[str, Any], dict[str, Any], str | None]] = {
    "nothing": ({}, {}, None),
    "longer": ({}, {"train_iters": 80}, "--train-iters 80: "),
    "longer, the same decay": ({"lr_decay_iters": 60}, {"train_iters": 80}, "--train-iters 80: "),
    "another decay": ({}, {"lr_decay_iters": 50}, "--lr-decay-iters 50: "),
    "another rate": ({}, {"lr": 2e-3}, "--lr 0.002: "),
    "another least rate": ({}, {"min_lr": 0.0}, "--min-lr 0.0: "),
    "another style": ({}, {"lr_decay_style": "linear"}, "--lr-decay-style linear: "),
    "another warm-up": ({}, {"lr_warmup_iters": 5}, "--lr-warmup-iters 5: "),
    "another batch": ({}, {"global_batch_size": 32}, "--global-batch-size 32: "),
    "the same in other words": (
        {},
        {"global_batch_size": 32, "train_iters": 30, "lr_warmup_iters": 2},
        None,
    ),
    "another weight decay": (
        {"weight_decay_incr_style": "linear"},
        {"end_weight_decay": 0.2},
        "--end-weight-decay 0.2: ",
    ),
    "more samples": (SAMPLES, {"train_samples": 1280}, "--train-samples 1280: "),
    "the same samples": (SAMPLES, {}, None),
    "a warm-up of another kind": ({}, {"lr_warmup_fraction": 0.5}, "--lr-warmup-fraction 0.5: "),
    "the same warm-up of another kind": ({}, {"lr_warmup_fraction": 4 / 60}, None),
    "samples for iterations": ({}, {**SAMPLES, "train_samples": 1600}, "--train-samples 1600: "),
    "as many samples for iterations": ({}, SAMPLES, None),
    "a new plan that is asked for": (
        {},
        {"train_iters": 80, "override_opt_param_scheduler": True},
        None,
    ),
    "the old plan that is asked for": (
        {},
        {"train_iters": 80, "use_checkpoint_opt_param_scheduler": True},
        None,
    ),
}


def scheduler(arguments: Namespace) -> Any:
    parameter = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([{"params": [parameter], "max_lr": 1e-3, "min_lr": 0.0}], lr=1e-3)
    with (
        mock.patch.object(training, "get_args", lambda: arguments),
        mock.patch.object(training, "update_train_iters"),
    ):
        return training.get_optimizer_param_scheduler(optimizer)


@pytest.mark.parametrize("change", CHANGES)
def test_a_course_is_refused_exactly_where_the_scheduler_refuses(change: str) -> None:
    common, changed, refused = CHANGES[change]
    stored = Namespace(**{**PLAN, **common})
    arguments = Namespace(**{**PLAN, **common, **changed})
    then = scheduler(Namespace(**vars(stored))).state_dict()
    now = scheduler(Namespace(**vars(arguments)))
    if refused is None:
        check_course(stored, arguments)
        now.load_state_dict(then)
        return
    with pytest.raises(ValueError) as refusal:
        check_course(stored, arguments)
    assert str(refusal.value).startswith(refused)
    assert "--override-opt-param-scheduler" in str(refusal.value)
    with pytest.raises(AssertionError):
        now.load_state_dict(then)
