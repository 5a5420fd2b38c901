"""What stands between the down-projections and the latents' consumers, for tests of the former."""

from __future__ import annotations

import torch
from torch import Tensor

from boost_layers.latent import Latent, LatentKind, Reduced, divided


def u_of(reduced: Reduced, dtype: torch.dtype) -> Tensor:
    """The reduced latents divided by ρ."""
    if reduced.statistics is None:
        return reduced.value
    kind = LatentKind(
        (reduced.value.shape[-1],), "identity", hidden_size=reduced.hidden_size, eps=reduced.eps
    )
    return divided(Latent(reduced.value, kind, reduced.statistics), dtype, None)
