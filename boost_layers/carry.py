"""LaX's latents on their way to another pipeline stage, or through Megatron's full recomputation:
packed beside the residual stream into the one tensor that Megatron passes on.

Within a stage they go from layer to layer as they are. A stage sends each tensor-parallel rank's
1/T of them, so nothing is sent twice; what arrives is gathered. Cutting the crossing at a stage's
end instead would make another model of every pipeline size.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from boost_layers.config import PROJECTIONS
from boost_layers.latent import Latent, LatentKind, activated
from boost_layers.mappings import gather_replicated, split_replicated

if TYPE_CHECKING:
    import torch.distributed as dist

    from boost_layers.config import LowRankConfig


def latent_groups(low_rank: LowRankConfig, hidden_size: int) -> list[tuple[int, ...]]:
    """The ranks of a layer's latents, in the order in which they arise: q, k and v side by side, o,
    gate and up, down; each apart without grouping."""
    ranks = {name: low_rank.rank_of(name, hidden_size) for name in PROJECTIONS}
    if not low_rank.grouping:
        return [(rank,) for rank in ranks.values()]
    groups = (("q_proj", "k_proj", "v_proj"), ("o_proj",), ("gate_proj", "up_proj"), ("down_proj",))
    return [tuple(ranks[name] for name in group) for group in groups]


def width_between_stages(low_rank: LowRankConfig, hidden_size: int, tp_size: int) -> int:
    """Columns that the latents add to the tensor between two pipeline stages: Σ r of the rows that
    a rank sends under BTP, which are 1/T of the sequence; Σ r/T under vanilla, which sends all
    rows; 0 without a crossing."""
    if not low_rank.crossing:
        return 0
    width = sum(sum(group) for group in latent_groups(low_rank, hidden_size))
    return width if low_rank.tp == "btp" else width // tp_size


def pack(
    x: Tensor, latents: Sequence[Latent], group: dist.ProcessGroup, *, by_rows: bool, share: bool
) -> Tensor:
    """x and the latents in one tensor.

    Args:
        x: the residual stream as Megatron passes it: `[s/T, b, d]`, or `[s, b, d]`.
        latents: `[s, b, …]` each, the same on every rank; they are sent as z.
        group: the tensor-parallel group.
        by_rows: whether x is `[s/T, b, d]`; a rank's share of the latents is then one of rows too,
            else one of columns.
        share: only this rank's 1/T, for another stage; otherwise all of them.

    Returns:
        `[s/T, b, d + Σ r]` or `[s, b, d + Σ r/T]` with `share`, `[s/T, b, d + T·Σ r]` or
        `[s, b, d + Σ r]` without.

    Forward: no collective. Backward: with `share`, one all-gather of the latents' gradient.
    """
    z = torch.cat([activated(latent) for latent in latents], dim=-1)
    if share:
        z = split_replicated(z, 0 if by_rows else -1, group, "border")
    return torch.cat([x, z.view(*x.shape[:-1], -1)], dim=-1)


def unpack(
    packed: Tensor,
    hidden_size: int,
    groups: Sequence[tuple[int, ...]],
    group: dist.ProcessGroup,
    *,
    by_rows: bool,
    share: bool,
) -> tuple[Tensor, list[Latent]]:
    """The inverse of `pack`; `groups` are the latents' ranks.

    Forward: with `share`, one all-gather of the latents' share. Backward: no collective.
    """
    x, z = packed.split([hidden_size, packed.shape[-1] - hidden_size], dim=-1)
    z = z.contiguous()
    if share:
        z = gather_replicated(z, 0 if by_rows else -1, group, "border")
    elif by_rows:
        z = z.view(x.shape[0] * group.size(), x.shape[1], -1)
    widths = [sum(ranks) for ranks in groups]
    return x.contiguous(), [
        # Contiguous, so that what is computed from it is the same to the bit as within a stage.
        Latent(part.contiguous(), LatentKind(ranks, "identity"))
        for part, ranks in zip(z.split(widths, dim=-1), groups, strict=True)
    ]
