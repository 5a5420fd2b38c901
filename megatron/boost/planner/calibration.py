"""The machine at hand as a cluster: what its ranks do, fitted to the formulas of the planner.

Every rank of the machine takes part at the same time, one thread each on a CPU and one GPU each on
CUDA, because they share what lies between them. What one machine cannot show, the network between
nodes, comes from another cluster that the caller names, and the file's comments say so.
"""

from __future__ import annotations

import os
import resource
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal

import torch
from torch import distributed

from megatron.boost.accounting.collectives import operation_wire_bytes
from megatron.boost.machine import describe_machine
from megatron.boost.planner.attention import BACKWARD_PRODUCTS
from megatron.boost.planner.cluster import Cluster, Compute, Link, Memory
from megatron.boost.planner.fit import Fit, fit_relative
from megatron.boost.planner.host import tiny_layer_operations
from megatron.boost.planner.iteration import DTYPES
from megatron.boost.planner.memory import GIB
from megatron.boost.planner.sweep import (
    CPU_SWEEP,
    CUDA_SWEEP,
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
from megatron.boost.planner.timing import time_calls, time_collectives, time_host
from megatron.boost.ranks import megatron_group, run_on_ranks

_REPOSITORY = Path(__file__).resolve().parents[3]
_DIGITS = 4
_MEMORY_BOUND = 1.5
"""A product that takes less than this times what its bytes take is left out of the fit of the
matrix units."""

Device = Literal["cpu", "cuda"]
Timings = Mapping[Call, float]
"""Seconds."""


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """A measured cluster, and where its numbers are from, as `write_cluster` takes it."""

    cluster: Cluster
    notes: Mapping[str, str]


@dataclass(frozen=True, kw_only=True)
class Measurements:
    """What the ranks of one machine saw."""

    ranks: int
    timings: Mapping[str, Timings]
    """By dtype; collectives and the host's are with the first."""
    capacity_bytes: float
    """Memory of one rank."""
    reserved_bytes: float
    """Of that in use before anything was allocated."""


def calibrate(
    *,
    device: Device = "cpu",
    ranks: int | None = None,
    dtypes: Sequence[str] = ("fp32",),
    base: Cluster | None = None,
    sweep: Sweep | None = None,
) -> Calibration:
    """Measure this machine with `ranks` ranks at the same time, in about a minute.

    Args:
        device: "cpu" or "cuda".
        ranks: by default one for each core that this process may use, or for each GPU.
        dtypes: of `compute`; the first is that of the collectives and of the host's operations.
        base: what this machine cannot show is as there: the network between nodes, the number of
            GPUs, and between GPUs where there is one rank. Without it there is none.
        sweep: what is timed; by default the device's.

    Raises:
        ValueError: for more ranks than there are cores or GPUs, and for devices and dtypes that do
            not exist.
    """
    ranks = _legal_ranks(device, ranks)
    for name in dtypes:
        if name not in DTYPES:
            raise ValueError(
                f"--dtype {name}: must be one of {', '.join(DTYPES)}; nearest legal value: fp32"
            )
    if not dtypes:
        raise ValueError("--dtype: none is given; nearest legal value: fp32")
    load = os.getloadavg()[0]
    sweep = sweep or (CUDA_SWEEP if device == "cuda" else CPU_SWEEP)
    measured = run_on_ranks(_measure, ranks, device, sweep, tuple(dtypes))[0]
    found = fitted(measured, base, _name(device, ranks))
    return replace(found, notes={"": _head(device, ranks, load), **found.notes})


def _legal_ranks(device: str, ranks: int | None) -> int:
    if device not in ("cpu", "cuda"):
        raise ValueError(f"--device {device}: must be cpu or cuda; nearest legal value: cpu")
    most = torch.cuda.device_count() if device == "cuda" else len(os.sched_getaffinity(0))
    if most == 0:
        raise ValueError("--device cuda: there is no GPU; nearest legal value: cpu")
    if ranks is not None and not 1 <= ranks <= most:
        what = "GPUs" if device == "cuda" else "cores"
        raise ValueError(
            f"{ranks} ranks: from 1 to {most}, as many as there are {what}; nearest legal value: "
            f"{min(max(ranks, 1), most)}"
        )
    return ranks or most


def _measure(device: torch.device, sweep: Sweep, dtypes: Sequence[str]) -> Measurements:
    """Run on a rank."""
    timings: dict[str, dict[Call, float]] = {}
    with megatron_group(device, tensor_parallel=1):
        host = time_host(device, sweep, DTYPES[dtypes[0]])
        capacity, reserved = _memory(device)
        for name in dtypes:
            timings[name] = time_calls(device, sweep, DTYPES[name])
        first = dtypes[0]
        timings[first] |= time_collectives(device, sweep, DTYPES[first], timings[first]) | host
    return Measurements(
        ranks=distributed.get_world_size(),
        timings=timings,
        capacity_bytes=capacity,
        reserved_bytes=reserved,
    )


def _memory(device: torch.device) -> tuple[float, float]:
    """Capacity, and what is in use without tensors: the process, or the GPU's context and NCCL."""
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return total, total - free - torch.cuda.memory_reserved(device)
    pages = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    in_use = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return pages / distributed.get_world_size(), in_use


def _name(device: Device, ranks: int) -> str:
    if device == "cuda":
        return f"{ranks} x {torch.cuda.get_device_name(0)}, NCCL"
    machine = describe_machine(_REPOSITORY)
    return f"{machine['processor']}, {ranks} of {machine['cores']} cores, gloo"


def _head(device: Device, ranks: int, load: float) -> str:
    machine = describe_machine(_REPOSITORY)
    on = ", ".join(f"{name} {machine[name]}" for name in ("memory", "system", "torch", "commit"))
    return (
        f"{_name(device, ranks)}, as measured on {datetime.now(UTC):%Y-%m-%d} by "
        f"`tools/plan.py --calibrate`: {on}; load average before {load:.2f}.\n\n"
        "Copy this file and edit it for another cluster; `tools/plan.py --gpu FILE` reads it."
    )


def fitted(measured: Measurements, base: Cluster | None, name: str) -> Calibration:
    """The cluster whose formulas come nearest to the timings.

    Raises:
        ValueError: for timings that are not positive and finite.
    """
    dtype, timings = next(iter(measured.timings.items()))
    notes: dict[str, str] = {}
    memory = _fit_memory(measured, timings, notes)
    compute = {
        each: _fit_compute(of_dtype, DTYPES[each].itemsize, memory, notes, f"compute.{each}")
        for each, of_dtype in measured.timings.items()
    }
    node, overlap = _fit_links(measured.ranks, timings, base, notes)
    cluster = Cluster(
        name=name,
        gpus_per_node=measured.ranks,
        most_gpus=measured.ranks if base is None else base.most_gpus,
        host_us_per_operation=0.0,
        collective_overlap=overlap,
        compute=compute,
        memory=memory,
        node=node,
        network=_NO_LINK if base is None else base.network,
    )
    not_measured = "Nothing joins this machine to others." if base is None else _taken_from(base)
    notes["network"] = notes["most_gpus"] = not_measured
    operations = tiny_layer_operations(cluster, DTYPES[dtype], dtype)
    notes["host_us_per_operation"] = (
        f"Measured: a layer too small to compute anything, by the {operations:g} operations that "
        "the planner counts in it."
    )
    host = _rounded(timings[LayerCall()] / operations * 1e6)
    return Calibration(cluster=replace(cluster, host_us_per_operation=host), notes=notes)


def _taken_from(base: Cluster) -> str:
    return f"Not measured: as in {base.name}."


_NO_LINK = Link(latency_us=0.0, bus_gb_per_s={"2": 0.0})
"""Over which nothing ever arrives."""


def _rounded(value: float) -> float:
    return float(f"{value:.{_DIGITS}g}")


def _described(what: str, fit: Fit) -> str:
    return (
        f"Fitted to {what}: mean error {100 * fit.mean_error:.1f} %, "
        f"worst {100 * fit.worst_error:.1f} %."
    )


def _fit_memory(measured: Measurements, timings: Timings, notes: dict[str, str]) -> Memory:
    copies = {call: taken for call, taken in timings.items() if isinstance(call, CopyCall)}
    kernels = {call: taken for call, taken in timings.items() if isinstance(call, KernelCall)}
    copied = sum(call.bytes for call in copies) / sum(copies.values())
    swept = sum(call.bytes for call in kernels) / sum(kernels.values())
    rates = {call.name: call.bytes / taken / 1e9 for call, taken in kernels.items()}
    # Kernels that work in place spare the reading of what they write.
    fastest = max(copied, swept)
    notes["memory.bandwidth_gb_per_s"] = (
        f"Measured: large copies ({copied / 1e9:.4g}), or small kernels where they do better."
    )
    notes["memory.elementwise_efficiency"] = "Measured, all together. In GB/s: " + ", ".join(
        f"{name} {rate:.1f}" for name, rate in rates.items()
    )
    return Memory(
        capacity_gib=_rounded(measured.capacity_bytes / GIB),
        reserved_gib=_rounded(measured.reserved_bytes / GIB),
        bandwidth_gb_per_s=_rounded(fastest / 1e9),
        elementwise_efficiency=_rounded(swept / fastest),
    )


def _fit_compute(
    timings: Timings, itemsize: int, memory: Memory, notes: dict[str, str], table: str
) -> Compute:
    """`gemm`'s formula is linear in 1/rate, k½/rate, packing/bandwidth and the fixed time:
    t = flops/rate + flops/k·(k½/rate) + bytes·(packing/bandwidth) + fixed."""
    products = {
        call: taken
        for call, taken in timings.items()
        if isinstance(call, ProductCall) and not _bound_by_memory(call, taken, memory, itemsize)
    }
    terms = [[c.flops, c.flops / c.k, c.bytes(itemsize), 1.0] for c in products]
    # A peak of infinity, with which noise may fit best, is none.
    fit = fit_relative(terms, list(products.values()), needs_first=True)
    per_flop, per_flop_over_k, per_byte, fixed = fit.coefficients
    fastest = max(call.flops / taken for call, taken in products.items())
    peak = max(fastest, 1 / per_flop)
    notes[f"{table}.peak_tflops"] = "Measured: the fastest product, or a faster fit."
    fitted_to = _described(f"{len(products)} products, with the next three", fit)
    notes[f"{table}.gemm_efficiency"] = fitted_to
    directions = {}
    for direction in ("forward", "backward"):
        calls = {
            call: taken
            for call, taken in timings.items()
            if isinstance(call, AttentionCall) and call.direction == direction
        }
        share = fit_relative([[_attention_flops(call)] for call in calls], list(calls.values()))
        directions[direction] = _rounded(1 / (share.coefficients[0] * peak))
        notes[f"{table}.attention_{direction}_efficiency"] = _described(
            ", ".join(f"{call.heads} heads at length {call.sequence}" for call in calls), share
        )
    return Compute(
        peak_tflops=_rounded(peak / 1e12),
        gemm_efficiency=_rounded(1 / (per_flop * peak)),
        gemm_half_depth=_rounded(per_flop_over_k / per_flop),
        gemm_fixed_us=_rounded(fixed * 1e6),
        gemm_packing=_rounded(per_byte * memory.bandwidth_gb_per_s * 1e9),
        attention_forward_efficiency=directions["forward"],
        attention_backward_efficiency=directions["backward"],
    )


def _bound_by_memory(call: ProductCall, taken: float, memory: Memory, itemsize: int) -> bool:
    """Whether the memory, not the matrix units, is what a product waits for."""
    moved = call.bytes(itemsize) / (memory.bandwidth_gb_per_s * 1e9)
    return taken < _MEMORY_BOUND * moved


def _attention_flops(call: AttentionCall) -> float:
    forward = 2 * call.heads * call.head * call.batch * call.sequence**2
    return forward if call.direction == "forward" else BACKWARD_PRODUCTS * forward


def _fit_links(
    ranks: int, timings: Timings, base: Cluster | None, notes: dict[str, str]
) -> tuple[Link, float]:
    """The link between the ranks, α and a 1/β for every number of ranks, and what it overlaps."""
    if ranks == 1:
        notes["node"] = notes["collective_overlap"] = (
            "There is one rank." if base is None else _taken_from(base)
        )
        return (_NO_LINK, 0.0) if base is None else (base.node, base.collective_overlap)
    calls = {call: taken for call, taken in timings.items() if isinstance(call, CollectiveCall)}
    sizes = sorted({call.ranks for call in calls})
    rows = [
        [1.0, *(_sent(call) if call.ranks == size else 0.0 for size in sizes)] for call in calls
    ]
    fit = fit_relative(rows, list(calls.values()))
    alpha, *inverse_rates = fit.coefficients
    notes["node"] = _described(f"{len(calls)} all-reduces", fit)
    link = Link(
        latency_us=_rounded(alpha * 1e6),
        bus_gb_per_s={
            str(size): _rounded((1 / inverse if inverse else _fastest(calls, size)) / 1e9)
            for size, inverse in zip(sizes, inverse_rates, strict=True)
        },
    )
    whats: tuple[Literal["collective", "products", "both"], ...]
    whats = ("collective", "products", "both")
    collective, products, both = (timings[OverlapCall(what)] for what in whats)
    notes["collective_overlap"] = (
        f"Measured: {1e3 * collective:.1f} ms of all-reduce and {1e3 * products:.1f} ms of "
        f"products take {1e3 * both:.1f} ms at the same time."
    )
    hidden = (collective + products - both) / products
    return link, _rounded(min(max(hidden, 0.0), 1.0))


def _fastest(calls: Mapping[CollectiveCall, float], ranks: int) -> float:
    """Bytes a second of the collective that sent most in its time: where latency is all that shows,
    the least that the link does."""
    return max(_sent(call) / taken for call, taken in calls.items() if call.ranks == ranks)


def _sent(call: CollectiveCall) -> float:
    return operation_wire_bytes("all_reduce", call.bytes, call.ranks)
