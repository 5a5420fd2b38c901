"""One rank of 7B at TP 4 without its communication: forward and backward of the layers.

A `fake` process group of four stands in for the other ranks: its collectives return at once, and
what they should have brought is whatever the memory holds, so that losses mean nothing here (parity
is the tests' matter). Weights and gradients lie in buffers as in training. Milliseconds of 32
layers = 32·(t(4 layers) − t(2 layers))/2, t the time of an iteration as in benchmarks/iteration.py:
embedding, head and loss cancel out. Events stand around the whole iteration: where the device waits
for the host, that counts.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import distributed, nn

from benchmarks.gpu.plan import DTYPE, TP, WHOLE_LAYERS, Measured, Plan, key_of
from benchmarks.gpu.report import Section
from benchmarks.gpu.timing import Stopwatch, present
from benchmarks.models import batch_of, iterations_of
from benchmarks.op_cases import Prepared
from benchmarks.report import number
from benchmarks.variants import BTP, FULL_RANK, VANILLA, Variant
from boost_layers import ops
from boost_layers.ops.dispatch import Implementation
from megatron.boost.ranks import megatron_group

IMPLEMENTATIONS: tuple[Implementation, ...] = ("csrc", "triton", "reference")
STRATEGIES = (BTP, FULL_RANK[0], VANILLA[0])


def measure(device: torch.device, plan: Plan) -> Measured:
    """An iteration of each strategy at each micro-batch, of all layers that are timed and of half
    of them, by each implementation that is there."""
    watch = Stopwatch(device, plan)
    names = list(present(IMPLEMENTATIONS, device))
    with _fake_ranks(), megatron_group(device):
        for strategy in STRATEGIES:
            for depth in _depths(plan):
                _time_model(watch, plan, strategy, depth, names)
                gc.collect()
    return watch.measured


def _time_model(
    watch: Stopwatch,
    plan: Plan,
    strategy: Variant,
    depth: int,
    implementations: Sequence[Implementation],
) -> None:
    sizes = replace(plan.models[0], layers=depth)
    (iteration,) = iterations_of(watch.device, [strategy], sizes, DTYPE).values()
    _into_buffers(iteration.model)
    for batch in plan.models:
        tokens, labels = batch_of(watch.device, batch)
        one = Prepared(replace(iteration, tokens=tokens, labels=labels).run)
        for name in implementations:
            key = key_of(_key(strategy.key, depth), batch.micro_batch, name)
            with ops.use(name, watch.device.type):
                watch.take(key, partial(_itself, one), queued=False)


def _into_buffers(model: nn.Module) -> None:
    """Weights and fp32 main gradients as Megatron's distributed optimiser has them in training: in
    one buffer each, last to first. Where a group's members lie in it, one batched GEMM does."""
    parameters: list[Any] = list(model.parameters())[::-1]
    sizes = [parameter.numel() for parameter in parameters]
    weights = parameters[0].new_empty(sum(sizes)).split(sizes)
    gradients = parameters[0].new_zeros(sum(sizes), dtype=torch.float32).split(sizes)
    for parameter, weight, gradient in zip(parameters, weights, gradients, strict=True):
        weight.copy_(parameter.detach().flatten())
        parameter.data = weight.view(parameter.shape)
        parameter.main_grad = gradient.view(parameter.shape)
        parameter.grad_added_to_main_grad = False


def _itself(call: Prepared) -> Prepared:
    return call


def sections(plan: Plan, measured: Measured) -> list[Section]:
    """The table, and the figures under flat keys."""
    many, few = _depths(plan)
    flat: dict[str, object] = {}
    rows = []
    for sizes in plan.models:
        for name in IMPLEMENTATIONS:
            whole: dict[str, float | None] = {}
            for strategy in STRATEGIES:
                deep, shallow = (
                    measured.milliseconds(
                        key_of(_key(strategy.key, depth), sizes.micro_batch, name)
                    )
                    for depth in (many, few)
                )
                time = None
                if deep is not None and shallow is not None:
                    time = WHOLE_LAYERS * (deep - shallow) / (many - few)
                whole[strategy.key] = time
                key = key_of(strategy.key, sizes.micro_batch, name)
                flat[f"{key}_ms_of_{WHOLE_LAYERS}_layers"] = time
                flat[f"{key}_ms_of_iteration_of_{many}_layers"] = deep
            btp = whole[BTP.key]
            row = [f"{sizes.micro_batch}", name, *(number(t, ".1f") for t in whole.values())]
            for strategy in STRATEGIES[1:]:
                time = whole[strategy.key]
                ratio = time / btp if time is not None and btp else None
                key = key_of(f"{strategy.key}_over_btp", sizes.micro_batch, name)
                flat[f"{key}_without_communication"] = ratio
                row.append(number(ratio, ".2f"))
            rows.append(row)
    head = ["micro-batch", "ops", *(f"{strategy.title} ms" for strategy in STRATEGIES)]
    head += [f"{strategy.title} / {BTP.title}" for strategy in STRATEGIES[1:]]
    note = "Forward and backward, no communication: the collectives of this process do nothing."
    return [Section(f"{WHOLE_LAYERS} layers on one rank of TP {TP}", head, rows, note, flat)]


def _depths(plan: Plan) -> tuple[int, int]:
    layers = plan.models[0].layers
    return layers, layers // 2


def _key(strategy: str, depth: int) -> str:
    return f"{strategy}_{depth}_layers"


@contextmanager
def _fake_ranks() -> Iterator[None]:
    """The first rank of a tensor-parallel group, alone."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    distributed.init_process_group("fake", rank=0, world_size=TP, store=FakeStore())
    try:
        yield
    finally:
        distributed.destroy_process_group()
