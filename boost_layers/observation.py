"""Looking at the latents of a model while it computes.

A layer hands the latents of a forward pass to an observer, where it has one; nothing of the
computation changes, and without an observer nothing is done.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from boost_layers.layer import LowRankLayer
from boost_layers.mappings import as_tokens

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch import Tensor, nn

    from boost_layers.latent import Latent
    from boost_layers.layer import LatentObserver


def observe_latents(models: Iterable[nn.Module], observer: LatentObserver | None) -> None:
    """Give all layers of ours an observer of their latents, or none.

    It is called at the end of each layer's forward, in evaluations and where a forward is computed
    again too (`communication.current_phase` tells), on every rank alike; a full-rank layer shows it
    no latents.

    Args:
        models: the model chunks of this rank, as they are or wrapped for data parallelism.
        observer: takes the layer, whose `layer_number` counts from 1, and its latents in the order
            q, k, v, o, gate, up, down, grouped ones side by side.
    """
    for model in models:
        for module in model.modules():
            if isinstance(module, LowRankLayer):
                module.latent_observer = observer


def values_at(latent: Latent, positions: Tensor) -> Tensor:
    """The latents of the tokens at some positions of every sequence, before LaX's norm and φ: u, or
    LaX's w = u + G(z₋₁).

    Args:
        latent: `[s, b, w]` with w = Σ r_i, or Σ r_i/T where it is `sharded`.
        positions: `[k]`, indices along the sequence.

    Returns:
        `[k·b, w]` in fp32 (in fp64 as it is), divided by ρ; outside of autograd. No collective.
    """
    value = latent.value.detach()
    tokens = as_tokens(value.index_select(0, positions))
    tokens = tokens.to(torch.promote_types(tokens.dtype, torch.float32))
    if latent.statistics is None:
        return tokens
    s = latent.statistics.detach().view(*value.shape[:2], 1).index_select(0, positions)
    rho = torch.sqrt(as_tokens(s) / latent.kind.hidden_size + latent.kind.eps)
    return tokens / rho
