"""The time of a pipeline's schedule, from the times of its stages.

1F1B (Narayanan et al., arXiv 2104.04473): the slowest stage computes all m micro-batches, and while
the first one is on its way and the last one on its way back the others' times are added once, or
with v virtual stages 1/v of them: m·t_max + (Σ t − t_max)/v. With one micro-batch the stages
compute one after the other, Σ t.
"""

from __future__ import annotations

from collections.abc import Sequence


def schedule_seconds(stages: Sequence[float], micro_batches: int, virtual_stages: int = 1) -> float:
    """Of one iteration; `stages` are the times of one micro-batch, forward and backward."""
    slowest = max(stages)
    return micro_batches * slowest + bubble_seconds(stages, virtual_stages)


def bubble_seconds(stages: Sequence[float], virtual_stages: int = 1) -> float:
    """The time for which the slowest stage waits for the others."""
    others = sorted(stages)[:-1]
    return sum(others) / virtual_stages


def exposed_transfers(stages: int, virtual_stages: int = 1) -> int:
    """Tensors between stages that nothing hides: on the way of the first micro-batch forward and of
    the last one backward. Those in between travel while other micro-batches compute."""
    return 2 * (stages * virtual_stages - 1)
