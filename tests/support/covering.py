"""Pairwise covering designs: few cases in which every two settings meet."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

Setting = dict[str, Any]
"""A value of every factor."""

Pair = frozenset[tuple[str, str, Any]]
"""Two values: each with its factor, and whether it is the one before a step or after it."""


def all_settings(
    factors: Mapping[str, Sequence[Any]], allowed: Callable[[Setting], bool]
) -> list[Setting]:
    """Every allowed combination of the factors' values."""
    products = itertools.product(*factors.values())
    settings = (dict(zip(factors, values, strict=True)) for values in products)
    return [setting for setting in settings if allowed(setting)]


def pairs_of_step(before: Setting, after: Setting) -> list[Pair]:
    """Every two values of the step from one setting to another: two of the first, two of the
    second, or one of each, of the same factor too."""
    values = [("before", *item) for item in before.items()]
    values += [("after", *item) for item in after.items()]
    return [frozenset(pair) for pair in itertools.combinations(values, 2)]


def covering_walk(settings: Sequence[Setting]) -> list[Setting]:
    """A walk through `settings` in whose steps every two values meet that meet in any step between
    two of them; the same for the same settings. Greedy: each step is one of those that add most.
    """
    steps = {
        (i, j): pairs_of_step(before, after)
        for i, before in enumerate(settings)
        for j, after in enumerate(settings)
    }
    numbers = dict.fromkeys(pair for pairs in steps.values() for pair in pairs)
    for number, pair in enumerate(numbers):
        numbers[pair] = number
    masks = {step: sum(1 << numbers[pair] for pair in pairs) for step, pairs in steps.items()}
    missing = (1 << len(numbers)) - 1
    walk = [0]
    while missing:
        here = walk[-1]
        there = max(range(len(settings)), key=lambda j: _gain_of_two(masks, here, j, missing))
        if not masks[here, there] & missing:
            # Nothing is missing from here: on to where the next missing pair starts.
            there = next(i for (i, _), mask in masks.items() if mask & missing)
        walk.append(there)
        missing &= ~masks[here, there]
    return [settings[index] for index in walk]


def _gain_of_two(
    masks: Mapping[tuple[int, int], int], here: int, there: int, missing: int
) -> tuple[int, int]:
    """How many missing pairs a step adds together with the best one after it, and alone."""
    alone = masks[here, there] & missing
    rest = missing & ~alone
    size = 1 + max(index for _, index in masks)
    next_best = max((masks[there, k] & rest).bit_count() for k in range(size))
    return alone.bit_count() + next_best, alone.bit_count()
