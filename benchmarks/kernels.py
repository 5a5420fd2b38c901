"""How much faster is each op of csrc than its PyTorch reference, on the CPU?

Races them op by op at the sizes of one rank of `iteration.py`'s model, in one process, and sets the
memory-bound ones beside a copy of as many bytes. README.md says how it is measured, op_cases.py
what an op must move at least.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

# Run from a checkout, the package may not be installed.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.command import begin, benchmark_parser, publish
from benchmarks.harness import Step, summarise
from benchmarks.op_cases import OpCase, RankSizes, implementation, op_cases, rate
from benchmarks.op_race import CONTESTANTS, COPY, MEMORY_COPY, memory_copy, race_ops, variant_key
from benchmarks.report import (
    flat_provenance,
    number,
    provenance,
    ratio_of_keys,
    steps_csv,
    table,
)
from benchmarks.variants import DTYPES
from megatron.boost.command_line import run_tool, whole_number
from megatron.boost.ranks import run_on_ranks


@dataclass(frozen=True, kw_only=True)
class KernelReport:
    """One run of the benchmark."""

    settings: Mapping[str, object]
    machine: Mapping[str, str]
    cases: Sequence[OpCase]
    memory_copy_bytes: int
    steps: Sequence[Step]

    def flat(self) -> dict[str, object]:
        """Everything under flat keys with their units; None is what was not measured."""
        result: dict[str, object] = {"copy_gb_per_second": self._memory_gb_per_second()}
        for case in self.cases:
            faster = ratio_of_keys(self.steps, *self._keys(case, "reference", "csrc"))
            result |= {
                f"{case.key}_reference_over_csrc": faster.value,
                f"{case.key}_reference_over_csrc_p20": faster.p20,
                f"{case.key}_reference_over_csrc_p80": faster.p80,
            }
            for name in CONTESTANTS:
                key = variant_key(case, name)
                summary = summarise(self.steps, key)
                result |= {
                    f"{key}_ms": summary.median_ms,
                    f"{key}_p20_ms": summary.p20_ms,
                    f"{key}_p80_ms": summary.p80_ms,
                    f"{key}_dropped_steps": summary.dropped,
                }
                if case.moved_bytes:
                    share = ratio_of_keys(self.steps, *self._keys(case, COPY, name))
                    result[f"{key}_gb_per_second"] = rate(case.moved_bytes, summary.median_ms)
                    result[f"{key}_share_of_copy"] = share.value
                else:
                    result[f"{key}_gflop_per_second"] = rate(case.flop, summary.median_ms)
        return result | flat_provenance(self.settings, self.machine)

    def markdown(self) -> str:
        """The result for people, as a Markdown page."""
        times = ["csrc ms", "p20", "p80", "reference ms", "p20", "p80"]
        times += ["reference/csrc", "p20", "p80"]
        sections = [
            "# The ops of csrc against their PyTorch reference",
            f"Copy of {self.memory_copy_bytes / 2**20:g} MiB, read and written together, GB/s: "
            f"{number(self._memory_gb_per_second(), '.1f')}.",
            table(
                ["bound by memory", *times, "csrc GB/s", "share of a copy", "reference's share"],
                (self._cells(case) for case in self.cases if case.moved_bytes),
            ),
            table(
                ["GEMMs", *times, "csrc GFLOP/s", "reference GFLOP/s"],
                (self._cells(case) for case in self.cases if case.flop),
            ),
            "GB/s: of the bytes that must be moved at least (benchmarks/op_cases.py). share of a "
            "copy: the time of a copy that moves as many bytes over the op's. How it is measured: "
            "benchmarks/README.md.",
            *provenance(self.settings, self.machine),
        ]
        return "\n\n".join(sections) + "\n"

    def csv(self) -> str:
        """Every recorded step, one a line, with whether it counts."""
        return steps_csv(self.steps)

    def _memory_gb_per_second(self) -> float | None:
        return rate(self.memory_copy_bytes, summarise(self.steps, MEMORY_COPY).median_ms)

    def _keys(self, case: OpCase, *names: str) -> Iterable[str]:
        return (variant_key(case, name) for name in names)

    def _cells(self, case: OpCase) -> list[str]:
        summaries = [summarise(self.steps, key) for key in self._keys(case, *CONTESTANTS)]
        faster = ratio_of_keys(self.steps, *self._keys(case, "reference", "csrc"))
        cells = [case.key]
        for summary in summaries:
            cells += [number(summary.median_ms, ".3f")]
            cells += [number(summary.p20_ms, ".3f"), number(summary.p80_ms, ".3f")]
        cells += [number(value, ".2f") for value in (faster.value, faster.p20, faster.p80)]
        if case.flop:
            return cells + [number(rate(case.flop, each.median_ms), ".1f") for each in summaries]
        shares = [
            ratio_of_keys(self.steps, *self._keys(case, COPY, name)).value for name in CONTESTANTS
        ]
        cells += [number(rate(case.moved_bytes, summaries[0].median_ms), ".1f")]
        return cells + [number(share, ".2f") for share in shares]


def main(argv: Sequence[str] | None) -> None:
    """Run the benchmark with `argv`, or the command line when it is None.

    Raises:
        ValueError: for sizes that TP does not divide, and where csrc is not built.
    """
    parser = benchmark_parser(
        "Race each op of csrc against its PyTorch reference.", steps=30, on_cuda=False
    )
    parser.add_argument("--threads", type=whole_number(1), default=1, help="(%(default)s)")
    args = parser.parse_args(argv)
    sizes, machine, settings = begin(args)
    implementation("csrc", args.device)
    settings |= {
        "device": f"cpu, one rank of TP {args.tp}, threads: {args.threads}",
        "threads": args.threads,
    }
    (steps,) = run_on_ranks(
        race_ops,
        1,
        args.device,
        sizes,
        args.tp,
        args.dtype,
        args.steps,
        args.quick,
        threads=args.threads,
    )
    report = KernelReport(
        settings=settings,
        machine=machine,
        cases=op_cases(RankSizes.of(sizes, args.tp), DTYPES[args.dtype], args.device),
        memory_copy_bytes=memory_copy(args.quick).moved_bytes,
        steps=steps,
    )
    publish("kernels", report, args)


if __name__ == "__main__":
    run_tool(main)
