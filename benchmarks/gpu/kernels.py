"""The elementwise kernels as a share of what the memory can do.

share = (bytes moved at least / time) / (bytes a copy moves / its time), both on this device in this
run. The bytes are those of benchmarks/op_cases.py; the copy reads and writes 2 GiB in all, far more
than caches hold. The target is for csrc's kernels that move 4 MiB or more: below that a launch
takes as long as the work.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch

from benchmarks.gpu.plan import DTYPE, TP, Measured, Plan, key_of
from benchmarks.gpu.report import Section, verdict
from benchmarks.gpu.timing import Stopwatch, present
from benchmarks.op_cases import OpCase, RankSizes, copy_case, op_cases, rate
from benchmarks.report import number

IMPLEMENTATIONS = ("csrc", "triton", "reference")
TARGET = 0.85
"""Least share."""
_SMALLEST_JUDGED = 2**22
_COPY = "copy"


def measure(device: torch.device, plan: Plan) -> Measured:
    """The copy's time, and that of every kernel in every implementation that is there."""
    watch = Stopwatch(device, plan)
    modules = present(IMPLEMENTATIONS, device)
    copy = _copy(plan)
    watch.take(_COPY, lambda: copy.prepare(device, torch.float32, modules["reference"]))
    for micro_batch, case in _elementwise(plan):
        calls = watch.calls_for(case.moved_bytes)
        for name, module in modules.items():
            call = partial(case.prepare, device, DTYPE, module)
            watch.take(key_of(case.key, micro_batch, name), call, calls=calls)
    return watch.measured


def sections(plan: Plan, measured: Measured) -> list[Section]:
    """The table, and the figures under flat keys."""
    copy = _copy(plan)
    of_copy = rate(copy.moved_bytes, measured.milliseconds(_COPY))
    flat: dict[str, object] = {"copy_gb_per_second": of_copy}
    rows, judged = [], []
    for micro_batch, case in _elementwise(plan):
        row = [case.key, f"{micro_batch}", f"{case.moved_bytes / 1e6:.1f}"]
        for name in IMPLEMENTATIONS:
            key = key_of(case.key, micro_batch, name)
            milliseconds = measured.milliseconds(key)
            speed = rate(case.moved_bytes, milliseconds)
            share = speed / of_copy if speed and of_copy else None
            flat |= {
                f"{key}_ms": milliseconds,
                f"{key}_gb_per_second": speed,
                f"{key}_share_of_copy": share,
            }
            microseconds = None if milliseconds is None else milliseconds * 1000.0
            row += [number(microseconds, ".1f"), number(share, ".2f")]
            if name == "csrc":
                large = case.moved_bytes >= _SMALLEST_JUDGED
                judged.append(share if large else None)
                target = TARGET if large and plan.targets_apply else None
                row.append(verdict(share, target))
        rows.append(row)
    reached = [share for share in judged if share is not None]
    flat["csrc_least_share_of_copy"] = min(reached) if reached else None
    flat["csrc_share_of_copy_target"] = TARGET if plan.targets_apply else None
    head = ["elementwise kernel", "micro-batch", "MB", "csrc µs", "share", f"at least {TARGET}"]
    for name in IMPLEMENTATIONS[1:]:
        head += [f"{name} µs", "share"]
    note = (
        f"Copy, GB/s: {number(of_copy, '.0f')}. share: of that, by the bytes that must be moved at "
        "least. Kernels that move less than 4 MiB are not judged."
    )
    return [Section("Elementwise kernels and the memory", head, rows, note, flat)]


def cases_of(plan: Plan) -> Iterator[tuple[int, OpCase]]:
    """Every op as one rank calls it, with its micro-batch."""
    for sizes in plan.models:
        for case in op_cases(RankSizes.of(sizes, TP), DTYPE, plan.device):
            yield sizes.micro_batch, case


def _elementwise(plan: Plan) -> Iterator[tuple[int, OpCase]]:
    return ((micro_batch, case) for micro_batch, case in cases_of(plan) if case.moved_bytes)


def _copy(plan: Plan) -> OpCase:
    return copy_case(2**16 if plan.quick else 2**31)
