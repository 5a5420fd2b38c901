"""How long calls take on the device.

CUDA: milliseconds between two events, divided by the number of calls between them. Each call has
tensors of its own, as many calls as it takes for them to be four times the size of the L2 cache (at
most `MOST_CALLS`), and before the first the cache is filled with something else, so that every byte
comes from memory and goes there. The results stay until the end, so that no call writes where the
one before it did. The device is kept busy while the host queues all of this: what is timed is the
device's work, without the gaps between launches. CPU: wall-clock time of one call.

Reported are the median and the 20th and 80th percentiles of all repeats. Nothing is dropped.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from types import ModuleType

import torch

from benchmarks.gpu.plan import Measured, Plan, Times, first_line
from benchmarks.harness import percentile
from benchmarks.op_cases import Prepared, implementation

MOST_CALLS = 32
_WARM_UPS = 3
_CACHES = 4
"""How many times the L2 cache the calls' tensors are in all."""
_CYCLES_PER_SECOND = 2e9
"""At least as many as any clock here makes."""


def present[Name: str](names: Sequence[Name], device: torch.device) -> dict[Name, ModuleType]:
    """Those implementations of the ops that are there for the device."""
    found = {}
    for name in names:
        try:
            found[name] = implementation(name, device.type)
        except ValueError as absent:
            print(f"  {absent}", flush=True)
    return found


class Stopwatch:
    """Takes the times of a step's calls, and goes on when one of them fails."""

    def __init__(self, device: torch.device, plan: Plan):
        self.device = device
        self.repeats = plan.repeats
        self.measured = Measured()
        self._cache = 0
        if device.type == "cuda":
            self._cache = _CACHES * torch.cuda.get_device_properties(device).L2_cache_size
        self._flush = torch.empty(self._cache, dtype=torch.int8, device=device)

    def calls_for(self, moved_bytes: int) -> int:
        """How many calls that move so many bytes it takes to be beyond the cache."""
        return max(1, min(MOST_CALLS, math.ceil(self._cache / max(moved_bytes, 1))))

    def take(
        self,
        key: str,
        prepare: Callable[[], Prepared],
        *,
        calls: int = 1,
        queued: bool = True,
    ) -> None:
        """Time `calls` calls made by `prepare`. Without `queued` the host's time counts wherever
        the device waits for it."""
        try:
            with torch.no_grad() if queued else torch.enable_grad():
                times = self._times([prepare() for _ in range(calls)], queued)
        # A kernel that fails must not cost the run its other figures.
        except Exception as error:
            self.fail(key, error)
            return
        median, p20, p80 = (percentile(times, percent) for percent in (50, 20, 80))
        assert median is not None and p20 is not None and p80 is not None
        self.measured.times[key] = Times(median_ms=median, p20_ms=p20, p80_ms=p80)
        print(f"  {key}: {median:.4f} ms", flush=True)

    def fail(self, key: str, error: Exception) -> None:
        """Record that there is no figure for `key`, and why."""
        self.measured.failures[key] = first_line(error)
        print(f"  {key}: failed, {first_line(error)}", flush=True)

    def _times(self, calls: Sequence[Prepared], queued: bool) -> list[float]:
        if self.device.type != "cuda":
            return [self._on_cpu(calls) for _ in range(1 + self.repeats)][1:]
        for _ in range(_WARM_UPS):
            begin = time.perf_counter()
            # Held, so that the memory of all of them is there before the first time is taken.
            results = [call.run() for call in calls]
            host_seconds = time.perf_counter() - begin
            torch.cuda.synchronize()
            del results
        cycles = int(2 * host_seconds * _CYCLES_PER_SECOND) if queued else 0
        return [self._on_cuda(calls, cycles) for _ in range(self.repeats)]

    def _on_cuda(self, calls: Sequence[Prepared], cycles: int) -> float:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        for call in calls:
            call.refresh()
        self._flush.zero_()
        torch.cuda.synchronize()
        if cycles:
            # Private, but there is no other way to keep a stream busy for a given time.
            torch.cuda._sleep(cycles)
        begin.record()
        results = [call.run() for call in calls]
        end.record()
        torch.cuda.synchronize()
        del results
        return float(begin.elapsed_time(end)) / len(calls)

    def _on_cpu(self, calls: Sequence[Prepared]) -> float:
        for call in calls:
            call.refresh()
        begin = time.perf_counter()
        for call in calls:
            call.run()
        return (time.perf_counter() - begin) * 1000.0 / len(calls)
