"""The weights of one projection: a pair of factors, or one full-rank matrix.

Every projection owns its parameters under their canonical names (`…q_proj.A`), apart from those it
is grouped with, so that grouping, TP size and strategy never show in a checkpoint.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from torch import Tensor, nn

from boost_layers.initialization import cola_std, draw_normal, shard_of

if TYPE_CHECKING:
    import torch.distributed as dist
    from megatron.core.dist_checkpointing.mapping import ShardedStateDict
    from megatron.core.transformer.transformer_config import TransformerConfig


@dataclass(frozen=True)
class ProjectionShape:
    """A projection of the whole model, before sharding: y `[out]` = W·x `[in]`, or B·φ(A·x)."""

    name: str
    """The canonical name, e.g. `decoder.layers.0.self_attention.q_proj`."""
    in_features: int
    out_features: int
    rank: int
    closes_residual: bool = False
    """Whether its output is added to the residual stream (o and down)."""


def parameter_device(config: TransformerConfig) -> torch.device:
    """Where Megatron would put a new parameter."""
    if config.init_model_with_meta_device:
        return torch.device("meta")
    if config.use_cpu_initialization or not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())


class ShardedWeights(MegatronModule):
    """Parameters of which each rank holds a `1/T` slice along a known axis, with the attributes by
    which Megatron's gradient norm counts them once, and their share of a distributed checkpoint.

    A user of the parameters gets them by calling the module, never by attribute: Megatron waits for
    the distributed optimiser's all-gather of a parameter in its module's forward pre-hook.
    """

    def __init__(self, config: TransformerConfig, tp_group: dist.ProcessGroup):
        super().__init__(config=config)
        self.tp_group = tp_group
        self.shard_axes: dict[str, int] = {}

    def add_parameter(self, name: str, whole: Tensor, axis: int | None) -> None:
        """Register this rank's shard of `whole` along `axis`; None: replicated."""
        shard = whole
        if axis is not None:
            shard = shard_of(whole, axis, self.tp_group.rank(), self.tp_group.size())
        parameter = nn.Parameter(shard.to(self.config.params_dtype, copy=True).contiguous())
        if axis is not None:
            set_tensor_model_parallel_attributes(parameter, True, axis, 1)
            self.shard_axes[name] = axis
        self.register_parameter(name, parameter)

    def draw(self, size: tuple[int, int], std: float, seed: int, name: str) -> Tensor:
        """A whole tensor N(0, std²) by canonical name, or memory as it is where the run asked for
        no initialisation."""
        device = parameter_device(self.config)
        if not self.config.perform_initialization:
            return torch.empty(size, device=device)
        return draw_normal(size, std, seed, name, device)

    def sharded_state_dict(
        self,
        prefix: str = "",
        sharded_offsets: tuple[tuple[int, int, int], ...] = (),
        metadata: dict[str, Any] | None = None,
    ) -> ShardedStateDict:
        """Each parameter as a `ShardedTensor` along its own axis. (`MegatronModule`'s default takes
        every parameter for replicated and corrupts the weights without a word.)"""
        return make_sharded_tensors_for_checkpoint(
            self.state_dict(prefix="", keep_vars=True),
            prefix,
            self.shard_axes,
            sharded_offsets,
            tp_group=self.tp_group,
            dp_cp_group=(metadata or {}).get("dp_cp_group"),
        )


class Factors(ShardedWeights):
    """A low-rank projection's A `[r, in]` and B `[out, r]`, each sharded along the given axis of
    the whole tensor."""

    A: nn.Parameter
    B: nn.Parameter

    def __init__(
        self,
        config: TransformerConfig,
        shape: ProjectionShape,
        tp_group: dist.ProcessGroup,
        seed: int,
        *,
        a_axis: int,
        b_axis: int,
    ):
        super().__init__(config, tp_group)
        std = cola_std(shape.in_features, shape.out_features, shape.rank)
        for factor, size, axis in (
            ("A", (shape.rank, shape.in_features), a_axis),
            ("B", (shape.out_features, shape.rank), b_axis),
        ):
            self.add_parameter(factor, self.draw(size, std, seed, f"{shape.name}.{factor}"), axis)

    def forward(self) -> tuple[Tensor, Tensor]:
        """A and B, this rank's shards."""
        return self.A, self.B


class FullRankWeight(ShardedWeights):
    """A full-rank projection's weight `[out, in]`, sharded along the given axis; initialised as
    Megatron does, N(0, init_method_std²), divided by sqrt(2·L) where it closes a residual."""

    weight: nn.Parameter

    def __init__(
        self,
        config: TransformerConfig,
        shape: ProjectionShape,
        tp_group: dist.ProcessGroup,
        seed: int,
        *,
        axis: int,
    ):
        super().__init__(config, tp_group)
        std = config.init_method_std
        if shape.closes_residual:
            std /= (2.0 * config.num_layers) ** 0.5
        size = (shape.out_features, shape.in_features)
        self.add_parameter("weight", self.draw(size, std, seed, f"{shape.name}.weight"), axis)

    def forward(self) -> Tensor:
        """The weight, this rank's shard."""
        return self.weight
