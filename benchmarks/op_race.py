"""Races each op of csrc against its PyTorch reference, on one rank.

Case by case, the implementations take turns as in `harness.py`, each with tensors of its own but of
the same numbers, and once a step. What an op changes is given its old contents before every step,
outside the time. Ops that are a matter of bytes are joined by a copy that moves as many: it finds
its bytes in the same caches, so that it is the measure of what memory gives at that size.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

import torch

from benchmarks.harness import Step, measure
from benchmarks.op_cases import OpCase, Prepared, RankSizes, copy_case, implementation, op_cases
from benchmarks.variants import DTYPES, Sizes

CONTESTANTS = ("csrc", "reference")
COPY = "copy"
MEMORY_COPY = "memory_copy"
"""The variant that copies more than caches hold."""


def variant_key(case: OpCase, contestant: str) -> str:
    """The key of an implementation's steps."""
    return f"{case.key}_{contestant}"


def memory_copy(quick: bool) -> OpCase:
    """512 MiB read and written in all."""
    return copy_case(2**16 if quick else 2**29)


def race_ops(
    device: torch.device, sizes: Sizes, tp: int, dtype: str, rounds: int, quick: bool
) -> list[Step]:
    """Run on a rank: `rounds` rounds of every op as one rank of `tp` calls it, and of copies.

    Returns:
        The steps, under the keys of `variant_key`.

    Raises:
        ValueError: if csrc is not there.
    """
    cases = op_cases(RankSizes.of(sizes, tp), DTYPES[dtype], device.type)
    modules = {name: implementation(name, device.type) for name in CONTESTANTS}
    with torch.no_grad():
        copy = memory_copy(quick).prepare(device, torch.float32, modules["reference"])
        # Enlarges the heap, once for all: each time takes half as much again.
        recorded = measure({MEMORY_COPY: copy.run}, rounds, device, _ignore)
        del copy
        for number, case in enumerate(cases, start=1):
            prepared = {
                variant_key(case, name): case.prepare(device, DTYPES[dtype], module)
                for name, module in modules.items()
            }
            if case.moved_bytes:
                copy = copy_case(case.moved_bytes).prepare(device, torch.float32, modules["csrc"])
                prepared[variant_key(case, COPY)] = copy
            recorded += measure(
                {key: each.run for key, each in prepared.items()},
                rounds,
                device,
                partial(_print_first_round, f"  {number} of {len(cases)}: {case.key}"),
                prepare=partial(_refresh, prepared),
                enlarge=False,
            )
    return recorded


def _refresh(prepared: Mapping[str, Prepared], key: str) -> None:
    prepared[key].refresh()


def _ignore(steps: Sequence[Step]) -> None:
    pass


def _print_first_round(line: str, steps: Sequence[Step]) -> None:
    if steps[0].round_number == 0:
        print(line, flush=True)
