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

from benchmarks.command import begin, benchmark_parser, publish
from benchmarks.harness import Step, merged
from benchmarks.models import race
from benchmarks.report import Report
from benchmarks.variants import FULL_SIZES, guards, half_depth, strategies
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
    for tp, variants in ((args.tp, contest), (1, guards())):
        print(f"TP {tp}: {'; '.join(variant.title for variant in variants)}", flush=True)
        by_rank = run_on_ranks(race, tp, args.device, variants, sizes, args.dtype, args.steps)
        recorded += merged(by_rank)
    report = Report(
        settings=settings,
        machine=machine,
        variants=[*contest, *guards()],
        tokens=sizes.tokens,
        targets_apply=(sizes, args.tp, args.dtype, args.device) == (FULL_SIZES, 2, "fp32", "cpu"),
        steps=recorded,
    )
    publish("iteration", report, args)


if __name__ == "__main__":
    run_tool(main)
