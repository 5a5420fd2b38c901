"""The online norm's statistics through a real all-reduce in bf16."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, distributed

from boost_layers import ops
from boost_layers.projection.row_down import NormSettings, norm_down
from tests.support.distributed import run_ranks

HIDDEN = 4096


def whole_statistics(tokens: int, width: int) -> tuple[Tensor, Tensor]:
    """What `norm_down` reads as S on this rank, and every rank's own S in rank order."""
    group = distributed.group.WORLD
    rank, size = distributed.get_rank(), distributed.get_world_size()
    generator = torch.Generator().manual_seed(rank)
    # Tokens of very different size, so that a rounded or a lost share shows.
    scale = torch.logspace(-6, 6, tokens).view(tokens, 1, 1) * 3.0**rank
    x = (torch.randn(tokens, 1, HIDDEN // size, generator=generator) * scale).bfloat16()
    a = torch.randn(width, HIDDEN // size, generator=generator).bfloat16()
    gamma = torch.ones(HIDDEN // size).bfloat16()
    _, (reduced,) = norm_down(x, None, gamma, [a], [1], NormSettings(HIDDEN, 1e-6, True, group))
    assert reduced.statistics is not None
    own = ops.rms_stats(x.view(tokens, -1))
    parts = [torch.empty_like(own) for _ in range(size)]
    distributed.all_gather(parts, own)
    return reduced.statistics, torch.stack(parts)


@pytest.mark.parametrize("world_size", [2, 4])
# 5 tokens by 3 columns: neither block is a multiple of anything; 300 by 40: several ring segments.
def test_every_rank_reads_the_sum_of_all_s_bit_for_bit(world_size: int) -> None:
    for tokens, width in ((5, 3), (300, 40)):
        results = run_ranks(whole_statistics, world_size, tokens, width)
        for s, parts in results:
            assert s.dtype == torch.float32
            assert parts.min() > 0
            assert torch.equal(s, parts.sum(dim=0))
        # A sum of bf16 shares would be another number.
        assert not torch.equal(results[0][0], results[0][1].bfloat16().sum(dim=0).float())
