"""Bottleneck-aware tensor parallelism: the boundary lies at the latent.

The residual stream is `[s, b, d/T]`, sharded along hidden. A down-projection is row-parallel and
ends in one all-reduce of the r-wide latent; an up-projection is column-parallel and starts from it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from torch import Tensor, nn

from boost_layers.kept import KeptTokens
from boost_layers.latent import Latent, Reduced, ResidualSource
from boost_layers.layer_latents import LayerLatents
from boost_layers.mappings import hidden_to_sequence, sequence_to_hidden
from boost_layers.norm import NormWeight
from boost_layers.parameters import Factors, ProjectionShape
from boost_layers.projection.column_up import up
from boost_layers.projection.row_down import (
    NormSettings,
    down,
    norm_down,
    split_runs,
)
from boost_layers.recompute import segment

if TYPE_CHECKING:
    import torch.distributed as dist
    from megatron.core.transformer.transformer_config import TransformerConfig

    from boost_layers.config import LowRankConfig


class BtpProjections(nn.Module):
    """How a layer's projections are laid out and computed under BTP; holds no parameters."""

    def __init__(
        self, config: TransformerConfig, low_rank: LowRankConfig, tp_group: dist.ProcessGroup
    ):
        super().__init__()
        self.config = config
        self.low_rank = low_rank
        self.tp_group = tp_group
        self.norm_settings = NormSettings(
            config.hidden_size, config.layernorm_epsilon, low_rank.norm == "online", tp_group
        )

    def weights(self, shape: ProjectionShape) -> Factors:
        """A sharded on its input, B on its output axis."""
        return Factors(self.config, shape, self.tp_group, self.low_rank, a_axis=1, b_axis=0)

    def norm(self) -> NormWeight:
        """γ `[d/T]`."""
        return NormWeight(self.config, self.config.hidden_size, self.tp_group, sharded=True)

    def enter(self, x: Tensor, *, convert: bool) -> Tensor:
        """`[s/T, b, d]` → `[s, b, d/T]`: one all-to-all where the tensor holds a share of the
        sequence (`convert`), else a view, since it holds a share of hidden already."""
        if convert:
            return sequence_to_hidden(x, self.tp_group)
        tp_size = self.tp_group.size()
        return x.view(x.shape[0] * tp_size, x.shape[1], x.shape[2] // tp_size)

    def leave(self, x: Tensor, delta: Tensor | None, *, convert: bool) -> Tensor:
        """x + Δ, `[s, b, d/T]` → `[s/T, b, d]`, the shape Megatron passes between layers and
        pipeline stages: one all-to-all where a full-rank layer follows (`convert`), else a view."""
        assert delta is not None
        x = delta.add_(x)
        if convert:
            return hidden_to_sequence(x, self.tp_group)
        tp_size = self.tp_group.size()
        return x.view(x.shape[0] // tp_size, x.shape[1], x.shape[2] * tp_size)

    def sublayer(
        self,
        x: Tensor,
        delta: Tensor | None,
        norm: NormWeight,
        inputs: Sequence[Factors],
        between: Callable[..., Tensor],
        output: Factors,
        latents: LayerLatents,
    ) -> tuple[Tensor, Tensor]:
        """x + Δ and output(between(inputs(norm(x + Δ)))), attention or MLP: `[s, b, d/T]` each. The
        next norm takes their sum, so that it is one pass with the norm's statistics.

        Two all-reduces forward and two backward (one each per projection without grouping).
        `between` takes one `[s, b, o/T]` per input and gives `[s, b, k/T]`. With latent
        checkpointing it is computed again in backward.
        """
        grouped = self.low_rank.grouping
        factors = [projection() for projection in inputs]
        groups = [len(factors)] if grouped else [1] * len(factors)
        downs = [weight for each in factors for weight in each.downs]
        kept = [self._kept() for _ in groups]
        x, reduced = norm_down(
            x,
            delta,
            norm(),
            downs,
            [length * len(downs) // len(factors) for length in groups],
            self.norm_settings,
            kept=[] if self.norm_settings.online else [each for each in kept if each is not None],
            source=latents.residual_source,
        )
        b_weights = [each.B for each in factors]
        opened = [
            latents.next(group, run, share)
            for group, run, share in zip(reduced, split_runs(factors, groups), kept, strict=True)
        ]

        def expand(opened: Sequence[Latent], b_weights: Sequence[Tensor]) -> Tensor:
            outputs: list[Tensor] = []
            for latent, members in zip(opened, split_runs(b_weights, groups), strict=True):
                outputs += up(latent, members, self.tp_group)
            return between(*outputs)

        closing = output()
        if self.low_rank.recompute:
            first = len(latents.current) == len(groups)
            u = segment(expand, opened, b_weights, closing.downs, self.tp_group, opens_layer=first)
        else:
            u = down(expand(opened, b_weights), closing.downs, self.tp_group)
        latent = latents.next(Reduced(u), [closing], self._kept())
        if self.low_rank.recompute_residual:
            latents.residual_source = ResidualSource(x, latent, closing.B)
        (delta,) = up(latent, [closing.B], self.tp_group)
        return x, delta

    def _kept(self) -> KeptTokens | None:
        """Where a latent's share is kept, if latents are not kept whole."""
        if self.low_rank.recompute_shard and self.tp_group.size() > 1:
            return KeptTokens(self.tp_group)
        return None
