"""What does a layer keep for backward, and what does it cost to keep less?

Compares checkpointing at the latents and its options with Megatron's full recomputation, for BTP
and the baselines: MiB kept per layer on a rank, the iteration's time beside that of the same
strategy without, and the collectives that are issued again. README.md says how it is measured.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

# Run from a checkout, the package may not be installed.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.command import begin, benchmark_parser, publish
from benchmarks.harness import Step, merged, summarise
from benchmarks.models import race_with_memory
from benchmarks.report import (
    Ratio,
    flat_provenance,
    number,
    provenance,
    ratio,
    steps_csv,
    table,
)
from benchmarks.variants import CHECKPOINTED, FULL_SIZES, Variant
from megatron.boost.command_line import run_tool
from megatron.boost.ranks import run_on_ranks

TARGETS = {"btp_latent": 22.5, "btp_latent_residual": 18.5}
"""MiB per layer at the full sizes in fp32, TP 2."""
TIME_TARGET = 1.16
"""Of `btp_latent` over `btp`, there too."""


@dataclass(frozen=True, kw_only=True)
class MemoryReport:
    """One run of the benchmark."""

    settings: Mapping[str, object]
    machine: Mapping[str, str]
    steps: Sequence[Step]
    kept_mib: Mapping[str, float]
    """Per layer, of the rank that keeps most."""
    again: Mapping[str, float]
    """Collectives issued again per layer."""
    targets_apply: bool

    def rows(self) -> Iterable[tuple[Variant, Variant, Ratio]]:
        """Every variant, the same strategy that keeps everything, and the ratio of their times."""
        for plain, variants in CHECKPOINTED.items():
            for variant in (plain, *variants):
                yield variant, plain, ratio(self.steps, [variant], plain)

    def flat(self) -> dict[str, object]:
        """Everything under flat keys with their units."""
        result: dict[str, object] = {}
        for variant, plain, time in self.rows():
            key = variant.key
            result[f"{key}_kept_mib_per_layer"] = self.kept_mib[key]
            result[f"{key}_ms"] = summarise(self.steps, key).median_ms
            result[f"{key}_recompute_collective_calls_per_layer"] = self.again[key]
            if variant is not plain:
                result[f"{key}_time_over_{plain.key}"] = time.value
        return result | flat_provenance(self.settings, self.machine)

    def markdown(self) -> str:
        """The result for people, as a Markdown page."""
        head = ["", "MiB kept per layer", "target", "ms", "time", "p20", "p80", "target"]
        head += ["saved MiB per added ms", "collectives again"]
        sections = [
            "# What a layer keeps for backward, and what keeping less costs",
            table(head, self._cells()),
            "time: over the same strategy without recomputation. saved MiB per added ms: of all "
            "layers. How it is measured: benchmarks/README.md.",
            *provenance(self.settings, self.machine),
        ]
        return "\n\n".join(sections) + "\n"

    def csv(self) -> str:
        """Every recorded step, one a line, with whether it counts."""
        return steps_csv(self.steps)

    def _cells(self) -> Iterable[list[str]]:
        for variant, plain, time in self.rows():
            key = variant.key
            target = TARGETS.get(key) if self.targets_apply else None
            judged = self.targets_apply and key == "btp_latent"
            times = [summarise(self.steps, each.key).median_ms for each in (variant, plain)]
            saved = (self.kept_mib[plain.key] - self.kept_mib[key]) * int(
                str(self.settings["layers"])
            )
            efficiency = ""
            if variant is not plain and times[0] is not None and times[1] is not None:
                added = times[0] - times[1]
                efficiency = f"{saved / added:.2f}" if added > 0 else "no time added"
            yield [
                variant.title,
                f"{self.kept_mib[key]:.1f}",
                f"at most {target:g}" if target else "",
                number(times[0], ".0f"),
                number(time.value, ".2f"),
                number(time.p20, ".2f"),
                number(time.p80, ".2f"),
                f"at most {TIME_TARGET:g}" if judged else "",
                efficiency,
                f"{self.again[key]:g}",
            ]


def main(argv: Sequence[str] | None) -> None:
    """Run the benchmark with `argv`, or the command line when it is None.

    Raises:
        ValueError: for a device that is not there, and sizes that TP does not divide.
    """
    parser = benchmark_parser(
        "Measure what a layer keeps for backward, and what it costs to keep less.", steps=8
    )
    args = parser.parse_args(argv)
    sizes, machine, settings = begin(args)
    variants = [each for plain, others in CHECKPOINTED.items() for each in (plain, *others)]
    by_rank = run_on_ranks(
        race_with_memory, args.tp, args.device, variants, sizes, args.dtype, args.steps
    )
    report = MemoryReport(
        settings=settings,
        machine=machine,
        steps=merged([of_rank for of_rank, _, _ in by_rank]),
        kept_mib={v.key: max(kept[v.key] for _, kept, _ in by_rank) for v in variants},
        again=by_rank[0][2],
        targets_apply=(sizes, args.tp, args.dtype, args.device) == (FULL_SIZES, 2, "fp32", "cpu"),
    )
    publish("memory", report, args)


if __name__ == "__main__":
    run_tool(main)
