"""How variants of one computation are timed against each other, and which steps count.

All variants are built at once on every rank and take turns within each round. The order is rotated
from round to round, so that a slow spell of the machine, or what one variant leaves behind in the
caches and in the heap, falls on all of them alike. `WARM_UP_ROUNDS` rounds come first and are not
recorded; after them the heap is enlarged once, so that it need not grow in a recorded step. Every
step begins at a barrier, and takes as long as it does on the slowest rank.

The rule by which steps are dropped, fixed before any measurement: a step does not count if, on any
rank, the process took more than `MINOR_FAULTS_ALLOWED` minor page faults in it, or any major one.
Such a step measures how the kernel hands out fresh memory (up to seconds a step), not the variant.
Nothing else is dropped, however slow. A variant's figures are the median and the 20th and 80th
percentiles of its steps that count; it is not measured when none is left.
"""

from __future__ import annotations

import resource
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import distributed

from boost_layers.communication import LEDGER

WARM_UP_ROUNDS = 2
MINOR_FAULTS_ALLOWED = 2000
"""Pages of 4 KiB: 8 MiB of fresh memory, some milliseconds."""


@dataclass(frozen=True, kw_only=True)
class Step:
    """One recorded step of one variant, on one rank or, merged, on all of them."""

    variant: str
    round_number: int
    milliseconds: float
    exposed_communication_seconds: float
    """How long the caller was kept waiting by the collectives of our layers and their borders."""
    cpu_milliseconds: float
    """Processor time of the process, all its threads."""
    minor_faults: int
    major_faults: int

    @property
    def counts(self) -> bool:
        """Whether the step passes the rule at the top of this file."""
        return self.minor_faults <= MINOR_FAULTS_ALLOWED and self.major_faults == 0


@dataclass(frozen=True, kw_only=True)
class Summary:
    """The steps of one variant that count; medians and percentiles are None where there is none."""

    steps: int
    dropped: int
    median_ms: float | None
    p20_ms: float | None
    p80_ms: float | None
    exposed_communication_seconds: float | None
    """The median."""


def rotated(names: Sequence[str], round_number: int) -> list[str]:
    """The order of a round: `names`, beginning with the one after the first of the round before."""
    start = round_number % len(names)
    return [*names[start:], *names[:start]]


def measure(
    variants: Mapping[str, Callable[[], object]],
    rounds: int,
    device: torch.device,
    on_round: Callable[[Sequence[Step]], None],
    *,
    prepare: Callable[[str], object] | None = None,
    enlarge: bool = True,
) -> list[Step]:
    """This rank's steps of `rounds` rounds of all `variants`; issues one barrier before each step.

    Exposed communication is measured if the ledger is `timed`. `on_round` is called between the
    rounds, with the steps of the last one; `prepare` before every step, with its variant. Without
    `enlarge` the heap is left as it is.
    """
    recorded: list[Step] = []
    for round_number in range(-WARM_UP_ROUNDS, rounds):
        if round_number == 0 and device.type == "cpu" and enlarge:
            _enlarge_heap()
        steps = []
        for name in rotated(list(variants), round_number):
            if prepare is not None:
                prepare(name)
            steps.append(_timed_step(name, round_number, variants[name], device))
        if round_number >= 0:
            recorded += steps
            on_round(steps)
    return recorded


def _enlarge_heap() -> None:
    """Touch half as much memory again as was ever in use, and leave it to the allocator."""
    if sys.platform == "linux":
        torch.ones(
            resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 // 2, dtype=torch.uint8
        )


def _timed_step(
    name: str, round_number: int, run: Callable[[], object], device: torch.device
) -> Step:
    LEDGER.clear()
    distributed.barrier()
    before = resource.getrusage(resource.RUSAGE_SELF)
    milliseconds = _milliseconds(run, device)
    after = resource.getrusage(resource.RUSAGE_SELF)
    LEDGER.settle()
    cpu_seconds = after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime
    return Step(
        variant=name,
        round_number=round_number,
        milliseconds=milliseconds,
        exposed_communication_seconds=sum(c.seconds for c in LEDGER.counts.values()),
        cpu_milliseconds=cpu_seconds * 1000.0,
        minor_faults=after.ru_minflt - before.ru_minflt,
        major_faults=after.ru_majflt - before.ru_majflt,
    )


def _milliseconds(run: Callable[[], object], device: torch.device) -> float:
    if device.type != "cuda":
        begin = time.perf_counter()
        run()
        return (time.perf_counter() - begin) * 1000.0
    begin_event = torch.cuda.Event(enable_timing=True)
    end_event = torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    begin_event.record()
    run()
    end_event.record()
    torch.cuda.synchronize()
    return float(begin_event.elapsed_time(end_event))


def merged(steps_by_rank: Sequence[Sequence[Step]]) -> list[Step]:
    """The ranks' records of the same steps as one: times and faults of the worst rank, exposed
    communication averaged (a late rank makes the others wait)."""
    return [
        replace(
            of_ranks[0],
            milliseconds=max(step.milliseconds for step in of_ranks),
            cpu_milliseconds=max(step.cpu_milliseconds for step in of_ranks),
            exposed_communication_seconds=statistics.fmean(
                step.exposed_communication_seconds for step in of_ranks
            ),
            minor_faults=max(step.minor_faults for step in of_ranks),
            major_faults=max(step.major_faults for step in of_ranks),
        )
        for of_ranks in zip(*steps_by_rank, strict=True)
    ]


def summarise(steps: Sequence[Step], variant: str) -> Summary:
    """What the steps of `variant` amount to."""
    own = [step for step in steps if step.variant == variant]
    kept = [step for step in own if step.counts]
    times = [step.milliseconds for step in kept]
    return Summary(
        steps=len(own),
        dropped=len(own) - len(kept),
        median_ms=percentile(times, 50),
        p20_ms=percentile(times, 20),
        p80_ms=percentile(times, 80),
        exposed_communication_seconds=percentile(
            [step.exposed_communication_seconds for step in kept], 50
        ),
    )


def round_ratios(steps: Sequence[Step], numerator: str, denominator: str) -> list[float]:
    """The two variants' ratio of times in each round in which the steps of both count: how far the
    ratio of their medians is to be trusted."""
    times = {(step.variant, step.round_number): step.milliseconds for step in steps if step.counts}
    return [
        time_above / times[denominator, number]
        for (variant, number), time_above in times.items()
        if variant == numerator and (denominator, number) in times
    ]


def percentile(values: Sequence[float], percent: float) -> float | None:
    """The value below which `percent` of `values` lie, interpolated between neighbours; None of no
    values."""
    if not values:
        return None
    ordered = sorted(values)
    position = (len(ordered) - 1) * percent / 100.0
    below = int(position)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (position - below)
