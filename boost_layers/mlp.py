"""What happens between the gate and up projections and down's down-projection."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from megatron.core.transformer.module import MegatronModule
from torch import Tensor

from boost_layers import ops
from boost_layers.mappings import as_tokens
from boost_layers.parameters import ProjectionShape

if TYPE_CHECKING:
    from megatron.core.transformer.transformer_config import TransformerConfig

    from boost_layers.config import LowRankConfig
    from boost_layers.projection import Projections


class _GatedProduct(torch.autograd.Function):
    """The product of gate and up."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, kind: str) -> Tensor:
        ctx.save_for_backward(gate, up)
        ctx.kind = kind
        return ops.gated_product(as_tokens(gate), as_tokens(up), kind).view(gate.shape)

    @staticmethod
    def backward(ctx: Any, dm: Tensor) -> tuple[Tensor, Tensor, None]:
        gate, up = ctx.saved_tensors
        dgate, dup = ops.gated_product_backward(
            as_tokens(dm), as_tokens(gate), as_tokens(up), ctx.kind
        )
        return dgate.view(gate.shape), dup.view(gate.shape), None


class GatedMLP(MegatronModule):
    """The weights of gate, up and down, and the product of gate and up."""

    def __init__(
        self,
        config: TransformerConfig,
        low_rank: LowRankConfig,
        projections: Projections,
        prefix: str,
        crosses: bool = False,
    ):
        super().__init__(config=config)
        hidden, ffn = config.hidden_size, config.ffn_hidden_size
        # In the order of q, k and v, for the same reason (`attention.SelfAttention`).
        for name, size_in, size_out in (
            ("up_proj", hidden, ffn),
            ("gate_proj", hidden, ffn),
            ("down_proj", ffn, hidden),
        ):
            rank = low_rank.rank_of(name, hidden)
            shape = ProjectionShape(
                f"{prefix}.{name}",
                size_in,
                size_out,
                rank,
                closes_residual=name == "down_proj",
                crosses=crosses,
            )
            setattr(self, name, projections.weights(shape))
        self.kind = low_rank.mlp_kind

    def forward(self, gate: Tensor, up: Tensor) -> Tensor:
        """SiLU(gate)∘up or gate∘up: `[s, b, f/T]` each → `[s, b, f/T]` (whole f under vanilla). No
        collective; only gate and up are kept."""
        return _GatedProduct.apply(gate, up, self.kind)
