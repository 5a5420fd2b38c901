"""The GEMMs of the up- and down-projections as a share of what the matrix units can do, and what
grouping them is worth.

share = (2·n·(numbers in the weights) / time) / (2·m³ / time of the fastest square torch.mm), m the
size of that, in bf16 on this device in this run. Grouping: one down-projection to all of a group's
latents and one grouped up-projection from them, against one of each for every member; n tokens,
A_i `[r, d/T]`, B_i `[o_i/T, r]`, the norm and φ between them left out. Its targets at micro-batch 1
are the ratios of the paper's GEMM times on an A100 (BOOST, arXiv 2512.12131: QKV 0.401 to 0.259
ms, MLP 0.362 to 0.298 ms).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from benchmarks.gpu.kernels import cases_of
from benchmarks.gpu.plan import DTYPE, TP, Measured, Plan, key_of
from benchmarks.gpu.report import Section, verdict
from benchmarks.gpu.timing import Stopwatch, present
from benchmarks.op_cases import Maker, OpCase, RankSizes, rate
from benchmarks.report import number

IMPLEMENTATIONS = ("csrc", "reference")
TARGETS = {"qkv": 1.55, "gate_up": 1.21}
"""Time without grouping over that with it, at micro-batch 1."""
_CALLS = 4
"""Between two events: enough for their own time not to count."""


def measure(device: torch.device, plan: Plan) -> Measured:
    """The times of square products, of every GEMM and of the grouped and ungrouped ones."""
    watch = Stopwatch(device, plan)
    for case in _squares(plan):
        watch.take(case.key, partial(case.prepare, device, DTYPE, torch))
    for name, module in present(IMPLEMENTATIONS, device).items():
        for micro_batch, case in [*_gemms(plan), *_groupings(plan)]:
            call = partial(case.prepare, device, DTYPE, module)
            watch.take(key_of(case.key, micro_batch, name), call, calls=_CALLS)
    return watch.measured


def sections(plan: Plan, measured: Measured) -> list[Section]:
    """The tables, and the figures under flat keys."""
    speeds = {c.key: rate(c.flop, measured.milliseconds(c.key)) for c in _squares(plan)}
    peak = max((speed for speed in speeds.values() if speed is not None), default=None)
    return [_of_peak(plan, measured, peak), _of_grouping(plan, measured)]


def _of_peak(plan: Plan, measured: Measured, peak: float | None) -> Section:
    flat: dict[str, object] = {
        "matrix_peak_tflop_per_second": None if peak is None else peak / 1000.0
    }
    rows = []
    for micro_batch, case in _gemms(plan):
        row = [case.key, f"{micro_batch}", f"{case.flop / 1e9:.0f}"]
        for name in IMPLEMENTATIONS:
            key = key_of(case.key, micro_batch, name)
            milliseconds = measured.milliseconds(key)
            speed = rate(case.flop, milliseconds)
            share = speed / peak if speed and peak else None
            flat |= {
                f"{key}_ms": milliseconds,
                f"{key}_tflop_per_second": None if speed is None else speed / 1000.0,
                f"{key}_share_of_peak": share,
            }
            row += [number(milliseconds, ".3f"), number(share, ".2f")]
        rows.append(row)
    head = ["GEMM", "micro-batch", "GFLOP"]
    for name in IMPLEMENTATIONS:
        head += [f"{name} ms", "share of peak"]
    in_tflop = number(None if peak is None else peak / 1000.0, ".0f")
    note = f"Peak, TFLOP/s: {in_tflop}, of the fastest square torch.mm in bf16."
    return Section("GEMMs and the matrix units", head, rows, note, flat)


def _of_grouping(plan: Plan, measured: Measured) -> Section:
    flat: dict[str, object] = {}
    rows = []
    for sizes in plan.models:
        for group in TARGETS:
            for name in IMPLEMENTATIONS:
                apart, together = (
                    measured.milliseconds(key_of(f"{group}_{form}", sizes.micro_batch, name))
                    for form in ("ungrouped", "grouped")
                )
                ratio = apart / together if apart and together else None
                key = key_of(f"{group}_ungrouped_over_grouped", sizes.micro_batch, name)
                flat[key] = ratio
                target = None
                if name == "csrc" and sizes.micro_batch == 1 and plan.targets_apply:
                    target = flat[f"{key}_target"] = TARGETS[group]
                row = [group, f"{sizes.micro_batch}", name]
                row += [number(apart, ".3f"), number(together, ".3f"), number(ratio, ".2f")]
                rows.append([*row, "" if target is None else f"{target}", verdict(ratio, target)])
    head = ["group", "micro-batch", "", "ungrouped ms", "grouped ms", "ratio", "at least", "met"]
    return Section("Grouping", head, rows, "Down- and up-projections, forward.", flat)


def _gemms(plan: Plan) -> Iterator[tuple[int, OpCase]]:
    return ((micro_batch, case) for micro_batch, case in cases_of(plan) if case.flop)


def _squares(plan: Plan) -> Iterator[OpCase]:
    for size in (64,) if plan.quick else (4096, 8192, 16384):
        build = partial(_square, size)
        yield OpCase(key=f"square_{size}", op="mm", build=build, flop=2 * size**3)


def _square(size: int, m: Maker, ops: Any) -> Callable[[], object]:
    return partial(ops.mm, m.normal(size, size), m.normal(size, size))


def _groupings(plan: Plan) -> Iterator[tuple[int, OpCase]]:
    for sizes in plan.models:
        rank = RankSizes.of(sizes, TP)
        for group, members, out in (("qkv", 3, rank.width), ("gate_up", 2, rank.ffn)):
            for case in _grouping(rank, group, members, out):
                yield sizes.micro_batch, case


def _grouping(s: RankSizes, group: str, members: int, out: int) -> Iterator[OpCase]:
    n, k, r = s.tokens, s.width, s.rank

    def grouped(m: Maker, ops: Any) -> Callable[[], object]:
        x, (a,), h = m.normal(n, k), m.weights(1, members * r, k), m.out(n, members * r)
        z, b = m.normal(n * members * r), m.weights(members, out, r)

        def run() -> object:
            ops.down_projection(x, a, h)
            return ops.up_projection(z, b)

        return run

    def ungrouped(m: Maker, ops: Any) -> Callable[[], object]:
        x, each_a = m.normal(n, k), m.weights(members, r, k)
        each_h = [m.out(n, r) for _ in range(members)]
        each_z = [m.normal(n * r) for _ in range(members)]
        each_b = m.weights(members, out, r)

        def run() -> object:
            for a, h in zip(each_a, each_h, strict=True):
                ops.down_projection(x, a, h)
            return [ops.up_projection(z, [b]) for z, b in zip(each_z, each_b, strict=True)]

        return run

    flop = 2 * n * members * r * (k + out)
    for form, build in (("grouped", grouped), ("ungrouped", ungrouped)):
        yield OpCase(key=f"{group}_{form}", op="grouping", build=build, flop=flop)
