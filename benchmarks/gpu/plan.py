"""What one run on a GPU measures, how often, and the form in which its steps report it."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch

from benchmarks.variants import QUICK_SIZES, Sizes

TP = 4
DTYPE = torch.bfloat16
MICRO_BATCHES = (1, 4)
WHOLE_LAYERS = 32
"""Of the 7B model; fewer are timed."""
MODEL_7B = Sizes(
    hidden=4096,
    ffn=11008,
    heads=32,
    layers=4,
    sequence=4096,
    micro_batch=1,
    rank=1024,
    vocabulary=32000,
)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """One rank of 7B at TP 4 in bf16, or of a tiny model (`quick`)."""

    device: str
    """"cuda", or "cpu", to see that everything runs: its times mean nothing."""
    quick: bool
    repeats: int
    """Of every measurement."""

    @property
    def models(self) -> list[Sizes]:
        """The model at each micro-batch."""
        model = QUICK_SIZES if self.quick else MODEL_7B
        return [replace(model, micro_batch=size) for size in MICRO_BATCHES]

    @property
    def targets_apply(self) -> bool:
        """Whether figures are judged."""
        return self.device == "cuda" and not self.quick


@dataclass(frozen=True, kw_only=True)
class Times:
    """Milliseconds of one call."""

    median_ms: float
    p20_ms: float
    p80_ms: float


@dataclass(kw_only=True)
class Measured:
    """What a step of the run found, by key; what is in none of these was not measured."""

    times: dict[str, Times] = field(default_factory=dict)
    facts: dict[str, object] = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)
    """What could not be measured, with the error's first line."""

    def milliseconds(self, key: str) -> float | None:
        """The median, if it was measured."""
        found = self.times.get(key)
        return None if found is None else found.median_ms


def key_of(name: str, micro_batch: int, implementation: str) -> str:
    """The key of a measurement."""
    return f"{name}_micro_batch_{micro_batch}_{implementation}"


def first_line(error: BaseException) -> str:
    """What an error says, in one line."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]
