"""Our rotary embedding is Megatron's, whatever computes it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from megatron.core.models.common.embeddings.rope_utils import _apply_rotary_pos_emb_bshd
from torch import Tensor

from boost_layers import ops
from boost_layers.ops.dispatch import problem_of_csrc


@pytest.fixture(autouse=True, params=["reference", "csrc"])
def _served_by(request: pytest.FixtureRequest) -> Iterator[None]:
    if request.param == "csrc" and (problem := problem_of_csrc()):
        pytest.skip(f"csrc: {problem}")
    with ops.use(request.param):
        yield


def heads_and_angles(e: int, p: int, interleaved: bool) -> tuple[Tensor, Tensor]:
    """Heads `[s, b, h, e]` and Megatron's angles `[s, 1, 1, p]`."""
    generator = torch.Generator().manual_seed(e + p)
    t = torch.randn(7, 2, 3, e, generator=generator, dtype=torch.float64)
    angles = 3 * torch.randn(7, p // 2, generator=generator, dtype=torch.float64)
    if interleaved:
        both = torch.stack((angles, angles), dim=-1).flatten(1)
    else:
        both = torch.cat((angles, angles), dim=1)
    return t, both[:, None, None, :]


def rotated(t: Tensor, angles: Tensor, interleaved: bool) -> Tensor:
    out = t.clone()
    cos, sin = (f(angles.flatten(1)).to(t.dtype) for f in (torch.cos, torch.sin))
    ops.rotary_([out], cos, sin, interleaved=interleaved)
    return out


@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize(("e", "p"), [(6, 6), (10, 4), (2, 2), (64, 64)])
def test_in_fp64(e: int, p: int, interleaved: bool) -> None:
    t, angles = heads_and_angles(e, p, interleaved)
    expected = _apply_rotary_pos_emb_bshd(t, angles, rotary_interleaved=interleaved)
    torch.testing.assert_close(rotated(t, angles, interleaved), expected, rtol=1e-14, atol=1e-14)


@pytest.mark.parametrize("interleaved", [True, False])
def test_bf16_rounds_no_worse(interleaved: bool) -> None:
    exact_t, angles = heads_and_angles(16, 16, interleaved)
    t = exact_t.bfloat16()
    exact = _apply_rotary_pos_emb_bshd(t.double(), angles, rotary_interleaved=interleaved)
    megatrons = _apply_rotary_pos_emb_bshd(t, angles, rotary_interleaved=interleaved)
    error = (rotated(t, angles, interleaved).double() - exact).norm()
    assert error <= 1.05 * (megatrons.double() - exact).norm()
    assert error <= 4e-3 * exact.norm()
