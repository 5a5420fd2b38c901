"""From timings to the coefficients of the planner's formulas, by least squares of relative errors
under the condition that no coefficient is negative."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np


@dataclass(frozen=True)
class Fit:
    """The coefficients c of t ≈ Σ c_j·a_j."""

    coefficients: tuple[float, ...]
    mean_error: float
    """Of |Σ c_j·a_j / t − 1|."""
    worst_error: float


def fit_relative(
    terms: Sequence[Sequence[float]], seconds: Sequence[float], *, needs_first: bool = False
) -> Fit:
    """The c ≥ 0 with the least Σ_i (Σ_j c_j·a_ij / t_i − 1)², from rows a_i of `terms` and t_i;
    with `needs_first` among those with c_0 > 0.

    The solution is the best of the unconstrained solutions in each subset of the coefficients that
    has no negative ones, the others being 0; there are a handful of coefficients.

    Raises:
        ValueError: without timings, and for ones that are not positive and finite.
    """
    t = np.asarray(seconds, dtype=float)
    a = np.asarray(terms, dtype=float)
    if not t.size or not np.isfinite(t).all() or not (t > 0).all():
        raise ValueError(f"timings {list(seconds)}: none, or some not positive and finite")
    relative = a / t[:, None]
    best, least = np.zeros(a.shape[1]), math.inf
    for size in range(1, a.shape[1] + 1):
        for chosen in combinations(range(a.shape[1]), size):
            columns = list(chosen)
            found = np.zeros(a.shape[1])
            found[columns] = np.linalg.lstsq(relative[:, columns], np.ones(t.size), rcond=None)[0]
            squares = float(((relative @ found - 1) ** 2).sum())
            legal = (found >= 0).all() and (found[0] > 0 or not needs_first)
            if legal and squares < least:
                best, least = found, squares
    errors = np.abs(relative @ best - 1)
    return Fit(tuple(map(float, best)), float(errors.mean()), float(errors.max()))
