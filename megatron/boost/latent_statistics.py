"""How much of its rank a low-rank model uses: norm and effective rank of every projection's latent.

Both come from the latent's second moment over the tokens of one global batch, C = Σ u·uᵀ / n, u the
latent before φ. The norm is the root mean square of a token's, sqrt(tr C). The effective rank is
exp(−Σ p_i·ln p_i) with p_i = λ_i / Σ λ and λ the eigenvalues of C: the entropy of Roy and Vetterli,
"The effective rank: a measure of effective dimensionality", EUSIPCO 2007, here of the squares of
the singular values of the matrix of all u. It lies between 1, where all tokens share a direction,
and r, where all directions weigh the same.

The same positions of every sequence of the global batch are looked at, so the sample does not
depend on TP, PP, DP or the micro-batch. Each matrix belongs to one rank: of the tensor-parallel
ranks, which all hold the latent, one adds up C, and of the data-parallel ranks one gets their sum
and computes its eigenvalues.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from boost_layers.communication import current_phase
from boost_layers.config import PROJECTIONS, LowRankConfig
from boost_layers.observation import values_at

if TYPE_CHECKING:
    from boost_layers.latent import Latent
    from boost_layers.layer import LowRankLayer

TOKENS_PER_DIMENSION = 16
"""Sampled tokens for each dimension of the widest latent. Fewer would show in the result: of n
tokens with r equally strong directions the sample has some r·exp(−r/2n)."""

_QUANTITIES = 2


class LatentStatistics:
    """Observes one step's latents (`boost_layers.observation`), then computes what they amount to.

    Memory until `values`: r² numbers in fp32 for each projection of this rank's layers, divided by
    the tensor-parallel size.
    """

    def __init__(
        self,
        low_rank: LowRankConfig,
        *,
        hidden_size: int,
        num_layers: int,
        sequences: int,
        data_parallel: dist.ProcessGroup,
    ):
        """`sequences` is the size of the global batch, `num_layers` that of the whole model."""
        self._num_layers = num_layers
        self._group = data_parallel
        self._names = {
            (layer, name): layer * len(PROJECTIONS) + index
            for layer in range(num_layers)
            if low_rank.of_layer(layer).low_rank
            for index, name in enumerate(PROJECTIONS)
        }
        widest = max(low_rank.rank_of(name, hidden_size) for name in PROJECTIONS)
        self._per_sequence = math.ceil(TOKENS_PER_DIMENSION * widest / sequences)
        self._positions: Tensor | None = None
        self._moments: dict[int, Tensor] = {}
        self._tokens: dict[int, int] = {}
        """Sampled tokens added up in each moment."""

    def __call__(self, layer: LowRankLayer, latents: Sequence[Latent]) -> None:
        """Add a micro-batch's latents of one layer; what is computed again in backward is left out.

        Vanilla, whose ranks hold shares: one all-gather of the sample for each latent.
        """
        if current_phase() != "forward":
            return
        group = layer.tp_group
        index = (layer.layer_number - 1) * len(PROJECTIONS)
        for latent in latents:
            if self._positions is None:
                self._positions = positions(
                    latent.value.shape[0], self._per_sequence, latent.value.device
                )
            sample = values_at(latent, self._positions)
            members = sample.split(list(latent.kind.ranks), dim=1)
            if latent.sharded and group.size() > 1:
                members = _whole(sample, latent.kind.ranks, group)
            for member in members:
                if index % group.size() == group.rank():
                    self._add(index, member)
                index += 1

    def _add(self, index: int, sample: Tensor) -> None:
        if index not in self._moments:
            self._moments[index] = sample.new_zeros(sample.shape[1], sample.shape[1])
        self._moments[index].addmm_(sample.t(), sample)
        self._tokens[index] = self._tokens.get(index, 0) + sample.shape[0]

    def values(self) -> dict[tuple[int, str], tuple[float, float]]:
        """Norm and effective rank by layer, counted from 0, and projection, of the whole model and
        on every rank; NaN where a latent was not finite.

        Called by every rank after the step. Over the data-parallel group one reduction of each
        matrix `[r, r]` and one all-reduce of a number for each; over all ranks one all-reduce of
        two numbers for each projection of the model.
        """
        size, rank = self._group.size(), self._group.rank()
        device = torch.device("cuda", torch.cuda.current_device())
        found = torch.zeros(
            self._num_layers * len(PROJECTIONS), _QUANTITIES, dtype=torch.float64, device=device
        )
        owned = sorted(self._moments)
        tokens = torch.tensor(
            [self._tokens[index] for index in owned], dtype=torch.float64, device=device
        )
        if size > 1 and owned:
            dist.all_reduce(tokens, group=self._group)
        for turn, index in enumerate(owned):
            moment, owner = self._moments[index], turn % size
            if size > 1:
                dist.reduce(moment, group_dst=owner, group=self._group)
            if rank == owner:
                found[index, 0] = (moment.trace() / tokens[turn]).sqrt()
                found[index, 1] = effective_rank(moment)
        dist.all_reduce(found)
        listed = found.tolist()
        return {key: (listed[index][0], listed[index][1]) for key, index in self._names.items()}


def positions(sequence: int, wanted: int, device: torch.device) -> Tensor:
    """`wanted` positions of a sequence, at most all, each in the middle of an equal part: `[k]`."""
    parts = min(sequence, wanted)
    return (2 * torch.arange(parts, device=device) + 1) * sequence // (2 * parts)


def effective_rank(moment: Tensor) -> float:
    """exp of the entropy of the normalised eigenvalues of a symmetric, positive matrix `[r, r]`, of
    any scale; 0 for the zero matrix, NaN where it is not finite."""
    if not torch.isfinite(moment).all():
        return math.nan
    total = moment.trace()
    if total <= 0:
        return 0.0
    # In fp64: with thousands of small eigenvalues their rounding would add up.
    shares = torch.linalg.eigvalsh(moment.double() / total.double()).clamp_(min=0.0)
    return float(torch.special.entr(shares).sum().exp())


def _whole(share: Tensor, ranks: Sequence[int], group: dist.ProcessGroup) -> list[Tensor]:
    """The members `[m, r_i]` from every rank's shares of them side by side, `[m, Σ r_i/T]`. Not
    through the ledger, which counts what the model communicates."""
    gathered = share.new_empty(group.size(), *share.shape)
    dist.all_gather_into_tensor(gathered.view(-1), share.contiguous().view(-1), group=group)
    parts = gathered.split(list(ranks), dim=-1)
    return [part.movedim(0, 1).reshape(share.shape[0], -1) for part in parts]
