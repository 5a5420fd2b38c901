"""A model's weights, saved in one layout and loaded in others; on a rank."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from tests.support.parallel_gpt import Case, gather_canonical, parallel_gpt, tensor_parallel_state
from tests.support.parity import batch


def save(case: Case, tensors: Mapping[str, Tensor], folder: str) -> Tensor:
    """On a rank: write the model with these whole weights, and give its loss."""
    from megatron.core import dist_checkpointing

    tokens, labels = batch(52)
    positions = torch.arange(tokens.shape[1]).expand_as(tokens)
    with parallel_gpt(case, tensors) as model:
        dist_checkpointing.save(model.sharded_state_dict(), folder)
        with torch.no_grad():
            return model(tokens, positions, None, labels=labels)


def load(cases: Mapping[str, Case], folder: str) -> dict[str, tuple[dict[str, Tensor], Tensor]]:
    """On a rank: the whole weights that each case reads, and its loss."""
    from megatron.core import dist_checkpointing

    tokens, labels = batch(52)
    positions = torch.arange(tokens.shape[1]).expand_as(tokens)
    found = {}
    with tensor_parallel_state(next(iter(cases.values())).tp):
        for name, case in cases.items():
            with parallel_gpt(case) as model, torch.no_grad():
                for parameter in model.parameters():
                    parameter.fill_(torch.nan)
                model.load_state_dict(
                    dist_checkpointing.load(model.sharded_state_dict(), folder), strict=False
                )
                weights = gather_canonical(model, dict(model.named_parameters()), 52)
                found[name] = weights, model(tokens, positions, None, labels=labels)
    return found
