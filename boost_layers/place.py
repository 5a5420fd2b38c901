"""Where a layer stands among the others, as far as they and it differ: low-rank or full-rank, with
or without latents that cross over."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from boost_layers.config import LowRankConfig


@dataclass(frozen=True)
class LayerPlace:
    """A layer of a model, counted from 0 over all pipeline stages."""

    low_rank: LowRankConfig
    """The whole model's settings."""
    index: int
    layers: int

    def _settings(self, index: int) -> LowRankConfig | None:
        return self.low_rank.of_layer(index) if 0 <= index < self.layers else None

    @cached_property
    def here(self) -> LowRankConfig:
        """The layer's own settings."""
        return self.low_rank.of_layer(self.index)

    @cached_property
    def before(self) -> LowRankConfig | None:
        """Those of the layer before; None for the model's first."""
        return self._settings(self.index - 1)

    @cached_property
    def after(self) -> LowRankConfig | None:
        """Those of the layer after; None for the model's last."""
        return self._settings(self.index + 1)

    @cached_property
    def crosses(self) -> bool:
        """Whether latents of the layer before cross over into this one (LaX), so that it has gates
        and latent norms."""
        return self.here.crossing and self.before is not None and self.before.crossing

    @cached_property
    def hands_on(self) -> bool:
        """Whether this layer's latents cross over into the next."""
        return self.here.crossing and self.after is not None and self.after.crossing

    @cached_property
    def enters_by_sequence(self) -> bool:
        """Whether the layer takes a share of hidden of the residual stream and the one before (or
        the embedding) leaves one of the sequence."""
        follows = self.before is not None and self.before.hidden_sharded
        return self.here.hidden_sharded and not follows

    @cached_property
    def leaves_by_sequence(self) -> bool:
        """Whether the layer has a share of hidden and the next takes one of the sequence."""
        return self.here.hidden_sharded and self.after is not None and not self.after.hidden_sharded
