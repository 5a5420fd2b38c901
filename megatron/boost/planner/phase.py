"""One phase (forward, backward, recompute) of some part of the model on one rank, in seconds."""

from __future__ import annotations

import math
from dataclasses import dataclass

_SHARPNESS = 4
"""Of the maximum of device and host: they do not overlap perfectly where they are equal."""


@dataclass(frozen=True, kw_only=True)
class Phase:
    """Seconds by what they are spent on, and the operations that the host launches."""

    gemm: float = 0.0
    attention: float = 0.0
    elementwise: float = 0.0
    collectives: float = 0.0
    """That nothing hides."""
    accumulation: float = 0.0
    """Of weight gradients."""
    operations: float = 0.0

    def __add__(self, other: Phase) -> Phase:
        return Phase(**{name: value + vars(other)[name] for name, value in vars(self).items()})

    def __mul__(self, times: float) -> Phase:
        return Phase(**{name: value * times for name, value in vars(self).items()})

    @property
    def device(self) -> float:
        """What the GPU is busy for."""
        return self.gemm + self.attention + self.elementwise + self.collectives + self.accumulation

    def waiting(self, host_us_per_operation: float) -> float:
        """How long the GPU waits for the host, which launches operations while the GPU computes
        earlier ones: the longer of both counts, (device⁴ + host⁴)^¼, less the device's time."""
        host = self.operations * host_us_per_operation * 1e-6
        longest = max(self.device, host)
        if longest == 0 or math.isinf(longest):
            return 0.0
        ratio = min(self.device, host) / longest
        return longest * (1 + ratio**_SHARPNESS) ** (1 / _SHARPNESS) - self.device
