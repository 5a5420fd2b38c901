"""Norm and effective rank of latents, against the singular values of the plain model's latents: at
every strategy, with the batch split over micro-batches and data-parallel ranks."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from boost_layers.communication import LEDGER
from boost_layers.observation import observe_latents
from megatron.boost.latent_statistics import LatentStatistics, effective_rank, positions
from tests.distributed.test_annealing import MODELS
from tests.distributed.test_parity import LAX_CASES, LAYER_CASES
from tests.support.distributed import run_ranks
from tests.support.parallel_gpt import Case, parallel_gpt, tensor_parallel_state
from tests.support.parity import batch
from tests.support.plain_llama import LowRankProjection, PlainLlama, random_canonical

Found = dict[tuple[int, str], tuple[float, float]]

CASES = {
    **MODELS,
    "btp-rank-table": LAYER_CASES["btp-rank-table"],
    "vanilla-rank-table": LAYER_CASES["vanilla-rank-table"],
    "lax-ungrouped": LAX_CASES["lax-ungrouped"],
    "lax-linear-rmsnorm": LAX_CASES["lax-linear-rmsnorm"],
}
SAMPLED = 1
"""Tokens for each dimension: less than all of the batch."""


def whole_batch(case: Case) -> tuple[Tensor, Tensor]:
    return batch(case.plain.vocab_size, samples=4)


@cache
def plain_statistics(name: str) -> Found:
    """The reference: every token of the sample, and its matrix's singular values."""
    plain = CASES[name].plain
    model = PlainLlama(plain).load_canonical(random_canonical(plain, seed=1))
    latents: dict[tuple[int, str], Tensor] = {}

    def keep(layer: int, projection: str) -> Any:
        def hook(module: LowRankProjection, inputs: tuple[Any, ...], _: Any) -> None:
            latent = inputs[0] @ module.A.T
            if len(inputs) > 1 and inputs[1] is not None:
                latent = latent + module._gate(inputs[1].z)
            latents[layer, projection] = latent

        return hook

    for path, module in model.named_modules():
        if isinstance(module, LowRankProjection):
            _, _, layer, _, projection = path.split(".")
            module.register_forward_hook(keep(int(layer), projection))
    tokens, _ = whole_batch(CASES[name])
    with torch.no_grad():
        model(tokens)
    widest = max(latent.shape[-1] for latent in latents.values())
    each = min(tokens.shape[1], math.ceil(SAMPLED * widest / len(tokens)))
    length = tokens.shape[1]
    chosen = [int((part + 0.5) * length / each) for part in range(each)]
    found = {}
    for key, latent in latents.items():
        sample = latent[:, chosen].flatten(0, 1)
        values = torch.linalg.svdvals(sample)
        shares = [float(v) for v in values.square() / values.square().sum()]
        entropy = -sum(share * math.log(share) for share in shares if share > 0)
        found[key] = float(sample.square().sum(1).mean().sqrt()), math.exp(entropy)
    return found


def observed(names: list[str], tp: int) -> list[dict[str, Any]]:
    """On a rank, for each case: the statistics of a batch of which this data-parallel rank takes
    its part in two micro-batches; the loss with and without them, and what the ledger counted."""
    from megatron.core import parallel_state

    results = []
    with tensor_parallel_state(tp):
        group = parallel_state.get_data_parallel_group()
        for name in names:
            case = replace(CASES[name], tp=tp)
            tensors = random_canonical(case.plain, seed=1)
            tokens, labels = whole_batch(case)
            own = [part.chunk(group.size())[group.rank()].chunk(2) for part in (tokens, labels)]
            with (
                parallel_gpt(case, tensors) as model,
                mock.patch("megatron.boost.latent_statistics.TOKENS_PER_DIMENSION", SAMPLED),
            ):
                statistics = LatentStatistics(
                    case.low_rank,
                    hidden_size=case.plain.hidden,
                    num_layers=case.plain.layers,
                    sequences=len(tokens),
                    data_parallel=group,
                )
                counted, losses = [], []
                for observer in (None, statistics):
                    LEDGER.clear()
                    observe_latents([model], observer)
                    total = 0.0
                    for text, wanted in zip(*own, strict=True):
                        place = torch.arange(text.shape[1]).expand_as(text)
                        loss = model(text, place, None, labels=wanted).mean()
                        loss.backward()
                        total += float(loss)
                    counted.append({key: (c.calls, c.bytes) for key, c in LEDGER.counts.items()})
                    losses.append(total)
                results.append(
                    {"values": statistics.values(), "counted": counted, "losses": losses}
                )
    return results


def check(found: Mapping[tuple[int, str], tuple[float, float]], expected: Found, name: str) -> None:
    assert found.keys() == expected.keys(), name
    for key, values in found.items():
        assert values == pytest.approx(expected[key], rel=1e-10), (name, key)


@pytest.mark.parametrize("tp", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_every_strategy_finds_what_the_plain_model_has(tp: int) -> None:
    names = [name for name in CASES if tp > 1 or name in ("btp", "vanilla", "lax")]
    by_rank = run_ranks(observed, tp, names, tp)
    for results in by_rank:
        for name, result in zip(names, results, strict=True):
            check(result["values"], plain_statistics(name), name)
            # Looking changes neither the model nor what it is said to communicate.
            assert result["losses"][0] == result["losses"][1], name
            assert result["counted"][0] == result["counted"][1], name


@pytest.mark.parametrize("tp", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_data_parallel_ranks_find_the_same(tp: int) -> None:
    names = ["btp", "vanilla", "lax"]
    for results in run_ranks(observed, 2 * tp, names, tp):
        for name, result in zip(names, results, strict=True):
            check(result["values"], plain_statistics(name), name)


def test_the_sample_is_less_than_the_batch_and_its_statistics_differ_between_projections() -> None:
    """Else the tests above could not see a wrong sample, or a projection taken for another."""
    found = plain_statistics("btp")
    tokens, _ = whole_batch(CASES["btp"])
    ranks = {key: CASES["btp"].plain.rank_of(key[1]) for key in found}
    assert max(ranks.values()) * SAMPLED < tokens.numel()
    assert len({round(value, 6) for pair in found.values() for value in pair}) == 2 * len(found)
    assert all(1 < effective < ranks[key] for key, (_, effective) in found.items())


def test_the_effective_rank_of_matrices_that_are_known() -> None:
    one = torch.outer(torch.arange(1.0, 5.0), torch.arange(1.0, 5.0))
    assert effective_rank(one) == pytest.approx(1.0, abs=1e-6)
    assert effective_rank(3e-6 * torch.eye(7)) == pytest.approx(7.0)
    assert effective_rank(torch.diag(torch.tensor([4.0, 4.0, 0.0]))) == pytest.approx(2.0)
    halves = torch.diag(torch.tensor([2.0, 1.0, 1.0]))
    assert effective_rank(halves) == pytest.approx(2.0**1.5)
    assert effective_rank(torch.zeros(3, 3)) == 0.0
    for bad in (math.nan, math.inf):
        assert math.isnan(effective_rank(torch.diag(torch.tensor([1.0, bad]))))


@pytest.mark.parametrize(("length", "wanted"), [(32, 1), (32, 5), (7, 3), (8, 8), (8, 100)])
def test_positions_are_spread_over_the_sequence(length: int, wanted: int) -> None:
    found = positions(length, wanted, torch.device("cpu")).tolist()
    assert len(set(found)) == len(found) == min(length, wanted)
    edges = [0, *found, length]
    gaps = [after - before for before, after in zip(edges[1:-2], edges[2:-1], strict=True)]
    assert not gaps or max(gaps) - min(gaps) <= 1
    assert found[0] + (length - 1 - found[-1]) <= length / len(found)
