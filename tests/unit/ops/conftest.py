"""The implementations, as fixtures."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import pytest
import torch

from boost_layers import ops
from tests.support.served import (
    DEVICES,
    SERVED,
    Served,
    skip_if_not_there,
)
from tests.support.triton_interpreter import Run, process, run_there


@pytest.fixture(autouse=True)
def ieee_products() -> Iterator[None]:
    """TF32, which some images of PyTorch switch on, would round a GPU's operands to ten bits."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    yield
    torch.set_float32_matmul_precision(before)


@pytest.fixture(params=SERVED, ids="-".join)
def served(request: pytest.FixtureRequest) -> Iterator[Served]:
    name, device = request.param
    skip_if_not_there(name, device)
    with ops.use(name, device):
        yield Served(name, device)


@pytest.fixture(params=DEVICES)
def csrc_device(request: pytest.FixtureRequest) -> Iterator[str]:
    skip_if_not_there("csrc", request.param)
    with ops.use("csrc", request.param):
        yield request.param


@pytest.fixture(scope="session")
def interpreter() -> Iterator[ProcessPoolExecutor]:
    pytest.importorskip("triton")
    with process(TRITON_INTERPRET="1") as executor:
        yield executor


@pytest.fixture
def run(interpreter: ProcessPoolExecutor) -> Run:
    def submit(name: str, *args: Any, **kwargs: Any) -> Any:
        return interpreter.submit(run_there, name, args, kwargs).result()

    return submit
