"""The implementations of the ops that are tested, and the cases that all of them get."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from boost_layers.ops import dispatch
from tests.support.op_cases import (
    DTYPES,
    HALVES,
    LAYOUTS,
    exact,
    normal,
)

SIZES = [(0, 3), (1, 1), (3, 17), (17, 33), (33, 130)]
FLOATS = pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d).removeprefix("torch."))
HALF = pytest.mark.parametrize("dtype", HALVES, ids=lambda d: str(d).removeprefix("torch."))
SIZED = pytest.mark.parametrize("size", SIZES, ids=lambda s: f"{s[0]}x{s[1]}")
LAID_OUT = pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
DEVICES = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]
SERVED = [(name, device) for device in DEVICES for name in ("csrc", "reference")]

no_csrc = dispatch.problem_of_csrc()


@dataclass(frozen=True)
class Served:
    """The implementation under test, and the device it serves."""

    name: str
    device: str

    def normal(self, *shape: int, dtype: torch.dtype = torch.float64, seed: int = 0) -> Tensor:
        return normal(*shape, dtype=dtype, device=self.device, seed=seed)

    def rounding(self, share: float) -> float:
        """The share of a row that the reference may lose by rounding on the way."""
        return share if self.name == "reference" else 0.0


def skip_if_not_there(name: str, device: str) -> None:
    if name == "csrc" and no_csrc is not None:
        pytest.skip(f"csrc: {no_csrc}")
    if name == "csrc" and device == "cuda" and not dispatch.cuda_architectures():
        pytest.skip("csrc is built without CUDA")


def sum_of_squares(x: Tensor) -> Tensor:
    return exact(x).square().sum(dim=1, keepdim=True)
