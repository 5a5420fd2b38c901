"""Ranks by energy and budget, against an exhaustive search."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import product

import pytest
import torch

from megatron.boost.conversion.rank_choice import Curve, choose_ranks

FIXED = 1000


def curves(layers: int = 3) -> dict[str, Curve]:
    """Three projections of 6 directions each, of different sizes and decay."""
    generator = torch.Generator().manual_seed(4)
    found = {}
    for name, width, decay in (("q_proj", 20, 0.4), ("k_proj", 12, 0.9), ("down_proj", 60, 0.7)):
        values = decay ** torch.arange(6.0, dtype=torch.float64)
        spread = torch.rand(layers, 6, generator=generator, dtype=torch.float64) * 0.2 + 0.9
        found[name] = Curve((values * spread).sort(descending=True).values, width)
    return found


def parameters(ranks: Mapping[str, int]) -> int:
    return FIXED + sum(3 * rank * curves()[name].weights_per_rank for name, rank in ranks.items())


def share(ranks: Mapping[str, int]) -> float:
    """The mean share of energy kept, from the numbers themselves."""
    kept = [
        (curve.energies[:, : ranks[name]].sum(1) / curve.energies.sum(1)).mean()
        for name, curve in curves().items()
    ]
    return float(torch.stack(kept).mean())


@pytest.mark.parametrize("energy", [0.5, 0.8, 0.99, 1.0])
def test_the_energy_is_kept_in_every_layer_by_the_smallest_rank_that_does(energy: float) -> None:
    choice = choose_ranks(curves(), parameters, energy=energy)
    assert not choice.ended_by_budget
    for name, curve in curves().items():
        shares = curve.energies.cumsum(1) / curve.energies.sum(1, keepdim=True)
        enough = [rank for rank in range(1, 7) if float(shares[:, rank - 1].min()) >= energy]
        # Rounding may leave the last direction out of a sum that is asked to be whole.
        assert choice.ranks[name] == (enough or [6])[0]
    assert choice.energy >= min(energy, 1 - 1e-12)
    assert choice.parameters == parameters(choice.ranks)


@pytest.mark.parametrize("budget", [1300, 1500, 1700, 2000, 2400])
def test_a_budget_is_kept_and_no_ranks_with_as_many_parameters_keep_more(budget: int) -> None:
    choice = choose_ranks(curves(), parameters, budget=budget)
    assert choice.ended_by_budget and choice.parameters <= budget
    names = list(curves())
    affordable = [dict(zip(names, ranks, strict=True)) for ranks in product(range(1, 7), repeat=3)]
    affordable = [ranks for ranks in affordable if parameters(ranks) <= budget]
    best = max(map(share, affordable))
    # What greed loses is less than the one step that did not fit.
    assert share(choice.ranks) >= best - 0.06
    # Nothing that would still fit is left out.
    for name in names:
        further = {**choice.ranks, name: choice.ranks[name] + 1}
        assert further[name] > 6 or parameters(further) > budget


def test_the_energy_ends_the_search_before_the_budget_does() -> None:
    with_budget = choose_ranks(curves(), parameters, energy=0.7, budget=10**6)
    assert with_budget == choose_ranks(curves(), parameters, energy=0.7)


def test_ranks_are_multiples_or_full() -> None:
    choice = choose_ranks(curves(), parameters, energy=0.8, multiple=4)
    assert set(choice.ranks.values()) == {4, 6}
    assert all(curves()[name].least(rank) >= 0.8 for name, rank in choice.ranks.items())


def test_a_matrix_of_zeros_asks_for_no_rank() -> None:
    nothing = {"q_proj": Curve(torch.zeros(2, 5, dtype=torch.float64), 8)}
    assert choose_ranks(nothing, lambda ranks: 16 * ranks["q_proj"]).ranks == {"q_proj": 1}


def test_a_budget_below_the_smallest_ranks_is_refused() -> None:
    with pytest.raises(ValueError, match="--parameter-budget 1100: .*nearest legal value: 1276$"):
        choose_ranks(curves(), parameters, budget=1100)
