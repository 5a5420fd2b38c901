"""Our models against a plain single-process model with the same weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
from torch import Tensor

from tests.support.distributed import run_ranks
from tests.support.parallel_gpt import Case, loss_and_gradients, tensor_parallel_state
from tests.support.plain_llama import PlainConfig, PlainLlama, random_canonical


@dataclass(frozen=True)
class Reference:
    """The plain model's inputs and results, in fp64 or as said."""

    tensors: Mapping[str, Tensor]
    tokens: Tensor
    labels: Tensor
    loss: Tensor
    logits: Tensor
    gradients: Mapping[str, Tensor]


@cache
def batch(
    vocab_size: int, seq_length: int = 16, samples: int = 3, seed: int = 5
) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(vocab_size, (samples, seq_length + 1), generator=generator)
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def reference(
    plain: PlainConfig,
    weights: torch.dtype = torch.float64,
    arithmetic: torch.dtype = torch.float64,
    seq_length: int = 16,
    seed: int = 1,
) -> Reference:
    """The plain model with weights rounded to one dtype, computed in another."""
    tensors = random_canonical(plain, seed=seed, dtype=weights)
    tokens, labels = batch(plain.vocab_size, seq_length)
    model = PlainLlama(plain, arithmetic).load_canonical(tensors)
    logits, loss = model(tokens, labels)
    assert loss is not None
    loss.mean().backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return Reference(tensors, tokens, labels, loss.detach(), logits.detach(), gradients)


def relative_error(value: Tensor, exact: Tensor) -> float:
    value, exact = value.detach().double(), exact.detach().double()
    return float((value - exact).norm() / exact.norm())


def errors(result: Mapping[str, Any] | Reference, exact: Reference) -> dict[str, float]:
    """The relative error of the loss, the logits and each gradient."""
    got = result.__dict__ if isinstance(result, Reference) else result
    assert got["gradients"].keys() == exact.gradients.keys()
    found = {
        name: relative_error(gradient, exact.gradients[name])
        for name, gradient in got["gradients"].items()
    }
    found["loss"] = relative_error(got["loss"], exact.loss)
    found["logits"] = relative_error(got["logits"], exact.logits)
    return found


def compare(cases: Mapping[str, tuple[Case, Reference]]) -> dict[str, dict[str, float]]:
    """On a rank: the errors of every case; all have the same TP size and device."""
    first = next(iter(cases.values()))[0]
    with tensor_parallel_state(first.tp, first.device):
        return {
            name: errors(loss_and_gradients(case, exact.tensors, exact.tokens, exact.labels), exact)
            for name, (case, exact) in cases.items()
        }


def beyond(found: Mapping[str, Mapping[str, float]], tolerance: float) -> dict[str, Any]:
    """What is in error by more than the tolerance, or not a number."""
    wrong = {
        case: {what: error for what, error in of_case.items() if not error <= tolerance}
        for case, of_case in found.items()
    }
    return {case: whats for case, whats in wrong.items() if whats}


def possible(cases: Mapping[str, Case], tp: int) -> dict[str, Case]:
    """Those of the cases that exist at this TP size: sequence parallelism needs two ranks."""
    return {name: case for name, case in cases.items() if tp > 1 or not case.sequence_parallel}


def check(cases: Mapping[str, Case], tp: int, tolerance: float) -> None:
    references: dict[tuple[str, torch.dtype], Reference] = {}
    given = {}
    for name, case in cases.items():
        # A rank table cannot be hashed.
        key = repr(case.plain), case.dtype
        if key not in references:
            references[key] = reference(case.plain, weights=case.dtype)
        given[name] = replace(case, tp=tp), references[key]
    for found in run_ranks(compare, tp, given):
        assert found.keys() == cases.keys()
        assert beyond(found, tolerance) == {}
