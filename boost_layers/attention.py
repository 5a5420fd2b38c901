"""What happens between the q, k, v up-projections and o's down-projection: RoPE and attention on
this rank's heads."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from megatron.core import tensor_parallel
from megatron.core.models.common.embeddings.yarn_rotary_pos_embedding import (
    _yarn_get_concentration_factor_from_config,
)
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import ModuleSpec, build_module
from torch import Tensor

from boost_layers import ops
from boost_layers.parameters import ProjectionShape

if TYPE_CHECKING:
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.transformer.transformer_config import TransformerConfig

    from boost_layers.config import LowRankConfig
    from boost_layers.projection import Projections


class _Rotary(torch.autograd.Function):
    """Rotary embedding of q and k in place. They and v are `[s, b, h·e]`, and backward gives all
    three the layout that the up-projections' gradients take."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cos: Tensor,
        sin: Tensor,
        head: int,
        interleaved: bool,
    ) -> tuple[Tensor, Tensor, Tensor]:
        ctx.save_for_backward(cos, sin)
        ctx.head, ctx.interleaved = head, interleaved
        heads = [t.unflatten(-1, (-1, head)) for t in (q, k)]
        ops.rotary_(heads, cos, sin, interleaved=interleaved)
        ctx.mark_dirty(q, k)
        return q, k, v

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        heads = [t.unflatten(-1, (-1, ctx.head)) for t in grads]
        turned = ops.rotary_backward(heads, 2, *ctx.saved_tensors, interleaved=ctx.interleaved)
        return *(t.flatten(2) for t in turned), None, None, None, None


class SdpaCoreAttention(MegatronModule):
    """Causal softmax(Q·Kᵀ·scale)·V by PyTorch's `scaled_dot_product_attention`. The interface is
    that of Megatron's `DotProductAttention`, and the number of heads the tensors'."""

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        softmax_scale: float | None = None,
        pg_collection: ProcessGroupCollection | None = None,
        **_: Any,
    ):
        super().__init__(config=config)
        if attn_mask_type != AttnMaskType.causal or attention_type != "self":
            raise ValueError(
                "SdpaCoreAttention computes causal self-attention only, not "
                f"{attn_mask_type} {attention_type}-attention"
            )
        self.softmax_scale = softmax_scale if softmax_scale is not None else config.softmax_scale
        self._causal_mask_shape: torch.Size | None = None

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None = None,
        attn_mask_type: AttnMaskType | None = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: Any = None,
        **_: Any,
    ) -> Tensor:
        """q `[s, b, h, e]`, k and v `[s, b, kv, e]` → `[s, b, h·e]`. The mask is always the causal
        one.

        Args:
            attention_mask: True where a key is hidden, of a shape that broadcasts with
                `[b, 1, s, s]`; looked at in the first call with its shape, and not used.

        Raises:
            ValueError: for another mask than the causal one, a bias and packed sequences.
        """
        if attention_mask is not None and attention_mask.shape != self._causal_mask_shape:
            _require_causal(attention_mask, query.shape[0])
            self._causal_mask_shape = attention_mask.shape
        if attn_mask_type not in (None, AttnMaskType.causal):
            raise ValueError(f"{attn_mask_type}: SdpaCoreAttention has the causal mask only")
        if attention_bias is not None or packed_seq_params is not None:
            raise ValueError("SdpaCoreAttention takes no attention_bias and no packed sequences")
        q, k, v = (t.permute(1, 2, 0, 3) for t in (query, key, value))
        out = F.scaled_dot_product_attention(
            q,
            k,
            v,
            is_causal=True,
            scale=self.softmax_scale,
            enable_gqa=k.shape[1] != q.shape[1],
        )
        return out.permute(2, 0, 1, 3).flatten(2)


def _require_causal(mask: Tensor, length: int) -> None:
    """Raise ValueError unless `mask` hides from each of `length` tokens exactly those after it."""
    if mask.is_meta:
        return
    causal = torch.ones(length, length, dtype=torch.bool, device=mask.device).triu(1)
    if mask.shape[-2:] != causal.shape or not bool((mask.bool() == causal).all()):
        raise ValueError(
            "attention_mask: --core-attention sdpa has the causal mask only; "
            "nearest legal value: None"
        )


class SelfAttention(MegatronModule):
    """The weights of q, k, v and o, and what is computed between them."""

    def __init__(
        self,
        config: TransformerConfig,
        low_rank: LowRankConfig,
        projections: Projections,
        core_attention: ModuleSpec | type,
        layer_number: int,
        prefix: str,
        pg_collection: ProcessGroupCollection,
        crosses: bool = False,
    ):
        super().__init__(config=config)
        hidden, head = config.hidden_size, config.kv_channels
        q_width = config.num_attention_heads * head
        kv_width = config.num_query_groups * head
        # Megatron's buffers hold parameters last to first. A group of weights is one batched GEMM
        # where they lie in the order of their use.
        for name, size_in, size_out in (
            ("v_proj", hidden, kv_width),
            ("k_proj", hidden, kv_width),
            ("q_proj", hidden, q_width),
            ("o_proj", q_width, hidden),
        ):
            rank = low_rank.rank_of(name, hidden)
            shape = ProjectionShape(
                f"{prefix}.{name}",
                size_in,
                size_out,
                rank,
                closes_residual=name == "o_proj",
                crosses=crosses,
            )
            setattr(self, name, projections.weights(shape))
        self.core_attention = build_module(
            core_attention,
            config=config,
            layer_number=layer_number,
            attn_mask_type=AttnMaskType.causal,
            attention_type="self",
            softmax_scale=config.softmax_scale,
            pg_collection=pg_collection,
        )
        self.recompute_core = (
            config.recompute_granularity == "selective"
            and "core_attn" in config.recompute_modules
            and not low_rank.recompute
        )

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        attention_mask: Tensor | None,
        rotary_pos_emb: Tensor | None,
    ) -> Tensor:
        """This rank's heads: q `[s, b, h·e]`, k and v `[s, b, kv·e]` → `[s, b, h·e]`. No
        collective."""
        head = self.config.kv_channels
        if rotary_pos_emb is not None:
            scale = _yarn_get_concentration_factor_from_config(self.config)
            angles = rotary_pos_emb.flatten(1)
            cos = (torch.cos(angles) * scale).to(q.dtype)
            sin = (torch.sin(angles) * scale).to(q.dtype)
            q, k, v = _Rotary.apply(q, k, v, cos, sin, head, self.config.rotary_interleaved)
        q, k, v = (t.unflatten(-1, (-1, head)) for t in (q, k, v))
        if self.recompute_core and self.training:
            return tensor_parallel.checkpoint(self._attend, False, q, k, v, attention_mask)
        return self._attend(q, k, v, attention_mask)

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, attention_mask: Tensor | None) -> Tensor:
        return self.core_attention(q, k, v, attention_mask, attn_mask_type=AttnMaskType.causal)
