"""From the recorded steps of `iteration.py` to its numbers, its table and its files, and what other
benchmarks need of that."""

from __future__ import annotations

import csv
import io
import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from benchmarks.attention_calls import AS_IN_LAYERS, ATTENTION, LARGE_MM, large_mm_flop
from benchmarks.harness import (
    MINOR_FAULTS_ALLOWED,
    Step,
    Summary,
    percentile,
    round_ratios,
    summarise,
)
from benchmarks.op_cases import RankSizes, rate
from benchmarks.variants import BTP, FULL_RANK, GUARDS, VANILLA, Sizes, Variant, half_depth

# For the full sizes in fp32 on CPU, TP 2 over gloo's loopback.
TARGETS = {"full_rank_over_btp": 1.9, "vanilla_over_btp": 1.3}
GUARD_LIMIT = 1.03
"""How long our layers may take at TP 1, in iterations of plain PyTorch."""


@dataclass(frozen=True)
class Ratio:
    """The time of the fastest of some baselines over that of the variant they are compared with;
    None where one of the two was not measured."""

    counted: Variant | None
    """The fastest baseline."""
    value: float | None
    """Of the medians."""
    p20: float | None
    p80: float | None
    """Percentiles of the ratio within single rounds."""


def ratio(steps: Sequence[Step], baselines: Iterable[Variant], variant: Variant) -> Ratio:
    """The fastest of `baselines`, of those that have steps that count, over `variant`."""
    medians = {
        baseline: median
        for baseline in baselines
        if (median := summarise(steps, baseline.key).median_ms) is not None
    }
    own = summarise(steps, variant.key).median_ms
    if not medians or own is None:
        return Ratio(None, None, None, None)
    counted = min(medians, key=medians.__getitem__)
    return replace(ratio_of_keys(steps, counted.key, variant.key), counted=counted)


def ratio_of_keys(steps: Sequence[Step], numerator: str, denominator: str) -> Ratio:
    """The time of one variant over that of another, both by their keys."""
    above, below = (summarise(steps, key).median_ms for key in (numerator, denominator))
    if above is None or below is None:
        return Ratio(None, None, None, None)
    rounds = round_ratios(steps, numerator, denominator)
    return Ratio(None, above / below, percentile(rounds, 20), percentile(rounds, 80))


@dataclass(frozen=True)
class Attention:
    """What all layers' attention takes of an iteration, in every strategy alike; None where it was
    not measured."""

    milliseconds: float | None
    products_ms: float | None
    """What its matrix products would take at the rate of a large one."""
    answer: Ratio
    """Full-rank over BTP, if attention took no longer than these."""


@dataclass(frozen=True, kw_only=True)
class Report:
    """One run of the benchmark: what was measured, where, and every recorded step."""

    settings: Mapping[str, object]
    machine: Mapping[str, str]
    variants: Sequence[Variant]
    sizes: Sizes
    tp: int
    targets_apply: bool
    """Whether the run has the settings that `TARGETS` and `GUARD_LIMIT` are for."""
    steps: Sequence[Step]

    def answers(self) -> dict[str, Ratio]:
        """The benchmark's question, by result key."""
        return {
            "full_rank_over_btp": ratio(self.steps, FULL_RANK, BTP),
            "vanilla_over_btp": ratio(self.steps, VANILLA, BTP),
        }

    def answers_of_layers(self) -> dict[str, Ratio]:
        """The same of the layers alone, without embedding, borders, head and loss."""
        steps = steps_of_layers(self.steps, self.variants)
        return {
            "full_rank_over_btp_layers": ratio(steps, FULL_RANK, BTP),
            "vanilla_over_btp_layers": ratio(steps, VANILLA, BTP),
        }

    def attention(self) -> Attention:
        """What attention takes of an iteration, and what the answer would be if it took less."""
        of_rank = RankSizes.of(self.sizes, self.tp)
        milliseconds = summarise(self.steps, ATTENTION).median_ms
        peak = rate(large_mm_flop(of_rank), summarise(self.steps, LARGE_MM).median_ms)
        if milliseconds is None or peak is None:
            return Attention(None, None, Ratio(None, None, None, None))
        products_ms = self.sizes.layers * AS_IN_LAYERS.flop(of_rank) / peak / 1e6
        steps = steps_without(self.steps, ATTENTION, spared=products_ms)
        return Attention(milliseconds, products_ms, ratio(steps, FULL_RANK, BTP))

    def guards(self) -> dict[str, tuple[Ratio, bool | None]]:
        """Our layers over plain PyTorch and whether that is within the limit (None where that is
        not judged), by result key."""
        result = {}
        for ours, plain in GUARDS:
            found = ratio(self.steps, [ours], plain)
            within = None
            if self.targets_apply and found.value is not None:
                within = found.value <= GUARD_LIMIT
            result[f"{ours.key}_over_plain"] = found, within
        return result

    def flat(self) -> dict[str, object]:
        """Everything under flat keys with their units; None is what was not measured."""
        result: dict[str, object] = {}
        for key, found in self.answers().items():
            result |= _flat_ratio(key, found)
            result[f"{key}_counted"] = found.counted.key if found.counted else None
            if self.targets_apply:
                result[f"{key}_target"] = TARGETS[key]
        for key, found in self.answers_of_layers().items():
            result |= _flat_ratio(key, found)
        attention = self.attention()
        result |= {
            "attention_ms": attention.milliseconds,
            "attention_at_the_rate_of_products_ms": attention.products_ms,
        }
        result |= _flat_ratio("full_rank_over_btp_at_the_rate_of_products", attention.answer)
        for key, (found, within) in self.guards().items():
            result |= _flat_ratio(key, found)
            result[f"{key}_within_3_percent"] = within
        for variant in self.variants:
            summary = summarise(self.steps, variant.key)
            result |= {
                f"{variant.key}_ms": summary.median_ms,
                f"{variant.key}_p20_ms": summary.p20_ms,
                f"{variant.key}_p80_ms": summary.p80_ms,
                f"{variant.key}_tokens_per_second": self._tokens_per_second(summary),
                f"{variant.key}_exposed_communication_seconds": (
                    summary.exposed_communication_seconds
                ),
                f"{variant.key}_steps": summary.steps,
                f"{variant.key}_dropped_steps": summary.dropped,
            }
        return result | flat_provenance(self.settings, self.machine)

    def markdown(self) -> str:
        """The result for people, as a Markdown page."""
        sections = [
            "# One training iteration: full-rank and vanilla low-rank over BTP",
            table(
                ["ratio of medians", "value", "p20", "p80", "the baseline", "target"],
                self._answer_rows(),
            ),
            table(
                ["the layers alone", "value", "p20", "p80", "the baseline"],
                ([key, *_ratio_cells(found)] for key, found in self.answers_of_layers().items()),
            ),
            self._attention_sentence(),
            table(
                ["", "ms", "p20", "p80", "tokens/s", "exposed comm. s", "dropped steps"],
                self._variant_rows(),
            ),
            table(
                ["guard against slow baselines", "over plain PyTorch", "within 3 %"],
                self._guard_rows(),
            ),
            f"A step is dropped for more than {MINOR_FAULTS_ALLOWED} minor page faults or any "
            "major one on a rank. How it is measured, and how to read it: benchmarks/README.md.",
            *provenance(self.settings, self.machine),
        ]
        return "\n\n".join(sections) + "\n"

    def csv(self) -> str:
        """Every recorded step, one a line, with whether it counts."""
        return steps_csv(self.steps)

    def _tokens_per_second(self, summary: Summary) -> float | None:
        return self.sizes.tokens / summary.median_ms * 1000.0 if summary.median_ms else None

    def _answer_rows(self) -> Iterable[list[str]]:
        for key, found in self.answers().items():
            yield [
                key,
                *_ratio_cells(found),
                f"at least {TARGETS[key]:g}" if self.targets_apply else "none at these settings",
            ]

    def _attention_sentence(self) -> str:
        attention = self.attention()
        value, p20, p80, _ = _ratio_cells(attention.answer)
        return (
            "The attention of a rank's heads, alone: "
            f"{number(attention.milliseconds, '.0f')} ms. At the rate of a large product it would "
            f"take {number(attention.products_ms, '.0f')} ms, and full_rank_over_btp would be "
            f"{value} (p20 {p20}, p80 {p80})."
        )

    def _variant_rows(self) -> Iterable[list[str]]:
        for variant in self.variants:
            summary = summarise(self.steps, variant.key)
            yield [
                variant.title,
                number(summary.median_ms, ".0f"),
                number(summary.p20_ms, ".0f"),
                number(summary.p80_ms, ".0f"),
                number(self._tokens_per_second(summary), ",.0f"),
                number(summary.exposed_communication_seconds, ".3f"),
                f"{summary.dropped} of {summary.steps}",
            ]

    def _guard_rows(self) -> Iterable[list[str]]:
        words = {True: "yes", False: "NO", None: "not judged"}
        for (ours, _), (found, within) in zip(GUARDS, self.guards().values(), strict=True):
            yield [ours.title, number(found.value, ".3f"), words[within]]


def steps_of_layers(steps: Sequence[Step], variants: Iterable[Variant]) -> list[Step]:
    """What the layers alone take: twice the difference between a step of a variant and one of the
    same with half of the layers, in each round in which both count."""
    counted = {(step.variant, step.round_number): step for step in steps if step.counts}
    halves = {variant.key: half_depth(variant).key for variant in variants}
    of_layers = []
    for (key, in_round), whole in counted.items():
        half = counted.get((halves[key], in_round)) if key in halves else None
        if half is not None:
            layers_ms = 2 * (whole.milliseconds - half.milliseconds)
            of_layers.append(replace(whole, milliseconds=layers_ms))
    return of_layers


def steps_without(steps: Sequence[Step], part: str, *, spared: float) -> list[Step]:
    """The steps, each without what `part` took in its round but for `spared` milliseconds, where
    both count."""
    parts = {s.round_number: s.milliseconds for s in steps if s.variant == part and s.counts}
    return [
        replace(step, milliseconds=step.milliseconds - parts[step.round_number] + spared)
        for step in steps
        if step.round_number in parts
    ]


def _ratio_cells(found: Ratio) -> list[str]:
    values = [number(value, ".2f") for value in (found.value, found.p20, found.p80)]
    return [*values, found.counted.title if found.counted else ""]


def _flat_ratio(key: str, found: Ratio) -> dict[str, object]:
    return {key: found.value, f"{key}_p20": found.p20, f"{key}_p80": found.p80}


def steps_csv(steps: Iterable[Step]) -> str:
    """The steps, one a line, with whether they count."""
    return rows_csv(asdict(step) | {"counts": step.counts} for step in steps)


def rows_csv(rows: Iterable[Mapping[str, object]]) -> str:
    """Rows with the same keys, one a line, under a line with these."""
    first, rows = itertools.tee(rows)
    text = io.StringIO()
    writer = csv.DictWriter(text, list(next(first, {})), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def provenance(settings: Mapping[str, object], machine: Mapping[str, str]) -> list[str]:
    """The last sections of every page: what it was measured with, and on."""
    return [
        table(["setting", ""], [[name, str(value)] for name, value in settings.items()]),
        table(["machine", ""], [[name, value] for name, value in machine.items()]),
    ]


def flat_provenance(
    settings: Mapping[str, object], machine: Mapping[str, str]
) -> dict[str, object]:
    """The same as the last of the flat keys."""
    on = {f"machine_{name.replace('-', '_')}": value for name, value in machine.items()}
    return dict(settings) | on


def number(value: float | None, form: str) -> str:
    """`value` in that format, or that there is none."""
    return "not measured" if value is None else format(value, form)


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def write_new(folder: Path, stem: str, contents: Mapping[str, str]) -> list[Path]:
    """Write `contents`, text by suffix, to `folder`/`stem`…; where such a file exists already the
    stem gets a number instead. Returns the paths."""
    folder.mkdir(parents=True, exist_ok=True)
    stems = itertools.chain([stem], (f"{stem}.{number}" for number in itertools.count(2)))
    free = next(s for s in stems if not any((folder / f"{s}{end}").exists() for end in contents))
    paths = [folder / f"{free}{end}" for end in contents]
    for path, text in zip(paths, contents.values(), strict=True):
        with path.open("x", encoding="utf-8") as file:
            file.write(text)
    return paths
