"""One token's NaN or Inf."""

from __future__ import annotations

import math

import pytest
import torch

from boost_layers import ops
from tests.support.served import (
    Served,
)
from tests.support.token_ops import TOKEN_OPS, token_ops


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("name", TOKEN_OPS)
def test_not_a_number_stays_in_its_token(served: Served, name: str, dtype: torch.dtype) -> None:
    op = token_ops(5, 21, served.device, dtype)[name]
    clean, bad = op(), 2
    for result in clean:
        assert result.isfinite().all()
    others = [0, 1, 3, 4]
    for i in range(len(op.tokens)):
        moved = [x.clone() for x in op.tokens]
        moved[i][bad, -1] += 1
        depends = [a[bad] != b[bad] for a, b in zip(op(*moved), clean, strict=True)]
        assert any(there.any() for there in depends)
        for value in (math.nan, math.inf, -math.inf):
            if value == -math.inf and i == op.roots:
                continue  # no square root
            given = [x.clone() for x in op.tokens]
            given[i][bad, -1] = value
            results = op(*given)
            for result, expected in zip(results, clean, strict=True):
                assert torch.equal(result[others], expected[others]), f"{value} in argument {i}"
            if math.isnan(value):
                for result, there in zip(results, depends, strict=True):
                    assert result[bad][there].isnan().all(), f"{value} in argument {i}"
            elif i != op.roots:
                assert not all(r[bad].isfinite().all() for r in results), f"{value} in argument {i}"


def test_a_nan_reaches_every_sum_over_tokens(served: Served) -> None:
    n, k = 5, 21
    x, dy, h = (served.normal(n, k, dtype=torch.float32, seed=i) for i in range(3))
    gamma, rho = served.normal(k, dtype=torch.float32), torch.ones(n, 1, device=served.device)
    dy[3, 20] = math.nan
    *_, dweight, dbias = ops.latent_epilogue_backward(
        dy.flatten(), [k], "silu", h=h, norm="layernorm", weight=gamma, bias=gamma
    )
    assert dweight is not None and dbias is not None
    m = ops.down_projection_wgrad(dy, x)
    for found in (ops.rms_norm_backward(dy, x, gamma, rho)[1], dweight, dbias, m[:, 0]):
        assert found.isnan().tolist() == [False] * 20 + [True]
