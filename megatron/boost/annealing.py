"""Annealing of φ in a run: Megatron's loop counts the steps, and the layers are told."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any
from unittest import mock

from megatron.training import get_args, training

from boost_layers.annealing import set_activation_amount

if TYPE_CHECKING:
    from torch import nn

    from boost_layers.config import LowRankConfig


@contextmanager
def annealed_activation(low_rank: LowRankConfig) -> Iterator[None]:
    """Context in which every training step and every evaluation of `pretrain()` sees the amount of
    φ that belongs to the iterations before it. So a resumed run goes on where it was, and an
    evaluation measures the function that a checkpoint of that iteration is."""
    if not low_rank.act_anneal:
        yield
        return
    step, evaluate = training.train_step, training.evaluate_and_print_results

    def annealed_step(
        forward_step: Any, data: Any, model: Sequence[nn.Module], *others: Any, **named: Any
    ) -> Any:
        set_activation_amount(model, low_rank.activation_amount(get_args().curr_iteration))
        return step(forward_step, data, model, *others, **named)

    def annealed_evaluation(
        prefix: str,
        forward_step: Any,
        data: Any,
        model: Sequence[nn.Module],
        iteration: int,
        *others: Any,
        **named: Any,
    ) -> Any:
        # Without any training Megatron says 0, also of a checkpoint that it has loaded.
        finished = max(iteration, get_args().iteration)
        set_activation_amount(model, low_rank.activation_amount(finished))
        return evaluate(prefix, forward_step, data, model, iteration, *others, **named)

    with (
        mock.patch.object(training, "train_step", annealed_step),
        mock.patch.object(training, "evaluate_and_print_results", annealed_evaluation),
    ):
        yield
