"""Threads share the tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from boost_layers import ops
from tests.support.op_cases import (
    assert_close,
    exact,
    normal,
)
from tests.support.served import (
    no_csrc,
)
from tests.support.token_ops import TOKEN_OPS, token_ops


@pytest.fixture
def threads() -> Iterator[Callable[[int], None]]:
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.mark.skipif(no_csrc is not None, reason=f"csrc: {no_csrc}")
@pytest.mark.parametrize("name", TOKEN_OPS)
def test_threads_share_the_tokens(threads: Callable[[int], None], name: str) -> None:
    op = token_ops(301, 257, "cpu", torch.float32)[name]
    with ops.use("csrc"):
        threads(1)
        alone = op()
        threads(2)
        for result, expected in zip(op(), alone, strict=True):
            assert_close(result, exact(expected))


@pytest.mark.skipif(no_csrc is not None, reason=f"csrc: {no_csrc}")
def test_threads_share_sums_over_tokens(threads: Callable[[int], None]) -> None:
    n, k = 301, 257
    x, dy, h = (normal(n, k, dtype=torch.float32, seed=i) for i in range(3))
    gamma, rho = normal(k, dtype=torch.float32), torch.ones(n, 1)

    def found() -> list[Tensor]:
        *_, dweight, dbias = ops.latent_epilogue_backward(
            dy.flatten(), [k], "silu", h=h, norm="layernorm", weight=gamma, bias=gamma
        )
        dweights, dgamma = ops.fold_gamma_backward(dy, gamma, [x])
        assert dweight is not None and dbias is not None
        dx, of_gamma = ops.rms_norm_backward(dy, x, gamma, rho)
        return [dweight, dbias, *dweights, dgamma, dx, of_gamma]

    with ops.use("csrc"):
        threads(1)
        alone = found()
        threads(2)
        for result, expected in zip(found(), alone, strict=True):
            assert_close(result, exact(expected))
