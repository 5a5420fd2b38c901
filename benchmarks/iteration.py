"""How much faster is a training iteration with BTP than full-rank and vanilla low-rank?

`make bench` runs this. It starts its own ranks, races all strategies in one run, checks in the same
run that the baselines are no straw men, prints a table and leaves it, with the hardware, the commit
and every single step, in benchmarks/results. README.md says how it is measured.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path

# Run from a checkout, the package may not be installed.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

from benchmarks.harness import Step, merged
from benchmarks.models import race
from benchmarks.ranks import run_on_ranks
from benchmarks.report import Report, write_new
from benchmarks.variants import FULL_SIZES, GUARDS, QUICK_SIZES, Sizes, strategies
from megatron.boost.command_line import ToolParser, run_tool, whole_number, write_json
from megatron.boost.machine import describe_machine

REPOSITORY = Path(__file__).resolve().parent.parent
RESULTS = REPOSITORY / "benchmarks" / "results"
_STEPS, _QUICK_STEPS = 10, 2


def main(argv: Sequence[str] | None) -> None:
    """Run the benchmark with `argv`, or the command line when it is None.

    Raises:
        ValueError: for a device that is not there, and sizes that TP does not divide.
    """
    parser = benchmark_parser(
        "Time one training iteration of BTP and its baselines against each other.",
        _STEPS,
        _QUICK_STEPS,
    )
    args = parser.parse_args(argv)
    sizes = QUICK_SIZES if args.quick else FULL_SIZES
    steps = args.steps or (_QUICK_STEPS if args.quick else _STEPS)
    results = args.results or (None if args.quick else RESULTS)
    refuse_impossible(args.tp, args.device, sizes)
    end_ranks_on_signals()

    contest, guards = strategies(args.tp), [variant for pair in GUARDS for variant in pair]
    machine = describe_machine(REPOSITORY)
    settings = {
        "tp": args.tp,
        "dtype": args.dtype,
        "device": described_device(args.device, args.tp),
        "cuda": "measured" if args.device == "cuda" else "not measured",
        **asdict(sizes),
        "load_average_before": round(os.getloadavg()[0], 2),
    }
    recorded: list[Step] = []
    for tp, variants in ((args.tp, contest), (1, guards)):
        print(f"TP {tp}: {'; '.join(variant.title for variant in variants)}", flush=True)
        by_rank = run_on_ranks(race, tp, args.device, variants, sizes, args.dtype, steps)
        recorded += merged(by_rank)
    report = Report(
        settings=settings,
        machine=machine,
        variants=[*contest, *guards],
        tokens=sizes.tokens,
        targets_apply=(sizes, args.tp, args.dtype, args.device) == (FULL_SIZES, 2, "fp32", "cpu"),
        steps=recorded,
    )
    print(f"\n{report.markdown()}")
    if results is not None:
        stem = f"iteration-{datetime.now(UTC):%Y%m%d-%H%M%S}-{machine['commit']}"
        for path in write_new(results, stem, {".md": report.markdown(), ".csv": report.csv()}):
            print(f"written: {os.path.relpath(path)}")
    if args.json is not None:
        write_json(args.json, report.flat())


def benchmark_parser(description: str, steps: int, quick_steps: int) -> ToolParser:
    """The flags that the benchmarks share."""
    parser = ToolParser(description)
    parser.add_argument("--tp", type=whole_number(1), default=2, help="ranks (%(default)s)")
    parser.add_argument(
        "--steps", type=whole_number(1), help=f"of each variant ({steps}; quick: {quick_steps})"
    )
    parser.add_argument("--dtype", choices=("fp32", "bf16"), default="fp32", help="(%(default)s)")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="(%(default)s)")
    parser.add_argument(
        "--quick", action="store_true", help="a tiny model, to see that everything runs"
    )
    parser.add_argument(
        "--results",
        type=Path,
        metavar="DIR",
        help="for the table and the steps (benchmarks/results; quick: nowhere)",
    )
    return parser


def end_ranks_on_signals() -> None:
    """Make closing the terminal, and `kill`, end the ranks as Ctrl-C does."""
    for ending in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(ending, signal.default_int_handler)


def refuse_impossible(tp: int, device: str, sizes: Sizes) -> None:
    """Raise ValueError for a TP size that does not divide the model, and for GPUs that are not
    there."""
    legal = [ranks for ranks in range(1, sizes.heads + 1) if sizes.divisible_by(ranks)]
    if tp not in legal:
        nearest = min(legal, key=lambda ranks: abs(ranks - tp))
        raise ValueError(
            f"--tp {tp}: does not divide every size of the model; nearest legal value: {nearest}"
        )
    if device == "cuda" and torch.cuda.device_count() < tp:
        raise ValueError(
            f"--device cuda: --tp {tp} needs as many GPUs, and there are "
            f"{torch.cuda.device_count()}; nearest legal value: cpu"
        )


def described_device(device: str, tp: int) -> str:
    """The device in words, for a result."""
    if device == "cuda":
        return f"{tp} × {torch.cuda.get_device_name(0)}, NCCL"
    return "cpu, gloo over the loopback, one thread a rank"


if __name__ == "__main__":
    run_tool(main)
