"""Builds the extension for CUDA, tests it and times everything, on a machine with one GPU.

    python benchmarks/gpu/run.py [--json FILE] [--only STEP …] [--skip-build]

Each step that measures has a process of its own, so that it takes the extension just built, and
that a kernel's fault does not reach the next. benchmarks/README.md says what the steps are.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

# Run from a checkout, the package may not be installed.
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
from torch.multiprocessing.spawn import ProcessException

from benchmarks.command import REPOSITORY, RESULTS, leave
from benchmarks.gpu import extension
from benchmarks.gpu.plan import TP, WHOLE_LAYERS, Measured, Plan
from benchmarks.gpu.report import GpuReport
from benchmarks.gpu.steps import MEASURING, extension_in_use, measure, sections
from megatron.boost.command_line import ToolParser, run_tool, whole_number, write_text
from megatron.boost.machine import describe_machine
from megatron.boost.ranks import run_on_ranks

STEPS = ("build", "tests", *MEASURING)
_REPEATS, _QUICK_REPEATS = 50, 2
_NO_COUNTS = dict.fromkeys(("tests_passed", "tests_failed", "tests_skipped"))


class Run:
    """The steps of one run, and how they went."""

    def __init__(self, plan: Plan):
        self.plan = plan
        self.outcomes = dict.fromkeys(STEPS, "not run")
        self.counts: dict[str, object] = dict(_NO_COUNTS)
        self.found: dict[str, Measured] = {}

    def take(self, step: str) -> None:
        """Do one step; its failure is an outcome, and the next can do without it."""
        print(f"{step}:", flush=True)
        try:
            self.outcomes[step] = self._done(step)
        except (OSError, ProcessException) as error:
            print(error, flush=True)
            self.outcomes[step] = f"failed: {_last_line(error)}"

    def failed(self) -> list[str]:
        """Steps that failed in whole or in part."""
        return [step for step, outcome in self.outcomes.items() if outcome.startswith("failed")]

    def failures(self) -> dict[str, str]:
        """Figures that are missing because of an error."""
        return {k: why for found in self.found.values() for k, why in found.failures.items()}

    def _done(self, step: str) -> str:
        if step == "build":
            return extension.build(self.plan.device)
        if step == "tests":
            counts = extension.run_tests()
            self.counts |= counts
            said = ", ".join(f"{n} {name.removeprefix('tests_')}" for name, n in counts.items())
            return f"failed: {said}" if counts["tests_failed"] else said
        (found,) = run_on_ranks(
            measure, 1, self.plan.device, step, self.plan, init_process_group=False
        )
        self.found[step] = found
        if found.failures:
            return f"failed: {len(found.failures)} figures"
        return "measured" if found.times or found.facts else "not measured"


def main(argv: Sequence[str] | None) -> None:
    """Run with `argv`, or the command line when it is None.

    Raises:
        ValueError: without a GPU, after a result that says so has been written.
        OSError: if a step failed, after the others' results have been written.
    """
    args = _parser().parse_args(argv)
    plan = Plan(
        device=args.device,
        quick=args.quick,
        repeats=args.repeats or (_QUICK_REPEATS if args.quick else _REPEATS),
    )
    steps = args.only or (STEPS if args.device == "cuda" else MEASURING)
    steps = [step for step in STEPS if step in steps and not (step == "build" and args.skip_build)]
    missing = _missing(steps) if args.device == "cuda" else None
    run = Run(plan)
    if missing is None:
        for step in steps:
            run.take(step)
    report = GpuReport(
        missing=missing,
        outcomes=run.outcomes,
        sections=sections(plan, run.found),
        failures=run.failures(),
        counts=run.counts,
        settings=_settings(plan),
        machine=describe_machine(REPOSITORY)
        | _describe_gpu(args.device)
        | {"extension": extension_in_use()},
    )
    _publish(report, args)
    if missing is not None:
        message = f"nothing was measured: {missing}"
        if not args.allow_missing_gpu:
            raise ValueError(message)
        print(message)
    if run.failed():
        raise OSError(f"failed: {', '.join(run.failed())} (see the result)")


def _parser() -> ToolParser:
    parser = ToolParser("Build csrc for CUDA, test it and time everything, on one GPU.")
    parser.add_argument(
        "--only", nargs="+", choices=STEPS, metavar="STEP", help=f"of {', '.join(STEPS)}"
    )
    parser.add_argument("--skip-build", action="store_true", help="take the extension as it is")
    parser.add_argument(
        "--device",
        choices=("cuda", "cpu"),
        default="cuda",
        help="(%(default)s; cpu: to see that everything runs, without build and tests)",
    )
    parser.add_argument("--quick", action="store_true", help="tiny sizes")
    parser.add_argument(
        "--repeats",
        type=whole_number(1),
        help=f"of each measurement ({_REPEATS}; quick: {_QUICK_REPEATS})",
    )
    parser.add_argument(
        "--results",
        type=Path,
        metavar="DIR",
        help="for the page and its figures (benchmarks/results; quick: nowhere)",
    )
    parser.add_argument(
        "--allow-missing-gpu",
        action="store_true",
        help='without a GPU, exit with 0: the result says "not measured"',
    )
    return parser


def _missing(steps: Sequence[str]) -> str | None:
    """What a machine without a GPU lacks for this; None where there is a GPU."""
    if torch.cuda.is_available():
        return None
    lacking = [
        f"torch {torch.__version__} is a build without CUDA"
        if torch.version.cuda is None
        else f"torch {torch.__version__} finds no GPU"
    ]
    if shutil.which("nvidia-smi") is None:
        lacking.append("there is no NVIDIA driver (nvidia-smi)")
    if "build" in steps and shutil.which("nvcc") is None:
        lacking.append("nvcc is not on the PATH")
    return ", ".join(lacking)


def _settings(plan: Plan) -> dict[str, object]:
    model = asdict(plan.models[0])
    del model["micro_batch"]
    return {
        "device": plan.device,
        "quick": plan.quick,
        "repeats": plan.repeats,
        "tp": TP,
        "dtype": "bf16",
        **model,
        "micro_batches": ", ".join(f"{sizes.micro_batch}" for sizes in plan.models),
        "whole_layers": WHOLE_LAYERS,
    }


def _describe_gpu(device: str) -> dict[str, str]:
    """What the results of a GPU depend on besides the machine around it."""
    if device != "cuda" or not torch.cuda.is_available():
        return {"gpu": "none", "driver": "none", "cuda": torch.version.cuda or "none"}
    gpu = torch.cuda.get_device_properties(0)
    return {
        "gpu": f"{gpu.name}, sm_{gpu.major}{gpu.minor}, {gpu.total_memory / 2**30:.0f} GiB",
        "driver": _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"),
        "cuda": torch.version.cuda or "none",
        "nvcc": _output("nvcc", "--version"),
    }


def _output(*command: str) -> str:
    """The last line that a program prints."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return _last_line(done.stdout)


def _last_line(text: object) -> str:
    """A traceback's message, too."""
    lines = str(text).strip().splitlines()
    return lines[-1] if lines else type(text).__name__


def _publish(report: GpuReport, args: Namespace) -> None:
    args.results = args.results or (None if args.quick else RESULTS)
    if report.missing is None:
        print(f"\n{report.markdown()}")
    leave("gpu", report.machine, {".md": report.markdown(), ".json": report.json()}, args)
    if args.json is not None:
        write_text(args.json, report.json())


if __name__ == "__main__":
    run_tool(main)
