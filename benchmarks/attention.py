"""What does attention cost on the CPU, and is PyTorch's own kernel the limit?

Times `scaled_dot_product_attention`, which all strategies share, at the sizes of one rank of
`iteration.py`'s model: by backend, by the layout that q, k and v have in memory, and as one long
sequence. Beside it stands what its matrix products would take at the rate of a large `torch.mm`
timed in the same rounds, which no kernel can beat by much.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

# Run from a checkout, the package may not be installed.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

from benchmarks.attention_calls import CALLS, LARGE_MM, AttentionCall, large_mm, large_mm_flop
from benchmarks.command import begin, benchmark_parser, publish
from benchmarks.harness import Step, measure, summarise
from benchmarks.op_cases import RankSizes, rate
from benchmarks.report import (
    flat_provenance,
    number,
    provenance,
    steps_csv,
    table,
)
from benchmarks.variants import DTYPES, Sizes
from megatron.boost.command_line import run_tool
from megatron.boost.ranks import run_on_ranks


def race_attention(
    device: torch.device, sizes: Sizes, tp: int, dtype: str, rounds: int
) -> list[Step]:
    """Run on a rank: `rounds` rounds of all variants."""
    of_rank = RankSizes.of(sizes, tp), DTYPES[dtype], device
    variants = {LARGE_MM: large_mm(*of_rank)}
    variants |= {call.key: call.prepared(*of_rank) for call in CALLS}
    return measure(variants, rounds, device, lambda _: None)


@dataclass(frozen=True, kw_only=True)
class AttentionReport:
    """One run of the benchmark."""

    settings: Mapping[str, object]
    machine: Mapping[str, str]
    sizes: RankSizes
    steps: Sequence[Step]

    def flat(self) -> dict[str, object]:
        """Everything under flat keys with their units; None is what was not measured."""
        result: dict[str, object] = {"large_mm_gflop_per_second": self._peak()}
        for call in CALLS:
            summary = summarise(self.steps, call.key)
            result |= {
                f"{call.key}_ms": summary.median_ms,
                f"{call.key}_p20_ms": summary.p20_ms,
                f"{call.key}_p80_ms": summary.p80_ms,
                f"{call.key}_over_its_products": self._over_products(call),
            }
        return result | flat_provenance(self.settings, self.machine)

    def markdown(self) -> str:
        """The result for people, as a Markdown page."""
        rows = []
        for call in CALLS:
            summary = summarise(self.steps, call.key)
            values = (summary.median_ms, summary.p20_ms, summary.p80_ms)
            over = number(self._over_products(call), ".2f")
            rows.append([call.key, *(number(value, ".1f") for value in values), over])
        sections = [
            "# Attention of one rank, forward and backward",
            f"A large torch.mm: {number(self._peak(), '.0f')} GFLOP/s.",
            table(["", "ms", "p20", "p80", "over its products"], rows),
            "over its products: the time over that of its causal matrix products at the rate of "
            "the large torch.mm. How it is measured: benchmarks/README.md.",
            *provenance(self.settings, self.machine),
        ]
        return "\n\n".join(sections) + "\n"

    def csv(self) -> str:
        """Every recorded step, one a line, with whether it counts."""
        return steps_csv(self.steps)

    def _peak(self) -> float | None:
        return rate(large_mm_flop(self.sizes), summarise(self.steps, LARGE_MM).median_ms)

    def _over_products(self, call: AttentionCall) -> float | None:
        milliseconds = summarise(self.steps, call.key).median_ms
        achieved, peak = rate(call.flop(self.sizes), milliseconds), self._peak()
        return peak / achieved if peak and achieved else None


def main(argv: Sequence[str] | None) -> None:
    """Run the benchmark with `argv`, or the command line when it is None.

    Raises:
        ValueError: for sizes that TP does not divide.
    """
    parser = benchmark_parser(
        "Time PyTorch's attention by backend and layout.", steps=20, on_cuda=False
    )
    args = parser.parse_args(argv)
    sizes, machine, settings = begin(args)
    settings |= {"device": f"cpu, one rank of TP {args.tp}, one thread"}
    (steps,) = run_on_ranks(race_attention, 1, args.device, sizes, args.tp, args.dtype, args.steps)
    report = AttentionReport(
        settings=settings, machine=machine, sizes=RankSizes.of(sizes, args.tp), steps=steps
    )
    publish("attention", report, args)


if __name__ == "__main__":
    run_tool(main)
