"""The rank at which a low-rank model is no faster than the full-rank one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from megatron.boost.accounting.sizes import Model
from megatron.boost.planner.iteration import estimate
from megatron.boost.planner.layouts import Plan

_STEPS = 20


def with_ratio(model: Model, ratio: float) -> Model:
    """The model with all ranks set to ratio·d, to a multiple of 8 as GEMMs want it."""
    rank = max(8, round(ratio * model.hidden_size / 8) * 8)
    settings = replace(model.low_rank, rank=rank, attn_rank=None, mlp_rank=None, ranks=None)
    return replace(model, low_rank=settings)


def break_even_ratio(low_rank: Plan, full_rank: Plan) -> float:
    """r/d at which the low-rank plan, in its layout, takes as long as the full-rank one in its own;
    1 where it is faster even at r = d. Memory is not looked at."""

    def slower(ratio: float) -> bool:
        model = with_ratio(low_rank.model, ratio)
        return estimate(model, low_rank.layout, low_rank.cluster).seconds > full_rank.seconds

    return _largest(lambda ratio: not slower(ratio))


def gemm_break_even_ratio(model: Model) -> float:
    """r/d at which the projections take as many operations as full-rank ones:
    Σ in·out = r·Σ (in + out) over the seven projections; (4d² + 3df) / (d·(11d + 3f)) without
    grouped queries."""
    shapes = [(p.in_features, p.out_features) for p in model.projections(0)]
    dense = sum(size_in * size_out for size_in, size_out in shapes)
    return dense / sum(size_in + size_out for size_in, size_out in shapes) / model.hidden_size


def _largest(holds: Callable[[float], bool]) -> float:
    """The largest ratio in (0, 1] for which a condition holds that fails above it; 0: for none."""
    if holds(1.0):
        return 1.0
    below, above = 0.0, 1.0
    for _ in range(_STEPS):
        middle = (below + above) / 2
        below, above = (middle, above) if holds(middle) else (below, middle)
    return below
