"""What does attention cost on the CPU, and is PyTorch's own kernel the limit?

Times `scaled_dot_product_attention`, which all strategies share, at the sizes of one rank of
`iteration.py`'s model: by backend, and by the layout that q, k and v have in memory. Beside it
stands what its matrix products would take at the rate of a large `torch.mm` timed in the same
rounds, which no kernel can beat by much.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path

# Run from a checkout, the package may not be installed.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

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

BACKENDS = {"flash": SDPBackend.FLASH_ATTENTION, "math": SDPBackend.MATH}
LAYOUTS = {"by_tokens": (1, 2, 0, 3), "by_heads": (0, 1, 2, 3)}
"""Where `[b, h, s, e]` comes from: `[s, b, h, e]`, as the up-projections leave it, or its own
contiguous copy."""
PASSES = {"forward": 1.0, "forward_backward": 3.5}
"""Matrix products: two forward and five backward, by those of a forward."""
CALLS = {
    f"{backend}_{layout}_{passes}": (backend, layout, passes)
    for backend, layout, passes in product(BACKENDS, LAYOUTS, PASSES)
}
"""What is timed, by key."""
LARGE_MM = "large_mm"


def variants_of(sizes: RankSizes, dtype: torch.dtype) -> dict[str, Callable[[], object]]:
    """What is raced, by key."""
    side = _mm_side(sizes)
    matrices = [torch.randn(side, side, dtype=dtype) for _ in range(2)]
    runs: dict[str, Callable[[], object]] = {LARGE_MM: partial(torch.mm, *matrices)}
    whole = (sizes.batch, sizes.heads, sizes.sequence, sizes.head)
    for key, (backend, layout, passes) in CALLS.items():
        order = LAYOUTS[layout]
        in_memory = [whole[order.index(place)] for place in range(4)]
        qkv = [torch.randn(in_memory, dtype=dtype).permute(order) for _ in range(3)]
        leaves = [each.requires_grad_() for each in qkv]
        runs[key] = partial(_attend, backend, leaves, backward=passes != "forward")
    return runs


def _mm_side(sizes: RankSizes) -> int:
    return 2 * sizes.hidden


def _attend(backend: str, qkv: Sequence[Tensor], *, backward: bool) -> None:
    with sdpa_kernel(BACKENDS[backend]), torch.set_grad_enabled(backward):
        q, k, v = qkv
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        if backward:
            torch.autograd.grad(out, qkv, torch.ones_like(out))


def causal_flop(sizes: RankSizes) -> int:
    """Of the two products of a forward, where the upper triangle is left out: 2·b·h·s·(s+1)·e."""
    pairs = sizes.sequence * (sizes.sequence + 1)
    return 2 * sizes.batch * sizes.heads * pairs * sizes.head


def race_attention(
    device: torch.device, sizes: Sizes, tp: int, dtype: str, rounds: int
) -> list[Step]:
    """Run on a rank: `rounds` rounds of all variants."""
    variants = variants_of(RankSizes.of(sizes, tp), DTYPES[dtype])
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
        for key in CALLS:
            summary = summarise(self.steps, key)
            result |= {
                f"{key}_ms": summary.median_ms,
                f"{key}_p20_ms": summary.p20_ms,
                f"{key}_p80_ms": summary.p80_ms,
                f"{key}_over_its_products": self._over_products(key),
            }
        return result | flat_provenance(self.settings, self.machine)

    def markdown(self) -> str:
        """The result for people, as a Markdown page."""
        rows = []
        for key in CALLS:
            summary = summarise(self.steps, key)
            values = (summary.median_ms, summary.p20_ms, summary.p80_ms)
            over = number(self._over_products(key), ".2f")
            rows.append([key, *(number(value, ".1f") for value in values), over])
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
        flop = 2 * _mm_side(self.sizes) ** 3
        return rate(flop, summarise(self.steps, LARGE_MM).median_ms)

    def _over_products(self, key: str) -> float | None:
        *_, passes = CALLS[key]
        flop = round(causal_flop(self.sizes) * PASSES[passes])
        achieved, peak = rate(flop, summarise(self.steps, key).median_ms), self._peak()
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
