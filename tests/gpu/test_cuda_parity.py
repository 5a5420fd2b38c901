"""The parity tests of the CPU path, on CUDA over NCCL: the same cases, references and tolerances.

Skipped, with the reason, where there are too few GPUs.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace

import pytest
import torch
from torch import distributed

from boost_layers import ops
from tests.distributed.test_parity import CASES, LAX_CASES, LAYER_CASES, SINGLE_RANK_CASES
from tests.support.distributed import run_ranks
from tests.support.parallel_gpt import Case
from tests.support.parity import Reference, beyond, compare, possible, reference


def needs_gpus(count: int) -> pytest.MarkDecorator:
    found = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return pytest.mark.skipif(found < count, reason=f"needs {count} CUDA device(s), found {found}")


def compare_on_cuda(cases: Mapping[str, tuple[Case, Reference]]) -> dict[str, dict[str, float]]:
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    # TF32 would round the GEMMs' inputs to ten bits.
    torch.set_float32_matmul_precision("highest")
    distributed.init_process_group("nccl")
    return compare(cases)


@pytest.mark.parametrize(
    "tp",
    [
        pytest.param(1, marks=needs_gpus(1)),
        pytest.param(2, marks=needs_gpus(2)),
        pytest.param(4, marks=needs_gpus(4)),
    ],
)
@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    [
        pytest.param(torch.float64, 1e-12, id="fp64"),
        pytest.param(torch.float32, 1e-5, id="fp32"),
    ],
)
def test_agrees_with_the_plain_model_on_cuda(tp: int, dtype: torch.dtype, tolerance: float) -> None:
    every = {**CASES, **LAX_CASES, **LAYER_CASES}
    cases = possible({**every, **SINGLE_RANK_CASES} if tp == 1 else every, tp)
    given = {
        name: (
            replace(case, tp=tp, dtype=dtype, device="cuda"),
            reference(case.plain, weights=dtype),
        )
        for name, case in cases.items()
    }
    ranks = run_ranks(
        compare_on_cuda, tp, given, init_process_group=False, cuda=True, timeout_s=280
    )
    for found in ranks:
        assert found.keys() == cases.keys()
        assert beyond(found, tolerance) == {}


@needs_gpus(1)
def test_fp16_survives_what_its_range_cannot_hold_on_cuda() -> None:
    """Partial sums come out of the GEMM in fp32 (`out_dtype`), which only CUDA has."""
    generator = torch.Generator().manual_seed(9)
    x = (torch.randn(32, 256, generator=generator) * 1e4).clamp(-6e4, 6e4).half()
    a = torch.randn(48, 256, generator=generator).half()
    h = torch.empty(32, 48, dtype=torch.float32, device="cuda")
    ops.down_projection(x.cuda(), a.cuda(), h)
    exact = x.double() @ a.double().t()
    assert exact.abs().max() > torch.finfo(torch.float16).max
    assert ((h.double().cpu() - exact).norm() / exact.norm()) <= 1e-5
