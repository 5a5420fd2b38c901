"""How long a rank takes for the calls of a sweep.

All ranks begin every timing together, as the ranks of a layout compute together: they share the
memory's bandwidth and caches. Operands come one after the other from memory that no cache of a core
holds, since in training they were last touched a layer ago. The calls take turns in every round, so
that a slow spell of the machine falls on all of them. A CPU times with the wall clock, CUDA with
events.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from statistics import median

import torch
import torch.nn.functional as F
from torch import Tensor, distributed

from boost_layers import ops
from megatron.boost.planner.host import tiny_layer
from megatron.boost.planner.sweep import (
    AttentionCall,
    Call,
    CollectiveCall,
    CopyCall,
    KernelCall,
    LayerCall,
    OverlapCall,
    ProductCall,
    Sweep,
)

_EPS = 1e-6
_WARM_UP_ROUNDS = 1
_SEED = 1234
_QUEUEING_SECONDS = 50e-6
"""That the host takes at most to queue a call."""
_CYCLES_PER_SECOND = 2e9
"""At least as many as any clock of a GPU makes."""

Prepare = Callable[[], Callable[[], object]]
"""Makes what is called, outside of the time."""


class Walk:
    """Tensors one after the other in memory, from its beginning again where it ends."""

    def __init__(self, memory: Tensor):
        self._memory = memory
        self._position = 0

    def next(self, *shape: int) -> Tensor:
        """`shape`, contiguous, last touched as long ago as the walk is long."""
        numbers = math.prod(shape)
        if self._position + numbers > self._memory.numel():
            self._position = 0
        start, self._position = self._position, self._position + numbers
        return self._memory[start : start + numbers].view(shape)


def time_calls(device: torch.device, sweep: Sweep, dtype: torch.dtype) -> dict[Call, float]:
    """Run on a rank: seconds of every call that one rank makes for itself, on the slowest rank, in
    the median of the rounds. Issues a barrier and an all-reduce of a number for each timing."""
    operands, results = _walks(device, sweep, dtype)
    calls: dict[Call, Prepare] = {}
    calls |= _products(sweep, operands, results)
    calls |= _attention(sweep, operands)
    calls |= _kernels(sweep, operands)
    calls |= _copies(sweep, operands, results)
    return _in_turns(calls, sweep, device)


def time_collectives(
    device: torch.device, sweep: Sweep, dtype: torch.dtype, known: Mapping[Call, float]
) -> dict[Call, float]:
    """The same of collectives, and of what they overlap with; `known` is what `time_calls` gave.
    Nothing in a world of one rank."""
    if distributed.get_world_size() == 1:
        return {}
    operands, results = _walks(device, sweep, dtype)
    # Sums of zeros stay finite.
    size = 4 * max(sweep.messages) // dtype.itemsize
    messages = Walk(torch.zeros(size, dtype=dtype, device=device))
    found = _in_turns(dict(_collectives(sweep, messages, dtype)), sweep, device)
    overlap = _overlap(sweep, messages, operands, results, {**known, **found})
    return found | _in_turns(dict(overlap), sweep, device)


def time_host(device: torch.device, sweep: Sweep, dtype: torch.dtype) -> dict[Call, float]:
    """The same of a layer that keeps the host busy alone; with Megatron's parallel state, of
    tensor-parallel groups of one rank."""
    run = tiny_layer(device, dtype)
    return _in_turns({LayerCall(): partial(_same, run)}, sweep, device)


def _walks(device: torch.device, sweep: Sweep, dtype: torch.dtype) -> tuple[Walk, Walk]:
    """Of operands, and of places for results."""
    generator = torch.Generator(device).manual_seed(_SEED)
    # Of a dtype that every device's generator has.
    numbers = torch.randn(sweep.walk_bytes // dtype.itemsize, generator=generator, device=device)
    memory = numbers.to(dtype)
    return Walk(memory), Walk(torch.zeros_like(memory))


def _in_turns(
    calls: Mapping[Call, Prepare], sweep: Sweep, device: torch.device
) -> dict[Call, float]:
    seconds: dict[Call, list[float]] = {call: [] for call in calls}
    often: dict[Call, int] = {}
    for call, prepare in calls.items():
        run = prepare()
        run()
        alone = _seconds(run, 1, device, queued=False)
        often[call] = max(1, math.ceil(sweep.seconds / alone))
    for number in range(-_WARM_UP_ROUNDS, sweep.rounds):
        for call, prepare in calls.items():
            queued = not isinstance(call, LayerCall)
            taken = _seconds(prepare(), often[call], device, queued=queued)
            if number >= 0:
                seconds[call].append(taken)
    return {call: median(found) for call, found in seconds.items()}


def _seconds(run: Callable[[], object], often: int, device: torch.device, *, queued: bool) -> float:
    """Of one call, on the slowest rank, so that all ranks know the same. With `queued` a GPU is
    kept busy while the host queues the calls, so that it never waits for the host in them."""
    distributed.barrier()
    if device.type == "cuda":
        begin = torch.cuda.Event(enable_timing=True)
        end = torch.cuda.Event(enable_timing=True)
        torch.cuda.synchronize()
        if queued:
            torch.cuda._sleep(int(often * _QUEUEING_SECONDS * _CYCLES_PER_SECOND))
        begin.record()
        for _ in range(often):
            run()
        end.record()
        torch.cuda.synchronize()
        taken = begin.elapsed_time(end) / 1000.0
    else:
        start = time.perf_counter()
        for _ in range(often):
            run()
        taken = time.perf_counter() - start
    slowest = torch.tensor(taken / often, dtype=torch.float64, device=device)
    distributed.all_reduce(slowest, distributed.ReduceOp.MAX)
    return slowest.item()


def _products(sweep: Sweep, operands: Walk, results: Walk) -> Iterator[tuple[Call, Prepare]]:
    for call in sweep.products():
        yield call, partial(partial, _multiply, call, operands, results)


def _multiply(call: ProductCall, operands: Walk, results: Walk) -> None:
    """x·Wᵀ, dy·W or dyᵀ·x."""
    m, n, k = call.m, call.n, call.k
    left = operands.next(k, m).t() if call.role == "weight gradient" else operands.next(m, k)
    right = operands.next(n, k).t() if call.role == "forward" else operands.next(k, n)
    torch.mm(left, right, out=results.next(m, n))


def _attention(sweep: Sweep, operands: Walk) -> Iterator[tuple[Call, Prepare]]:
    for heads, head, sequence in sweep.attention:
        batch = max(1, sweep.tokens // sequence)
        forward = AttentionCall("forward", batch, heads, sequence, head)
        yield forward, partial(partial, _attend, forward, operands)
        backward = AttentionCall("backward", batch, heads, sequence, head)
        yield backward, partial(_attention_backward, backward, operands)


def _attend(call: AttentionCall, operands: Walk, *, backward: bool = False) -> list[Tensor]:
    """q, k, v and the output, with q, k and v as the projections leave them."""
    shape = (call.sequence, call.batch, call.heads, call.head)
    q, k, v = (
        operands.next(*shape).permute(1, 2, 0, 3).detach().requires_grad_(backward)
        for _ in range(3)
    )
    return [q, k, v, F.scaled_dot_product_attention(q, k, v, is_causal=True)]


def _attention_backward(call: AttentionCall, operands: Walk) -> Callable[[], object]:
    *inputs, out = _attend(call, operands, backward=True)
    return partial(torch.autograd.grad, out, inputs, torch.ones_like(out), retain_graph=True)


def _kernels(sweep: Sweep, operands: Walk) -> Iterator[tuple[Call, Prepare]]:
    """The ops of our layers, with the bytes that `elementwise` counts."""
    n, d, head = sweep.tokens, sweep.hidden[0], min(64, sweep.hidden[0])
    r, f = d // 4, 11 * d // 4
    take = operands.next
    gamma, cos, sin = take(d).clone(), take(n, head).clone(), take(n, head).clone()
    rho = torch.ones(n, 1, device=gamma.device)
    opened = partial(ops.latent_epilogue, statistics=d * rho, hidden_size=d, eps=_EPS)
    closed = partial(ops.latent_epilogue_backward, statistics=d * rho, hidden_size=d, eps=_EPS)
    ranks, heads = (r, r, r), (n, 1, d // head, head)
    calls: dict[str, tuple[int, Callable[[], object]]] = {
        "residual": (3 * n * d, lambda: ops.residual_add_rms_stats(take(n, d), take(n, d))),
        "norm": (2 * n * d, lambda: ops.rms_norm(take(n, d), gamma, _EPS)),
        "norm backward": (
            4 * n * d,
            lambda: ops.rms_norm_backward(take(n, d), take(n, d), gamma, rho, take(n, d)),
        ),
        "latents": (2 * n * 3 * r, lambda: opened(take(n, 3 * r), ranks, "silu")),
        "latents backward": (
            3 * n * 3 * r,
            lambda: closed(take(n * 3 * r), ranks, "silu", h=take(n, 3 * r)),
        ),
        "rotary embedding": (
            4 * n * d,
            lambda: ops.rotary_([take(*heads), take(*heads)], cos, sin, interleaved=False),
        ),
        "rotary embedding backward": (
            6 * n * d,
            lambda: ops.rotary_backward(
                [take(*heads) for _ in range(3)], 2, cos, sin, interleaved=False
            ),
        ),
        "gate": (3 * n * f, lambda: ops.gated_product(take(n, f), take(n, f), "product")),
        "gate backward": (
            5 * n * f,
            lambda: ops.gated_product_backward(take(n, f), take(n, f), take(n, f), "product"),
        ),
    }
    for name, (numbers, run) in calls.items():
        yield KernelCall(name, numbers * gamma.element_size()), partial(_same, run)


def _same(run: Callable[[], object]) -> Callable[[], object]:
    return run


def _copies(sweep: Sweep, operands: Walk, results: Walk) -> Iterator[tuple[Call, Prepare]]:
    size = operands.next(1).element_size()
    numbers = sweep.copied_bytes // size // 2
    run = partial(_copy, numbers, operands, results)
    yield CopyCall(2 * numbers * size), partial(_same, run)


def _copy(numbers: int, source: Walk, target: Walk) -> None:
    target.next(numbers).copy_(source.next(numbers))


def _collectives(
    sweep: Sweep, messages: Walk, dtype: torch.dtype
) -> Iterator[tuple[Call, Prepare]]:
    """All-reduces in groups of every size that divides the world."""
    world = distributed.get_world_size()
    for ranks in range(2, world + 1):
        if world % ranks:
            continue
        group, _ = distributed.new_subgroups(ranks)
        for size in sweep.messages:
            run = partial(_all_reduce, size // dtype.itemsize, messages, group)
            yield CollectiveCall(ranks, size), partial(_same, run)


def _all_reduce(numbers: int, messages: Walk, group: distributed.ProcessGroup | None) -> None:
    distributed.all_reduce(messages.next(numbers), group=group)


def _overlap(
    sweep: Sweep, messages: Walk, operands: Walk, results: Walk, known: Mapping[Call, float]
) -> Iterator[tuple[Call, Prepare]]:
    """The largest message over all ranks, and as many weight gradients as take no longer."""
    size = max(sweep.messages)
    numbers = size // messages.next(1).element_size()
    gradients = [
        call for call in known if isinstance(call, ProductCall) and call.role == "weight gradient"
    ]
    product = min(gradients, key=lambda call: call.flops)
    alone = known[CollectiveCall(distributed.get_world_size(), size)]
    often = max(1, int(alone / known[product]))

    def multiply() -> None:
        for _ in range(often):
            _multiply(product, operands, results)

    def both() -> None:
        work = distributed.all_reduce(messages.next(numbers), async_op=True)
        multiply()
        work.wait()

    reduce = partial(_all_reduce, numbers, messages, None)
    yield OverlapCall("collective"), partial(_same, reduce)
    yield OverlapCall("products"), partial(_same, multiply)
    yield OverlapCall("both"), partial(_same, both)
