"""Ranks by the energy that they keep, under a budget of parameters.

`LowRankConfig` has one rank for each of the seven projections, common to all layers (LaX needs it,
and a rank that differs from layer to layer would make every layer another shape). So the question
is how seven numbers share a budget. The answer is greedy: the projection whose next step of rank
keeps the most energy per parameter takes it. A step's energy is the mean, over the layers, of the
share that it keeps of each matrix; shares fall from step to step, so nothing is gained by taking a
later one first.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from heapq import heapify, heappop, heappush

import torch
from torch import Tensor


@dataclass(frozen=True)
class Curve:
    """How one projection's energy grows with its rank, over the layers."""

    energies: Tensor
    """`[layers, k]`: of each direction, as `truncation.energies` gives them."""
    weights_per_rank: int
    """in + out."""

    @property
    def largest(self) -> int:
        """The rank that keeps everything."""
        return self.energies.shape[1]

    @cached_property
    def kept(self) -> Tensor:
        """The share of the energy that ranks from 0 to k keep in each layer, `[layers, k + 1]`."""
        total = self.energies.sum(dim=1, keepdim=True)
        # A matrix of zeros is kept by any rank.
        shares = torch.where(total > 0, self.energies.cumsum(dim=1) / total, 1.0)
        return torch.nn.functional.pad(shares, (1, 0))

    def least(self, rank: int) -> float:
        """The share that a rank keeps in the layer where it keeps least."""
        return float(self.kept[:, rank].min())

    def mean(self, rank: int) -> float:
        """The share that a rank keeps, on average over the layers."""
        return float(self.kept[:, rank].mean())


@dataclass(frozen=True)
class Choice:
    """Ranks by projection, and what ended the search for them."""

    ranks: dict[str, int]
    parameters: int
    """Of the whole model."""
    energy: float
    """The share kept in the layer and projection where it is least."""
    ended_by_budget: bool
    """Whether the budget and not the energy asked for was reached first."""


def choose_ranks(
    curves: Mapping[str, Curve],
    parameters: Callable[[Mapping[str, int]], int],
    *,
    energy: float = 1.0,
    budget: int | None = None,
    multiple: int = 1,
) -> Choice:
    """The smallest ranks that keep `energy` in every layer, or as much of it as the budget pays.

    Args:
        curves: by projection.
        parameters: those of the whole model with the given ranks.
        energy: the share that every projection of every layer shall keep, of its own.
        budget: the most parameters that the model may have; None: any number.
        multiple: ranks are multiples of this, or full.

    Raises:
        ValueError: for a budget that the smallest ranks are beyond.
    """
    ranks = {name: min(multiple, curve.largest) for name, curve in curves.items()}
    smallest = parameters(ranks)
    if budget is not None and smallest > budget:
        raise ValueError(
            f"--parameter-budget {budget}: with the smallest ranks the model has {smallest} "
            f"parameters; nearest legal value: {smallest}"
        )
    ended_by_budget = False

    def offer(name: str) -> tuple[float, str]:
        curve, rank = curves[name], ranks[name]
        step = min(rank + multiple, curve.largest) - rank
        gain = curve.mean(rank + step) - curve.mean(rank)
        return -gain / (step * curve.weights_per_rank), name

    offers = [
        offer(name) for name, curve in curves.items() if not _done(curve, ranks[name], energy)
    ]
    heapify(offers)
    while offers:
        _, name = heappop(offers)
        curve = curves[name]
        further = {**ranks, name: min(ranks[name] + multiple, curve.largest)}
        if budget is not None and parameters(further) > budget:
            # A projection with smaller matrices may still fit.
            ended_by_budget = True
            continue
        ranks = further
        if not _done(curve, ranks[name], energy):
            heappush(offers, offer(name))
    least = min(curve.least(ranks[name]) for name, curve in curves.items())
    return Choice(ranks, parameters(ranks), least, ended_by_budget)


def _done(curve: Curve, rank: int, energy: float) -> bool:
    return rank == curve.largest or curve.least(rank) >= energy
