"""The weights of one projection: a pair of factors, or one full-rank matrix.

Every projection owns its parameters under their canonical names (`…q_proj.A`), apart from those it
is grouped with, so that grouping, TP size and strategy never show in a checkpoint.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from torch import Tensor, nn

from boost_layers.initialization import (
    balanced_factors,
    cola_std,
    draw_normal,
    draw_truncated_normal,
    draw_uniform,
    shard_of,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch.distributed as dist
    from megatron.core.dist_checkpointing.mapping import ShardedStateDict
    from megatron.core.transformer.transformer_config import TransformerConfig

    from boost_layers.config import LowRankConfig


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
    crosses: bool = False
    """Whether the latent of the layer before crosses over into its own (LaX)."""


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

    def draw(
        self,
        size: tuple[int, int],
        scale: float,
        seed: int,
        name: str,
        distribution: Callable[..., Tensor] = draw_normal,
    ) -> Tensor:
        """A whole tensor drawn by canonical name, N(0, scale²) unless another function of
        `initialization` is given, or memory as it is where the run asked for no initialisation."""
        device = parameter_device(self.config)
        if not self.config.perform_initialization:
            return torch.empty(size, device=device)
        return distribution(size, scale, seed, name, device)

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


class FactorTensors(NamedTuple):
    """This rank's tensors of one low-rank projection."""

    downs: tuple[Tensor, ...]
    """A, or the weights of all down-projections in the architecture's order."""
    B: Tensor
    rank: int
    """r of the whole projection."""
    gate: tuple[Tensor, ...]
    """LaX's: none, E₁ `[p, p]` and E₂ `[q, q]`, or W `[r, r]` and b `[r]`; whole."""
    norm: tuple[Tensor, ...]
    """LaX's: none, γ, or γ and β, `[r]`; whole."""


class Factors(ShardedWeights):
    """A low-rank projection's A `[r, in]` (one for each down-projection of its architecture) and B
    `[out, r]`, sharded along the given axis of the whole tensor, and where latents cross over from
    the layer before (LaX) the gate and the norm of its latent, replicated: every rank computes
    their whole gradients."""

    B: nn.Parameter

    def __init__(
        self,
        config: TransformerConfig,
        shape: ProjectionShape,
        tp_group: dist.ProcessGroup,
        low_rank: LowRankConfig,
        *,
        a_axis: int,
        b_axis: int,
    ):
        super().__init__(config, tp_group)
        architecture = low_rank.architecture
        assert architecture is not None
        self.rank = shape.rank
        self.seed, self.name = low_rank.seed, shape.name
        self.down_names = architecture.downs
        std = cola_std(shape.in_features, shape.out_features, shape.rank)
        down_size = shape.rank, shape.in_features
        for factor, size, axis in (
            *((name, down_size, a_axis) for name in self.down_names),
            ("B", (shape.out_features, shape.rank), b_axis),
        ):
            whole = self.draw(size, std, low_rank.seed, f"{shape.name}.{factor}")
            self.add_parameter(factor, whole, axis)
        self.gate_names: tuple[str, ...] = ()
        self.norm_names: tuple[str, ...] = ()
        if shape.crosses:
            self._add_gate(low_rank.lax_gate)
            self._add_norm(low_rank.lax_norm)

    def _add_gate(self, gate: str) -> None:
        """Tensor gates Kaiming-uniform, linear ones N(0, 0.02²) cut at two, and no bias, as the
        released LaX code has them."""
        if gate == "tensor":
            self.gate_names = "gate_left", "gate_right"
            for name, side in zip(self.gate_names, balanced_factors(self.rank), strict=True):
                bound = math.sqrt(6.0 / side)
                self._add_drawn(name, (side, side), bound, draw_uniform)
        elif gate == "linear":
            self.gate_names = "gate_weight", "gate_bias"
            self._add_drawn("gate_weight", (self.rank, self.rank), 0.02, draw_truncated_normal)
            self.add_parameter("gate_bias", self._filled(0.0), None)

    def _add_norm(self, norm: str) -> None:
        names = {"none": (), "rmsnorm": ("norm_weight",), "layernorm": ("norm_weight", "norm_bias")}
        self.norm_names = names[norm]
        for name, value in zip(self.norm_names, (1.0, 0.0), strict=False):
            self.add_parameter(name, self._filled(value), None)

    def _add_drawn(
        self, name: str, size: tuple[int, int], scale: float, distribution: Callable[..., Tensor]
    ) -> None:
        whole = self.draw(size, scale, self.seed, f"{self.name}.{name}", distribution)
        self.add_parameter(name, whole, None)

    def _filled(self, value: float) -> Tensor:
        return torch.full((self.rank,), value, device=parameter_device(self.config))

    def forward(self) -> FactorTensors:
        """This rank's tensors."""
        downs, gate, norm = (
            tuple(getattr(self, name) for name in names)
            for names in (self.down_names, self.gate_names, self.norm_names)
        )
        return FactorTensors(downs, self.B, self.rank, gate, norm)


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
