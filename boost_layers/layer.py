"""One transformer layer for full-rank, vanilla low-rank and BTP.

Under BTP it is the table of the design: norm and qkv down | qkv up, attention, o down | o up,
residual, norm and gate/up down | gate/up up, product, down's down | down's up, residual; a bar is
one all-reduce of a latent.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import ModuleSpec, build_module
from megatron.core.transformer.transformer_layer import (
    BaseTransformerLayer,
    get_transformer_layer_offset,
)
from megatron.core.utils import make_viewless_tensor

from boost_layers.communication import LEDGER

if TYPE_CHECKING:
    from megatron.core.transformer.transformer_config import TransformerConfig
    from torch import Tensor

    from boost_layers.config import LowRankConfig


@dataclass
class LowRankLayerSubmodules:
    """What a layer is made of; replace a member to change one part, as with Megatron's
    `TransformerLayerSubmodules`."""

    projections: ModuleSpec | type
    """How projections are sharded and computed: one of `boost_layers.projection`."""
    self_attention: ModuleSpec | type
    core_attention: ModuleSpec | type
    mlp: ModuleSpec | type


class LowRankLayer(MegatronModule, BaseTransformerLayer):
    """A pre-norm LLaMA layer whose projections are laid out by `submodules.projections`.

    Layers pass `[s/T, b, d]` (BTP, by a view, and full-rank with sequence parallelism) or
    `[s, b, d]`.
    """

    def __init__(
        self,
        config: TransformerConfig,
        submodules: LowRankLayerSubmodules,
        low_rank: LowRankConfig,
        layer_number: int = 1,
        pg_collection: ProcessGroupCollection | None = None,
        vp_stage: int | None = None,
    ):
        super().__init__(config=config)
        groups = pg_collection or ProcessGroupCollection.use_mpu_process_groups(["tp", "pp", "cp"])
        offset = get_transformer_layer_offset(config, vp_stage, groups.pp.rank())
        self.layer_number = layer_number + offset
        prefix = f"decoder.layers.{self.layer_number - 1}"

        self.projections = build_module(
            submodules.projections, config=config, low_rank=low_rank, tp_group=groups.tp
        )
        self.input_layernorm = self.projections.norm()
        self.self_attention = build_module(
            submodules.self_attention,
            config=config,
            low_rank=low_rank,
            projections=self.projections,
            core_attention=submodules.core_attention,
            layer_number=self.layer_number,
            prefix=f"{prefix}.self_attention",
            pg_collection=groups,
        )
        self.pre_mlp_layernorm = self.projections.norm()
        self.mlp = build_module(
            submodules.mlp,
            config=config,
            low_rank=low_rank,
            projections=self.projections,
            prefix=f"{prefix}.mlp",
        )

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        context: Tensor | None = None,
        rotary_pos_emb: Tensor | None = None,
        inference_context: Any = None,
        packed_seq_params: Any = None,
        **others: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """`[s/T, b, d]` (or `[s, b, d]`) → the same shape, and `context` untouched.

        Raises:
            ValueError: for inference with a KV cache, for packed sequences, and for any other
                input of Megatron's layers (a bias or padding mask of attention, …).
        """
        if inference_context is not None or packed_seq_params is not None:
            what = "a KV cache" if inference_context is not None else "packed sequences"
            raise ValueError(f"low-rank layers do not support {what} yet")
        for name, value in others.items():
            if value is not None:
                raise ValueError(f"low-rank layers do not take {name}")
        LEDGER.enter_layer()
        attention, mlp = self.self_attention, self.mlp
        x = self.projections.enter(hidden_states, first=self.layer_number == 1)

        x, (q, k, v) = self.projections.project_in(
            x, self.input_layernorm, (attention.q_proj, attention.k_proj, attention.v_proj)
        )
        heads = attention(q, k, v, attention_mask, rotary_pos_emb)
        x = self.projections.project_out(heads, attention.o_proj, residual=x)

        x, (gate, up) = self.projections.project_in(
            x, self.pre_mlp_layernorm, (mlp.gate_proj, mlp.up_proj)
        )
        x = self.projections.project_out(mlp(gate, up), mlp.down_proj, residual=x)

        # A pipeline stage may not hand over a view: the schedule frees what it has sent.
        x = make_viewless_tensor(self.projections.leave(x), requires_grad=True, keep_graph=True)
        return x, context
