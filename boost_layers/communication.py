"""The ledger: every collective that our layers issue goes through this file and is counted.

A collective is recorded by operation, by phase (forward, backward, recompute) and by scope: inside
a layer, or at the borders of the stack of layers. Sizes are those of the tensor handed over on one
rank, in bytes; for an all-gather that is the local shard, for a reduce-scatter and an all-to-all
the whole input.
"""

from __future__ import annotations

import time
from collections import defaultdict
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

Operation = Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all"]
Phase = Literal["forward", "backward", "recompute"]
Scope = Literal["layer", "border"]

_MIB = 1024 * 1024


@dataclass
class CollectiveCount:
    """What the ledger knows of one kind of collective: calls, bytes of the tensors handed over on
    this rank, and the seconds the caller was kept waiting for them."""

    calls: int = 0
    bytes: int = 0
    seconds: float = 0.0


@dataclass
class Ledger:
    """Counts of collectives since the last `clear`, and of the layer passes they belong to."""

    counts: dict[tuple[Scope, Phase, Operation], CollectiveCount] = field(
        default_factory=lambda: defaultdict(CollectiveCount)
    )
    layer_passes: dict[Phase, int] = field(default_factory=lambda: defaultdict(int))
    """Passes through a layer: `forward` (one a layer and micro-batch), `recompute`, and `backward`
    (forwards or recomputes whose graph is kept, so one a layer and trained micro-batch)."""
    timed: bool = False
    """Whether waiting times are measured; a run with a report of its communication turns it on."""
    observer: Callable[[Scope, Phase, Operation, torch.Tensor], None] | None = None
    """Told of every collective, with the tensor handed over, before it begins."""
    _pending_cuda_events: list[tuple[CollectiveCount, torch.cuda.Event, torch.cuda.Event]] = field(
        default_factory=list
    )

    def clear(self) -> None:
        """Forget everything counted so far."""
        self.counts.clear()
        self.layer_passes.clear()
        self._pending_cuda_events.clear()

    def enter_layer(self) -> None:
        """Note that a layer's forward begins; called once by each layer's forward."""
        self.layer_passes[current_phase()] += 1
        if torch.is_grad_enabled():
            self.layer_passes["backward"] += 1

    def per_layer(self, phase: Phase, operation: Operation) -> tuple[float, float]:
        """Calls and MiB of a collective per layer and micro-batch, borders apart."""
        passes = self.layer_passes[phase]
        if passes == 0:
            return 0.0, 0.0
        count = self.counts.get(("layer", phase, operation), CollectiveCount())
        return count.calls / passes, count.bytes / passes / _MIB

    def settle(self) -> None:
        """Add the waiting times that CUDA events recorded; call it outside the hot path."""
        if self._pending_cuda_events:
            torch.cuda.synchronize()
        for count, begin, end in self._pending_cuda_events:
            count.seconds += begin.elapsed_time(end) / 1000.0
        self._pending_cuda_events.clear()

    def _settle_finished(self) -> None:
        """Add the waiting times of events that have happened, without waiting for others."""
        unfinished = []
        for count, begin, end in self._pending_cuda_events:
            if end.query():
                count.seconds += begin.elapsed_time(end) / 1000.0
            else:
                unfinished.append((count, begin, end))
        self._pending_cuda_events[:] = unfinished

    @contextmanager
    def waiting(self, count: CollectiveCount, tensor: torch.Tensor) -> Iterator[None]:
        """Add the time spent inside to `count.seconds`; on CUDA by events, without a
        synchronisation."""
        if not self.timed:
            yield
            return
        if not tensor.is_cuda:
            begin = time.perf_counter()
            yield
            count.seconds += time.perf_counter() - begin
            return
        if torch.cuda.is_current_stream_capturing():
            yield
            return
        begin_event = torch.cuda.Event(enable_timing=True)
        end_event = torch.cuda.Event(enable_timing=True)
        begin_event.record()
        yield
        end_event.record()
        self._pending_cuda_events.append((count, begin_event, end_event))
        if len(self._pending_cuda_events) % 4096 == 0:
            self._settle_finished()


LEDGER = Ledger()
"""The process's ledger. It only observes: no layer reads it."""


def current_phase() -> Phase:
    """forward, or recompute when a forward runs inside autograd's backward. Code that runs in the
    backward of one of our autograd Functions says "backward" itself."""
    inside_backward = torch._C._current_graph_task_id() != -1
    return "recompute" if inside_backward else "forward"


class Pending:
    """A collective under way; `wait` returns its result and must be called exactly once."""

    def __init__(self, work: dist.Work | None, result: torch.Tensor, count: CollectiveCount):
        self._work = work
        self._result = result
        self._count = count

    def wait(self) -> torch.Tensor:
        """The reduced tensor, `[…]` as handed over."""
        if self._work is not None:
            with LEDGER.waiting(self._count, self._result):
                self._work.wait()
            self._work = None
        return self._result


def _record(operation: Operation, phase: Phase, scope: Scope, x: torch.Tensor) -> CollectiveCount:
    count = LEDGER.counts[(scope, phase, operation)]
    count.calls += 1
    count.bytes += x.numel() * x.element_size()
    if LEDGER.observer is not None:
        LEDGER.observer(scope, phase, operation, x)
    return count


def all_reduce(
    x: torch.Tensor, group: dist.ProcessGroup, phase: Phase, scope: Scope = "layer"
) -> torch.Tensor:
    """Sum `x` over the group in place and return it. One all-reduce of `x`; none in a group of
    one."""
    return start_all_reduce(x, group, phase, scope, asynchronous=False).wait()


def start_all_reduce(
    x: torch.Tensor,
    group: dist.ProcessGroup,
    phase: Phase,
    scope: Scope = "layer",
    *,
    asynchronous: bool = True,
) -> Pending:
    """Begin to sum `x` over the group in place. `x` must not be read or written before `wait`."""
    if group.size() == 1:
        return Pending(None, x, CollectiveCount())
    assert x.is_contiguous()
    count = _record("all_reduce", phase, scope, x)
    if asynchronous:
        return Pending(dist.all_reduce(x, group=group, async_op=True), x, count)
    with LEDGER.waiting(count, x):
        dist.all_reduce(x, group=group)
    return Pending(None, x, count)


def all_gather(
    x: torch.Tensor, group: dist.ProcessGroup, phase: Phase, scope: Scope = "layer"
) -> torch.Tensor:
    """Gather `x` `[…]` of every rank as `[T, …]`. One all-gather of `x`; a view in a group of
    one."""
    size = group.size()
    x = x.contiguous()
    if size == 1:
        return x.unsqueeze(0)
    gathered = x.new_empty(size, *x.shape)
    count = _record("all_gather", phase, scope, x)
    with LEDGER.waiting(count, x):
        dist.all_gather_into_tensor(gathered.view(-1), x.view(-1), group=group)
    return gathered


def reduce_scatter(
    x: torch.Tensor, group: dist.ProcessGroup, phase: Phase, scope: Scope = "layer"
) -> torch.Tensor:
    """Sum `x` `[T, …]` over the group and return this rank's `[…]`. One reduce-scatter of `x`."""
    assert x.shape[0] == group.size()
    if group.size() == 1:
        return x[0]
    x = x.contiguous()
    shard = torch.empty_like(x[0])
    count = _record("reduce_scatter", phase, scope, x)
    with LEDGER.waiting(count, x):
        dist.reduce_scatter_tensor(shard.view(-1), x.view(-1), group=group)
    return shard


def all_to_all(
    x: torch.Tensor, group: dist.ProcessGroup, phase: Phase, scope: Scope = "border"
) -> torch.Tensor:
    """Send `x[j]` of `[T, …]` to rank j and return `[T, …]`, entry j from rank j. One all-to-all
    of `x`."""
    assert x.shape[0] == group.size()
    if group.size() == 1:
        return x
    x = x.contiguous()
    received = torch.empty_like(x)
    count = _record("all_to_all", phase, scope, x)
    with LEDGER.waiting(count, x):
        dist.all_to_all_single(received.view(-1), x.view(-1), group=group)
    return received
