"""What does a step cost that looks at the latents (`--low-rank-log-latents-interval`)?

Races the iteration of `iteration.py`'s model with such a look against the same without, for BTP and
for vanilla tensor parallelism, and times the eigenvalues of one matrix by its rank, which is what
grows fastest with the model. README.md says how it is measured.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

# Run from a checkout, the package may not be installed.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

from benchmarks.command import begin, benchmark_parser, publish
from benchmarks.harness import Step, measure, merged, summarise
from benchmarks.models import Iteration, iterations_of, megatron_group
from benchmarks.report import (
    flat_provenance,
    number,
    provenance,
    ratio_of_keys,
    steps_csv,
    table,
)
from benchmarks.variants import BTP, DTYPES, VANILLA, Sizes, Variant
from megatron.boost.command_line import run_tool
from megatron.boost.ranks import run_on_ranks

RACED = (BTP, VANILLA[0])
RANKS = (256, 512, 1024)
TARGET_PERCENT = 1.0
INTERVAL = 100
"""Steps from one look to the next, for which the cost is given."""


def looking_key(variant: Variant) -> str:
    """Of a variant's step with a look at its latents."""
    return f"{variant.key}_looking"


def eigenvalues_key(rank: int) -> str:
    """Of the effective rank of one matrix."""
    return f"effective_rank_of_{rank}"


def race_looks(device: torch.device, sizes: Sizes, dtype: str, rounds: int) -> list[Step]:
    """Run on a rank: `rounds` rounds of each variant without and with a look at its latents, and of
    the eigenvalues."""
    with megatron_group(device):
        from megatron.boost.latent_statistics import effective_rank

        iterations = iterations_of(device, RACED, sizes, DTYPES[dtype])
        runs: dict[str, Callable[[], object]] = {}
        for variant in RACED:
            iteration = iterations[variant.key]
            runs[variant.key] = iteration.run
            runs[looking_key(variant)] = partial(_looking_step, iteration, variant, sizes)
        for rank in RANKS:
            sample = torch.randn(4 * rank, rank, device=device)
            runs[eigenvalues_key(rank)] = partial(effective_rank, sample.t() @ sample)
        return measure(runs, rounds, device, lambda _: None)


def _looking_step(iteration: Iteration, variant: Variant, sizes: Sizes) -> None:
    from megatron.core import parallel_state

    from boost_layers.observation import observe_latents
    from megatron.boost.latent_statistics import LatentStatistics

    assert variant.layers is not None
    statistics = LatentStatistics(
        replace(variant.layers, rank=sizes.rank),
        hidden_size=sizes.hidden,
        num_layers=sizes.layers,
        sequences=sizes.micro_batch,
        data_parallel=parallel_state.get_data_parallel_group(),
    )
    observe_latents([iteration.model], statistics)
    try:
        iteration.run()
    finally:
        observe_latents([iteration.model], None)
    statistics.values()


@dataclass(frozen=True, kw_only=True)
class LatentsReport:
    """One run of the benchmark."""

    settings: Mapping[str, object]
    machine: Mapping[str, str]
    steps: Sequence[Step]

    def flat(self) -> dict[str, object]:
        """Everything under flat keys with their units; None is what was not measured."""
        result: dict[str, object] = {}
        for variant in RACED:
            for ending, steps in self._clocks().items():
                key = variant.key
                looked = ratio_of_keys(steps, looking_key(variant), key)
                cost = f"{key}_cost_percent_every_{INTERVAL}_steps{ending}"
                result |= {
                    f"{key}{ending}_ms": summarise(steps, key).median_ms,
                    f"{key}_looking{ending}_ms": summarise(steps, looking_key(variant)).median_ms,
                    f"{key}_looking_over_{key}{ending}": looked.value,
                    f"{key}_looking_over_{key}{ending}_p20": looked.p20,
                    f"{key}_looking_over_{key}{ending}_p80": looked.p80,
                    cost: _percent(looked.value),
                    f"{cost}_p80": _percent(looked.p80),
                }
        for rank in RANKS:
            key = eigenvalues_key(rank)
            result[f"{key}_ms"] = summarise(self.steps, key).median_ms
        return result | flat_provenance(self.settings, self.machine)

    def markdown(self) -> str:
        """The result for people, as a Markdown page."""
        head = ["", "clock", "ms", "ms with a look", "over", "p20", "p80"]
        head += [f"cost every {INTERVAL} steps", "target"]
        sections = [
            "# What it costs to look at the latents",
            table(head, self._rows()),
            table(["effective rank of one matrix r×r", "ms"], self._eigenvalues()),
            f"cost: what a look adds, over {INTERVAL} iterations without one. How it is measured: "
            "benchmarks/README.md.",
            *provenance(self.settings, self.machine),
        ]
        return "\n\n".join(sections) + "\n"

    def csv(self) -> str:
        """Every recorded step, one a line, with whether it counts."""
        return steps_csv(self.steps)

    def _clocks(self) -> dict[str, Sequence[Step]]:
        """The steps by the wall clock and by the processor time of the busier rank, by the ending
        of their keys."""
        by_processor = [replace(step, milliseconds=step.cpu_milliseconds) for step in self.steps]
        return {"": self.steps, "_processor": by_processor}

    def _rows(self) -> Iterable[list[str]]:
        for variant in RACED:
            for ending, steps in self._clocks().items():
                looked = ratio_of_keys(steps, looking_key(variant), variant.key)
                keys = (variant.key, looking_key(variant))
                times = [summarise(steps, key).median_ms for key in keys]
                yield [
                    variant.title,
                    "processor" if ending else "wall",
                    *(number(time, ".0f") for time in times),
                    *(number(value, ".3f") for value in (looked.value, looked.p20, looked.p80)),
                    number(_percent(looked.value), ".3f") + " %",
                    f"below {TARGET_PERCENT:g} %",
                ]

    def _eigenvalues(self) -> Iterable[list[str]]:
        for rank in RANKS:
            yield [
                f"r = {rank}",
                number(summarise(self.steps, eigenvalues_key(rank)).median_ms, ".1f"),
            ]


def _percent(over: float | None) -> float | None:
    return None if over is None else 100.0 * (over - 1.0) / INTERVAL


def main(argv: Sequence[str] | None) -> None:
    """Run the benchmark with `argv`, or the command line when it is None.

    Raises:
        ValueError: for a device that is not there, and sizes that TP does not divide.
    """
    parser = benchmark_parser("Time a training step that looks at the latents.", steps=10)
    args = parser.parse_args(argv)
    sizes, machine, settings = begin(args)
    by_rank = run_on_ranks(race_looks, args.tp, args.device, sizes, args.dtype, args.steps)
    report = LatentsReport(settings=settings, machine=machine, steps=merged(by_rank))
    publish("latents", report, args)


if __name__ == "__main__":
    run_tool(main)
