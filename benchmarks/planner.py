"""Does the planner predict what `iteration.py` measures on this machine?

In one run it calibrates the planner, with as many ranks at the same time as the layouts have, races
the strategies of `iteration.py` and our layers on one rank, and sets the predicted times beside the
measured ones. README.md says how it is measured.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

# Run from a checkout, the package may not be installed.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.command import begin, benchmark_parser, publish
from benchmarks.harness import Step, merged, summarise
from benchmarks.models import race
from benchmarks.report import flat_provenance, number, provenance, steps_csv, table
from benchmarks.variants import DTYPES, Sizes, Variant, guards, strategies
from megatron.boost.accounting.sizes import Layout, Model
from megatron.boost.command_line import run_tool
from megatron.boost.planner.calibration import Calibration, calibrate
from megatron.boost.planner.cluster import Cluster, load_cluster
from megatron.boost.planner.implementation import BOOST
from megatron.boost.planner.iteration import Estimate, estimate
from megatron.boost.planner.sweep import QUICK_SWEEP
from megatron.boost.ranks import run_on_ranks

LIMIT = 0.15
"""How far a prediction may be from the measured time, relatively."""
PRESET = "cpu"
BENCHMARK = replace(
    BOOST, name="boost, without Megatron's gradient buffers", gradient_buffers=False
)


@dataclass(frozen=True)
class Case:
    """A variant on so many ranks."""

    variant: Variant
    tp: int


def cases_of(tp: int) -> list[Case]:
    """The strategies at that TP size and our layers on one rank."""
    alone = [Case(variant, 1) for variant in guards() if variant.layers is not None]
    return [*(Case(variant, tp) for variant in strategies(tp)), *alone]


def planned(case: Case, sizes: Sizes, dtype: str) -> tuple[Model, Layout]:
    """What `models.Iteration` computes, as the planner takes it."""
    assert case.variant.layers is not None
    model = Model(
        hidden_size=sizes.hidden,
        ffn_hidden_size=sizes.ffn,
        num_attention_heads=sizes.heads,
        num_query_groups=sizes.heads,
        kv_channels=sizes.hidden // sizes.heads,
        num_layers=sizes.layers,
        vocab_size=sizes.vocabulary,
        padded_vocab_size=sizes.vocabulary,
        tied=False,
        low_rank=replace(case.variant.layers, rank=sizes.rank),
    )
    layout = Layout(
        sequence_length=sizes.sequence,
        micro_batch_size=sizes.micro_batch,
        tensor_parallel=case.tp,
        sequence_parallel=case.variant.sequence_parallel and case.tp > 1,
        dtype=DTYPES[dtype],
    )
    return model, layout


def predicted(case: Case, sizes: Sizes, dtype: str, cluster: Cluster) -> Estimate:
    """The planner's time of one iteration of `models.Iteration`."""
    model, layout = planned(case, sizes, dtype)
    return estimate(model, layout, cluster, implementation=BENCHMARK, optimiser=False)


@dataclass(frozen=True, kw_only=True)
class PlannerReport:
    """One run of the benchmark."""

    settings: Mapping[str, object]
    machine: Mapping[str, str]
    cases: Sequence[Case]
    estimates: Mapping[str, Estimate]
    """By variant, of this run's calibration with as many ranks."""
    of_preset: Mapping[str, Estimate]
    """By variant, of the preset `cpu`; empty on CUDA."""
    clusters: Mapping[str, Cluster]
    steps: Sequence[Step]

    def error(self, case: Case, estimates: Mapping[str, Estimate]) -> float | None:
        """Predicted over measured, less one; None where one is missing."""
        measured = summarise(self.steps, case.variant.key).median_ms
        if measured is None or case.variant.key not in estimates:
            return None
        return estimates[case.variant.key].seconds * 1000.0 / measured - 1

    def flat(self) -> dict[str, object]:
        """Everything under flat keys with their units; None is what was not measured."""
        result: dict[str, object] = {}
        for case in self.cases:
            key = case.variant.key
            result[f"{key}_ms"] = summarise(self.steps, key).median_ms
            for name, estimates in (("predicted", self.estimates), ("preset", self.of_preset)):
                found, error = estimates.get(key), self.error(case, estimates)
                result[f"{key}_{name}_ms"] = found.seconds * 1000.0 if found else None
                result[f"{key}_{name}_error_percent"] = None if error is None else error * 100.0
        for name, estimates in (("predicted", self.estimates), ("preset", self.of_preset)):
            errors = [self.error(case, estimates) for case in self.cases]
            known = [abs(error) for error in errors if error is not None]
            result[f"{name}_worst_error_percent"] = 100.0 * max(known) if known else None
        for name, cluster in self.clusters.items():
            result |= {f"{name}_{field}": value for field, value in fields_of(cluster).items()}
        return result | flat_provenance(self.settings, self.machine)

    def markdown(self) -> str:
        """The result for people, as a Markdown page."""
        parts = list(next(iter(self.estimates.values())).parts())
        spent = [part for part in parts if any(e.parts()[part] for e in self.estimates.values())]
        names = list(self.clusters)
        values = {name: fields_of(cluster) for name, cluster in self.clusters.items()}
        every = dict.fromkeys(field for found in values.values() for field in found)
        sections = [
            "# One training iteration: predicted and measured",
            table(
                ["", "measured ms", "p20", "p80", "predicted ms", "error", "preset ms", "error"],
                self._rows(),
            ),
            f"Predicted with this run's calibration, and with the preset `{PRESET}`. An error of "
            f"at most {LIMIT:.0%} is the target of both.",
            "What the predicted time is spent on, ms:",
            table(
                ["", *spent],
                (
                    [
                        case.variant.title,
                        *(
                            f"{self.estimates[case.variant.key].parts()[part] * 1000.0:.0f}"
                            for part in spent
                        ),
                    ]
                    for case in self.cases
                ),
            ),
            "The calibrations:",
            table(
                ["", *names],
                ([field, *(str(values[n].get(field, "")) for n in names)] for field in every),
            ),
            *provenance(self.settings, self.machine),
        ]
        return "\n\n".join(sections) + "\n"

    def csv(self) -> str:
        """Every recorded step, one a line, with whether it counts."""
        return steps_csv(self.steps)

    def _rows(self) -> Iterable[list[str]]:
        for case in self.cases:
            summary = summarise(self.steps, case.variant.key)
            row = [case.variant.title]
            row += [number(ms, ".0f") for ms in (summary.median_ms, summary.p20_ms, summary.p80_ms)]
            for estimates in (self.estimates, self.of_preset):
                found = estimates.get(case.variant.key)
                row.append(number(found.seconds * 1000.0 if found else None, ".0f"))
                row.append(number(self.error(case, estimates), "+.1%"))
            yield row


def fields_of(cluster: Cluster) -> dict[str, object]:
    """The numbers of a cluster's file by their dotted names."""
    found: dict[str, object] = {}

    def collect(prefix: str, content: object) -> None:
        if isinstance(content, Mapping):
            for key, value in content.items():
                collect(f"{prefix}.{key}" if prefix else str(key), value)
        else:
            found[prefix] = content

    collect("", asdict(cluster))
    return found


def main(argv: Sequence[str] | None) -> None:
    """Run the benchmark with `argv`, or the command line when it is None.

    Raises:
        ValueError: for a device that is not there, and sizes that TP does not divide.
    """
    parser = benchmark_parser(
        "Set the planner's predictions beside the measured training iteration.", steps=8
    )
    args = parser.parse_args(argv)
    sizes, machine, settings = begin(args)
    cases = cases_of(args.tp)
    calibrations: dict[int, Calibration] = {}
    recorded: list[Step] = []
    for tp in dict.fromkeys(case.tp for case in cases):
        variants = [case.variant for case in cases if case.tp == tp]
        print(f"TP {tp}: calibration; {'; '.join(v.title for v in variants)}", flush=True)
        calibrations[tp] = calibrate(
            device=args.device,
            ranks=tp,
            dtypes=(args.dtype,),
            sweep=QUICK_SWEEP if args.quick else None,
        )
        by_rank = run_on_ranks(race, tp, args.device, variants, sizes, args.dtype, args.steps)
        recorded += merged(by_rank)
    clusters = {f"ranks_{tp}": found.cluster for tp, found in calibrations.items()}
    preset = load_cluster(PRESET)
    on_preset = args.device == "cpu" and args.dtype in preset.compute
    if on_preset:
        clusters["preset"] = preset
    report = PlannerReport(
        settings=settings,
        machine=machine,
        cases=cases,
        estimates={
            case.variant.key: predicted(case, sizes, args.dtype, calibrations[case.tp].cluster)
            for case in cases
        },
        of_preset={
            case.variant.key: predicted(case, sizes, args.dtype, preset)
            for case in cases
            if on_preset
        },
        clusters=clusters,
        steps=recorded,
    )
    publish("planner", report, args)


if __name__ == "__main__":
    run_tool(main)
