"""The command line that the benchmarks share, and what a result says of how it was made."""

from __future__ import annotations

import os
import signal
from argparse import Namespace
from collections.abc import Mapping
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Protocol

import torch

from benchmarks.report import write_new
from benchmarks.variants import FULL_SIZES, QUICK_SIZES, Sizes
from megatron.boost.command_line import ToolParser, whole_number, write_json
from megatron.boost.machine import describe_machine

REPOSITORY = Path(__file__).resolve().parent.parent
RESULTS = REPOSITORY / "benchmarks" / "results"
_QUICK_STEPS = 2


class Result(Protocol):
    """What a benchmark found, in the three forms it is published in."""

    @property
    def machine(self) -> Mapping[str, str]:
        """Where it was measured, with the commit."""

    def markdown(self) -> str:
        """For people."""

    def csv(self) -> str:
        """Every recorded step."""

    def flat(self) -> dict[str, object]:
        """Flat keys with units in their names."""


def benchmark_parser(description: str, *, steps: int, on_cuda: bool = True) -> ToolParser:
    """The flags that the benchmarks share; `steps` of each variant are taken by default, and with
    `on_cuda` there is a choice of device."""
    parser = ToolParser(description)
    parser.add_argument("--tp", type=whole_number(1), default=2, help="ranks (%(default)s)")
    parser.set_defaults(full_steps=steps)
    parser.add_argument(
        "--steps", type=whole_number(1), help=f"of each variant ({steps}; quick: {_QUICK_STEPS})"
    )
    parser.add_argument("--dtype", choices=("fp32", "bf16"), default="fp32", help="(%(default)s)")
    parser.set_defaults(device="cpu")
    if on_cuda:
        parser.add_argument("--device", choices=("cpu", "cuda"), help="(%(default)s)")
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


def begin(args: Namespace) -> tuple[Sizes, dict[str, str], dict[str, object]]:
    """The model's sizes, the machine, and what else a result says it was measured with. Settles
    `args.steps` and `args.results` where they were left open.

    Raises:
        ValueError: for a TP size that does not divide the model, and for GPUs that are not there.
    """
    sizes = QUICK_SIZES if args.quick else FULL_SIZES
    _refuse_impossible(args.tp, args.device, sizes)
    args.steps = args.steps or (_QUICK_STEPS if args.quick else args.full_steps)
    args.results = args.results or (None if args.quick else RESULTS)
    # Closing the terminal, or `kill`, must end the ranks as Ctrl-C does.
    for ending in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(ending, signal.default_int_handler)
    settings = {
        "tp": args.tp,
        "dtype": args.dtype,
        "device": _described_device(args.device, args.tp),
        "cuda": "measured" if args.device == "cuda" else "not measured",
        **asdict(sizes),
        "load_average_before": round(os.getloadavg()[0], 2),
    }
    return sizes, describe_machine(REPOSITORY), settings


def publish(name: str, result: Result, args: Namespace) -> None:
    """Print the result and write it where `args` say: a page and the steps under new names in
    `args.results`, flat keys to `args.json`."""
    print(f"\n{result.markdown()}")
    leave(name, result.machine, {".md": result.markdown(), ".csv": result.csv()}, args)
    if args.json is not None:
        write_json(args.json, result.flat())


def leave(
    name: str, machine: Mapping[str, str], contents: Mapping[str, str], args: Namespace
) -> None:
    """Write `contents`, text by suffix, under new names in `args.results`, if that is a folder."""
    if args.results is not None:
        stem = f"{name}-{datetime.now(UTC):%Y%m%d-%H%M%S}-{machine['commit']}"
        for path in write_new(args.results, stem, contents):
            print(f"written: {os.path.relpath(path)}")


def _refuse_impossible(tp: int, device: str, sizes: Sizes) -> None:
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


def _described_device(device: str, tp: int) -> str:
    if device == "cuda":
        return f"{tp} × {torch.cuda.get_device_name(0)}, NCCL"
    return "cpu, gloo over the loopback, one thread a rank"
