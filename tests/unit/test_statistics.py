"""The statistics of the online norm survive a bf16 message bit for bit: the slot scheme by itself.

`tests/distributed/test_statistics.py` sends them through a real all-reduce.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from boost_layers import ops
from boost_layers.ops.dispatch import problem_of_csrc

MANTISSAS = 2**23
LARGEST = 3.396e38
"""Above it `hi` rounds to Inf."""
SMALLEST_EXACT = 2.0**-110
"""From here on the last bit of S is a multiple of bf16's smallest number, 2^-133."""


@pytest.fixture(autouse=True, params=["reference", "csrc"])
def _served_by(request: pytest.FixtureRequest) -> Iterator[None]:
    if request.param == "csrc" and (problem := problem_of_csrc()):
        pytest.skip(f"csrc: {problem}")
    with ops.use(request.param):
        yield


def float_from_bits(bits: Tensor) -> Tensor:
    return bits.to(torch.int32).view(torch.float32)


def sent(x: Tensor, tp_rank: int = 0, tp_size: int = 1) -> tuple[Tensor, Tensor]:
    """S `[n]` of tokens `[n]` of one number each, and what it is after the way through a slot."""
    slots = torch.empty(x.numel(), ops.statistics_columns(torch.bfloat16, tp_size)).bfloat16()
    s = ops.rms_stats(x.view(-1, 1), slots, tp_rank)
    return s.view(-1), ops.read_statistics(slots).view(-1)


# The smallest exponents of x whose squares are exact, one, and the largest that stay representable.
@pytest.mark.parametrize("exponent", [73, 127, 189])
def test_the_square_of_every_mantissa_is_exact(exponent: int) -> None:
    s, decoded = sent(float_from_bits(torch.arange(MANTISSAS) + exponent * MANTISSAS))
    assert s.unique().numel() > MANTISSAS // 2
    assert torch.equal(decoded, s)


def test_a_sample_of_all_magnitudes_is_exact() -> None:
    first, last = (
        torch.tensor(x).sqrt().view(torch.int32).item() for x in (SMALLEST_EXACT, LARGEST)
    )
    generator = torch.Generator().manual_seed(3)
    x = float_from_bits(torch.randint(int(first) + 1, int(last), (4_000_000,), generator=generator))
    s, decoded = sent(x)
    assert s.max() > 1e38 and s.min() < 1e-32
    assert torch.equal(decoded, s)
    s, decoded = sent(x[:1000], tp_rank=2, tp_size=4)
    assert torch.equal(decoded, s)


def test_below_the_exact_range_nothing_but_the_last_bits_is_lost() -> None:
    """Down to denormals and zero; 2^-134 is 4e-41, against an epsilon of 1e-6 in the norm."""
    below = torch.tensor(SMALLEST_EXACT).sqrt().view(torch.int32).item()
    generator = torch.Generator().manual_seed(4)
    x = float_from_bits(torch.randint(0, int(below), (1_000_000,), generator=generator))
    x[:2] = torch.tensor([0.0, 2.0**-74])
    s, decoded = sent(x)
    assert ((decoded.double() - s.double()).abs() <= 2.0**-134).all()
    assert decoded[0] == 0


def test_what_bf16_cannot_hold_decodes_as_nan() -> None:
    largest = torch.tensor([LARGEST, 3.3961775292304601e38, torch.inf]).sqrt()
    s, decoded = sent(torch.cat([largest, torch.tensor([torch.nan])]))
    assert s.isfinite().tolist() == [True, True, False, False]
    assert decoded.isnan().tolist() == [False, True, True, True]


def test_a_rank_writes_its_own_slot_only() -> None:
    block = torch.full((5, 12), torch.nan, dtype=torch.bfloat16)
    ops.rms_stats(torch.tensor([[1.0, 2**-5, 2**-10]] * 5), block, tp_rank=1)
    assert torch.equal(block[:, 3:6], torch.tensor([[1, 2**-10, 2**-20]] * 5).bfloat16())
    assert torch.equal(block[:, :3], torch.zeros(5, 3).bfloat16())
    assert torch.equal(block[:, 6:], torch.zeros(5, 6).bfloat16())


def test_the_slots_add_up_in_fp32() -> None:
    x = torch.tensor([[1.0 + 2**-12], [2.0**-10], [5.1e3]])
    block = torch.zeros(1, 9, dtype=torch.bfloat16)
    for rank in range(3):
        slot = torch.empty_like(block)
        ops.rms_stats(x[rank : rank + 1], slot, rank)
        block += slot
    s = x.square()
    assert torch.equal(ops.read_statistics(block), (s[0] + s[1] + s[2]).view(1, 1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_wide_messages_take_one_column_as_it_is(dtype: torch.dtype) -> None:
    block = torch.empty(4, ops.statistics_columns(dtype, tp_size=8), dtype=dtype)
    assert block.shape == (4, 1)
    s = ops.rms_stats(torch.rand(4, 3, dtype=dtype), block, tp_rank=5)
    assert torch.equal(ops.read_statistics(block), s)


def test_no_tokens() -> None:
    assert sent(torch.empty(0), tp_rank=1, tp_size=2)[1].shape == (0,)


def test_a_split_with_fp32_intermediates_would_be_noticed() -> None:
    """What a compiler makes of the split when it drops the round trips through bf16: `left` is then
    zero after the first part, and only `hi` arrives."""

    def fused(s: Tensor, block: Tensor) -> None:
        left = s
        for column in range(3):
            part = left
            block[:, column : column + 1] = part
            left = left - part

    s = torch.rand(1000, 1) + 1
    block = torch.zeros(1000, 3).bfloat16()
    fused(s, block)
    assert not torch.equal(ops.read_statistics(block), s)


def test_sum_of_squares_of_bf16_accumulates_in_fp32() -> None:
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(50, 4096, generator=generator).bfloat16()
    s = ops.rms_stats(x)
    exact = x.double().square().sum(dim=1, keepdim=True)
    assert s.dtype == torch.float32
    assert ((s.double() - exact).abs() <= 4e-6 * exact).all()
    in_bf16 = torch.linalg.vector_norm(x, dim=-1, keepdim=True).square()
    assert ((in_bf16.double() - exact).abs() > 1e-3 * exact).any()


def test_the_norm_keeps_what_a_bf16_message_would_round() -> None:
    """Two sums that bf16 cannot tell apart give different ρ."""
    s = torch.tensor([[1000.0], [1000.5]])
    assert s.bfloat16().unique().numel() == 1
    slots = torch.empty(2, 3).bfloat16()
    ops.rms_stats(s.sqrt(), slots, 0)
    z, _ = ops.latent_epilogue(
        torch.ones(2, 1), (1,), "identity", statistics=slots, hidden_size=64, eps=1e-5
    )
    assert z[0] != z[1]


def test_a_compiled_program_does_not_compile_the_slots() -> None:
    """A compiler that kept the parts in fp32 would make mid and lo zero."""
    compiled_nodes = []

    def backend(graph: Any, _: Any) -> Any:
        compiled_nodes.extend(node for node in graph.graph.nodes if node.op.startswith("call"))
        return graph.forward

    def through_a_slot(x: Tensor, block: Tensor) -> Tensor:
        ops.rms_stats(x * 2.0, block, 0)
        return ops.read_statistics(block) * 0.25

    x = torch.rand(64, 1, generator=torch.Generator().manual_seed(5)) + 1.0
    block = torch.empty(64, ops.statistics_columns(torch.bfloat16, 1), dtype=torch.bfloat16)

    with ops.use("reference"):
        assert torch.equal(
            torch.compile(through_a_slot, backend=backend)(x, block), ops.rms_stats(x)
        )
    names = [str(node.target) for node in compiled_nodes]
    assert len(names) > 3 and "unflatten" in names, "nothing was compiled"
    assert "to" not in names and "sub" not in " ".join(names)
