"""How much faster is a training iteration with BTP than full-rank and vanilla low-rank?

`make bench` runs this. It starts its own ranks, races all strategies in one run, checks in the same
run that the baselines are no straw men, prints a table and leaves it, with the hardware, the commit
and every single step, in benchmarks/results. README.md says how it is measured.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

# Run from a checkout, the package may not be installed.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from torch import distributed

from benchmarks.attention_calls import of_an_iteration
from benchmarks.command import begin, benchmark_parser, publish
from benchmarks.harness import Step, merged
from benchmarks.models import race
from benchmarks.op_cases import RankSizes
from benchmarks.report import Report
from benchmarks.variants import (
    DTYPES,
    FULL_SIZES,
    Sizes,
    Variant,
    guards,
    half_depth,
    strategies,
)
from megatron.boost.command_line import run_tool
from megatron.boost.ranks import run_on_ranks


def main(argv: Sequence[str] | None) -> None:
    """Run the benchmark with `argv`, or the command line when it is None.

    Raises:
        ValueError: for a device that is not there, and sizes that TP does not divide.
    """
    parser = benchmark_parser(
        "Time one training iteration of BTP and its baselines against each other.", steps=10
    )
    args = parser.parse_args(argv)
    sizes, machine, settings = begin(args)
    contest = [v for whole in strategies(args.tp) for v in (whole, half_depth(whole))]
    recorded: list[Step] = []
    for tp, variants, run in (
        (args.tp, contest, race_with_attention),
        (1, guards(), race),
    ):
        print(f"TP {tp}: {'; '.join(variant.title for variant in variants)}", flush=True)
        by_rank = run_on_ranks(run, tp, args.device, variants, sizes, args.dtype, args.steps)
        recorded += merged(by_rank)
    report = Report(
        settings=settings,
        machine=machine,
        variants=[*contest, *guards()],
        sizes=sizes,
        tp=args.tp,
        targets_apply=(sizes, args.tp, args.dtype, args.device) == (FULL_SIZES, 2, "fp32", "cpu"),
        steps=recorded,
    )
    publish("iteration", report, args)


def race_with_attention(
    device: torch.device,
    variants: Sequence[Variant],
    sizes: Sizes,
    dtype: str,
    rounds: int,
) -> list[Step]:
    """As `race`, and in its rounds the attention of all layers alone, which is the same for every
    strategy, and a large product."""
    of_rank = RankSizes.of(sizes, distributed.get_world_size())
    alone = of_an_iteration(of_rank, sizes.layers, DTYPES[dtype], device)
    return race(device, variants, sizes, dtype, rounds, alone)


if __name__ == "__main__":
    run_tool(main)
