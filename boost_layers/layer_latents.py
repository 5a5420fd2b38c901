"""The latents of one pass through a layer, from what its down-projections give."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from boost_layers.combined import CombinedKind
from boost_layers.crossing import cross
from boost_layers.kept import KeptTokens
from boost_layers.latent import Latent, LatentKind, Reduced, ResidualSource, divided

if TYPE_CHECKING:
    from boost_layers.config import LowRankConfig
    from boost_layers.parameters import FactorTensors


class LayerLatents:
    """The latents of one pass through a layer, in the order in which they arise, each crossed with
    its counterpart in the layer before where there is one."""

    def __init__(
        self, low_rank: LowRankConfig, previous: Sequence[Latent] | None, amount: float = 1.0
    ):
        self.low_rank = low_rank
        self.previous = previous
        self.amount = amount
        """a of φ_a(y) = (1 − a)·y + a·φ(y)."""
        self.current: list[Latent] = []
        self.residual_source: ResidualSource | None = None
        """How the layer's second residual input can be made again, where it is not kept."""

    def kind(self, ranks: Sequence[int]) -> LatentKind:
        """How z is made of reduced latents of those ranks, side by side, by the settings."""
        architecture, activation = self.low_rank.architecture, self.low_rank.activation
        if architecture is None or architecture.combine is None:
            return LatentKind(tuple(ranks), activation, amount=self.amount)
        return CombinedKind(tuple(ranks), activation, amount=self.amount, architecture=architecture)

    def next(
        self,
        reduced: Reduced,
        factors: Sequence[FactorTensors],
        kept: KeptTokens | None = None,
    ) -> Latent:
        """The latent of the next group of projections. In LaX's first layer and without a crossing
        it is u itself, and has no norm.

        Args:
            reduced: what the down-projections gave.
            factors: those projections' tensors.
            kept: takes this rank's share, for consumers that shall not keep the latent themselves.
        """
        kind, dtype = self.kind([each.rank for each in factors]), factors[0].B.dtype
        undivided = replace(kind, hidden_size=reduced.hidden_size, eps=reduced.eps)
        value, statistics = reduced.value, reduced.statistics
        latent = Latent(value, undivided, statistics, kept=kept)
        if self.previous is not None:
            if kept is not None and statistics is not None:
                kept.keep(value)
            before = self.previous[len(self.current)]
            gate_weights = [weight for each in factors for weight in each.gate]
            w = cross(latent, before, self.low_rank.lax_gate, gate_weights)
            norms = zip(*(each.norm for each in factors), strict=True)
            weight, bias, *_ = (*(torch.cat(members) for members in norms), None, None)
            kind = replace(kind, norm=self.low_rank.lax_norm)
            latent = Latent(w, kind, None, weight, bias, KeptTokens.of(w, kept))
        elif statistics is not None and (self.low_rank.crossing or value.dtype != dtype):
            # The next layer takes u, and a message wider than the activations is not kept.
            u = divided(latent, dtype, kept)
            latent = Latent(u, kind, kept=kept)
        elif kept is not None and not kept.holds:
            kept.keep(value)
        self.current.append(latent)
        return latent
