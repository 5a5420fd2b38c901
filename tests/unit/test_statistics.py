"""The statistics of the online norm survive a bf16 message bit for bit: the slot scheme by itself.

`tests/distributed/test_statistics.py` sends them through a real all-reduce.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from boost_layers import ops

MANTISSAS = 2**23
LARGEST = 3.396e38
"""Above it `hi` rounds to Inf."""
SMALLEST_EXACT = 2.0**-110
"""From here on the last bit of S is a multiple of bf16's smallest number, 2^-133."""


def float_from_bits(bits: Tensor) -> Tensor:
    return bits.to(torch.int32).view(torch.float32)


def decoded(s: Tensor, tp_rank: int = 0, tp_size: int = 1) -> Tensor:
    """S `[n]` after the way through one rank's slot."""
    block = torch.empty(s.numel(), ops.statistics_columns(torch.bfloat16, tp_size)).bfloat16()
    ops.write_statistics(s.view(-1, 1), block, tp_rank)
    return ops.read_statistics(block).view(-1)


# The smallest exponent that is exact, one, and the largest whose mantissas are all representable.
@pytest.mark.parametrize("exponent", [17, 127, 253])
def test_every_mantissa_is_exact(exponent: int) -> None:
    s = float_from_bits(torch.arange(MANTISSAS) + exponent * MANTISSAS)
    assert torch.equal(decoded(s), s)


def test_a_sample_of_all_magnitudes_is_exact() -> None:
    first, last = (torch.tensor(x).view(torch.int32).item() for x in (SMALLEST_EXACT, LARGEST))
    generator = torch.Generator().manual_seed(3)
    s = float_from_bits(torch.randint(int(first), int(last) + 1, (4_000_000,), generator=generator))
    assert s.max() > 1e38 and s.min() < 1e-32
    assert torch.equal(decoded(s), s)
    assert torch.equal(decoded(s[:1000], tp_rank=2, tp_size=4), s[:1000])


def test_below_the_exact_range_nothing_but_the_last_bits_is_lost() -> None:
    """Down to denormals and zero; 2^-134 is 4e-41, against an epsilon of 1e-6 in the norm."""
    below = torch.tensor(SMALLEST_EXACT).view(torch.int32).item()
    generator = torch.Generator().manual_seed(4)
    s = float_from_bits(torch.randint(0, int(below), (1_000_000,), generator=generator))
    s[:2] = torch.tensor([0.0, 2.0**-149])
    assert ((decoded(s).double() - s.double()).abs() <= 2.0**-134).all()
    assert decoded(s)[0] == 0


def test_what_bf16_cannot_hold_decodes_as_nan() -> None:
    largest = torch.tensor([LARGEST, 3.3961775292304601e38, torch.inf])
    assert decoded(largest).isnan().tolist() == [False, True, True]
    assert decoded(torch.tensor([torch.nan])).isnan().all()


def test_a_rank_writes_its_own_slot_only() -> None:
    block = torch.full((5, 12), torch.nan, dtype=torch.bfloat16)
    ops.write_statistics(torch.full((5, 1), 1 + 2**-10 + 2**-20), block, tp_rank=1)
    assert torch.equal(block[:, 3:6], torch.tensor([[1, 2**-10, 2**-20]] * 5).bfloat16())
    assert torch.equal(block[:, :3], torch.zeros(5, 3).bfloat16())
    assert torch.equal(block[:, 6:], torch.zeros(5, 6).bfloat16())


def test_the_slots_add_up_in_fp32() -> None:
    s = torch.tensor([[1.0 + 2**-23], [2.0**-20], [3.0e7]])
    block = torch.zeros(1, 9, dtype=torch.bfloat16)
    for rank in range(3):
        slot = torch.empty_like(block)
        ops.write_statistics(s[rank : rank + 1], slot, rank)
        block += slot
    assert torch.equal(ops.read_statistics(block), s.sum(dim=0, keepdim=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_wide_messages_take_one_column_as_it_is(dtype: torch.dtype) -> None:
    s = torch.rand(4, 1, dtype=dtype)
    block = torch.empty(4, ops.statistics_columns(dtype, tp_size=8), dtype=dtype)
    assert block.shape == (4, 1)
    ops.write_statistics(s, block, tp_rank=5)
    assert torch.equal(ops.read_statistics(block), s)


def test_no_tokens() -> None:
    assert decoded(torch.empty(0), tp_rank=1, tp_size=2).shape == (0,)


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
    s = ops.sum_of_squares(x)
    exact = x.double().square().sum(dim=1, keepdim=True)
    assert s.dtype == torch.float32
    assert ((s.double() - exact).abs() <= 4e-6 * exact).all()
    in_bf16 = torch.linalg.vector_norm(x, dim=-1, keepdim=True).square()
    assert ((in_bf16.double() - exact).abs() > 1e-3 * exact).any()


def test_the_norm_keeps_what_a_bf16_message_would_round() -> None:
    """Two sums that bf16 cannot tell apart give different ρ."""
    s = torch.tensor([[1000.0], [1000.5]])
    assert s.bfloat16().unique().numel() == 1
    h = torch.ones(2, 1).bfloat16()
    _, rho = ops.normalise_latent(h, decoded(s).view(2, 1), 64, 1e-5, h.dtype)
    assert rho[0] != rho[1]


def test_a_compiled_program_does_not_compile_the_slots() -> None:
    """A compiler that kept the parts in fp32 would make mid and lo zero."""
    compiled_nodes = []

    def backend(graph: Any, _: Any) -> Any:
        compiled_nodes.extend(node for node in graph.graph.nodes if node.op.startswith("call"))
        return graph.forward

    def through_a_slot(s: Tensor, block: Tensor) -> Tensor:
        ops.write_statistics(s * 2.0, block, 0)
        return ops.read_statistics(block) * 0.5

    s = torch.rand(64, 1, generator=torch.Generator().manual_seed(5)) + 1.0
    block = torch.empty(64, ops.statistics_columns(torch.bfloat16, 1), dtype=torch.bfloat16)

    assert torch.equal(torch.compile(through_a_slot, backend=backend)(s, block), s)
    names = [str(node.target) for node in compiled_nodes]
    assert len(names) > 3 and "unflatten" in names, "nothing was compiled"
    assert "to" not in names and "sub" not in " ".join(names)
