"""Bytes of weights, gradients and optimiser state on one rank, as Megatron holds them for Adam.

Source: Megatron's optimisers (`FP32Optimizer`, `Float16OptimizerWithFloat16Params`,
`DistributedOptimizer`) and its gradient buffers. What the distributed optimiser pads its buckets
with is not counted.
"""

from __future__ import annotations

from dataclasses import dataclass

from megatron.boost.accounting.parameters import rank_parameters
from megatron.boost.accounting.sizes import Layout, Model

_FP32_BYTES = 4
_MOMENTS = 2


@dataclass(frozen=True)
class StateBytes:
    """Bytes that one rank holds all the time."""

    weights: float
    gradients: float
    """The buffers in which gradients are accumulated and reduced."""
    main_weights: float
    """The fp32 copy of 16-bit weights."""
    main_gradients: float
    """The fp32 copy of 16-bit gradients, there during the optimiser's step."""
    moments: float
    """Adam's two."""

    @property
    def total(self) -> float:
        """All of them."""
        return (
            self.weights + self.gradients + self.main_weights + self.main_gradients + self.moments
        )


def state_bytes_per_parameter(layout: Layout) -> StateBytes:
    """Of one parameter: 4 + 4 + 8 in fp32, 2 + 4 + 4 + 8 in bf16 and fp16 with gradients in fp32,
    2 + 2 + 4 + 4 + 8 with gradients in 16 bits; the distributed optimiser spreads all but the
    first two over the D data-parallel ranks."""
    share = layout.data_parallel if layout.distributed_optimizer else 1
    weight = layout.dtype.itemsize
    half = weight < _FP32_BYTES
    gradient = _FP32_BYTES if half and layout.gradients_in_fp32 else weight
    optimised = _FP32_BYTES if half else weight
    return StateBytes(
        weights=weight,
        gradients=gradient,
        main_weights=optimised / share if half else 0,
        main_gradients=_FP32_BYTES / share if gradient < _FP32_BYTES else 0,
        moments=_MOMENTS * optimised / share,
    )


def rank_state_bytes(model: Model, layout: Layout, pp_rank: int) -> StateBytes:
    """What one rank of a pipeline stage holds."""
    parameters = rank_parameters(model, layout, pp_rank)
    each = state_bytes_per_parameter(layout)
    return StateBytes(
        weights=parameters * each.weights,
        gradients=parameters * each.gradients,
        main_weights=parameters * each.main_weights,
        main_gradients=parameters * each.main_gradients,
        moments=parameters * each.moments,
    )
