"""The annealed activation: how much of φ the layers of a model apply, step by step.

A dense model whose weights were factorised computes B·A·x, and φ between the factors would make
another function of it at once. With φ_a(z) = (1 − a)·z + a·φ(z) and a growing from 0 to 1 it starts
as the dense model and ends as a low-rank one. The amount is a number on each layer, so it is set by
whoever counts the steps; it is not in a checkpoint, since it follows from the iteration.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from boost_layers.layer import LowRankLayer

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch import nn


def set_activation_amount(models: Iterable[nn.Module], amount: float) -> None:
    """Set a of φ_a(z) = (1 − a)·z + a·φ(z) on all layers of ours.

    For programs with a training loop of their own, before each step and each evaluation, with
    `amount = low_rank.activation_amount(step)`; `pretrain_gpt.py` does the same. All micro-batches
    of a step, and what is computed again in their backward, must see one amount.

    Args:
        models: the model chunks of this rank, as they are or wrapped for data parallelism.
        amount: from 0, the identity, to 1, φ.

    Raises:
        ValueError: for another amount.
    """
    if not 0.0 <= amount <= 1.0:
        nearest = min(max(amount, 0.0), 1.0)
        raise ValueError(f"amount {amount}: is from 0 to 1; nearest legal value: {nearest}")
    for model in models:
        for module in model.modules():
            if isinstance(module, LowRankLayer):
                module.activation_amount = amount
