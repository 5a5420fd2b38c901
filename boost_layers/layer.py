"""One transformer layer for full-rank, vanilla low-rank and BTP.

Under BTP it is the table of the design: norm and qkv down | qkv up, attention, o down | o up,
residual, norm and gate/up down | gate/up up, product, down's down | down's up, residual; a bar is
one all-reduce of a latent.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import ModuleSpec, build_module
from megatron.core.transformer.transformer_block import get_num_layers_to_build
from megatron.core.transformer.transformer_layer import (
    BaseTransformerLayer,
    get_transformer_layer_offset,
)
from megatron.core.utils import make_viewless_tensor

from boost_layers.carry import latent_groups, pack, unpack, width_between_stages
from boost_layers.communication import LEDGER
from boost_layers.latent import LayerLatents
from boost_layers.place import LayerPlace

if TYPE_CHECKING:
    from megatron.core.transformer.transformer_config import TransformerConfig
    from torch import Tensor

    from boost_layers.config import LowRankConfig
    from boost_layers.latent import Latent


LatentObserver = Callable[["LowRankLayer", Sequence["Latent"]], None]
"""Takes a layer and the latents of one pass through it, in the order in which they arose."""


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
        # A layer's keys in a checkpoint are its own. Megatron would stack all layers' tensors of a
        # name into one, which layers of different ranks or architectures cannot share.
        config.hetereogenous_dist_checkpoint = True
        groups = pg_collection or ProcessGroupCollection.use_mpu_process_groups(["tp", "pp", "cp"])
        offset = get_transformer_layer_offset(config, vp_stage, groups.pp.rank())
        in_stage = get_num_layers_to_build(config, vp_stage, groups.pp.rank())
        self.layer_number = layer_number + offset
        index = self.layer_number - 1
        self.place = place = LayerPlace(low_rank, index, config.num_layers)
        self.low_rank = place.here
        self.activation_amount = self.low_rank.activation_amount(0)
        """a of φ_a(z) = (1 − a)·z + a·φ(z); `boost_layers.annealing` sets it step by step."""
        self.latent_observer: LatentObserver | None = None
        """Sees the latents at the end of each forward; set by `boost_layers.observation`."""
        self.packed_by_stage = low_rank.crossing and layer_number == 1 and place.before is not None
        """Whether the input comes from another stage, with columns for latents."""
        self.packs_for_stage = (
            low_rank.crossing and layer_number == in_stage and place.after is not None
        )
        """Whether the output goes to another stage."""
        self.tp_group = groups.tp
        prefix = f"decoder.layers.{index}"

        self.projections = build_module(
            submodules.projections, config=config, low_rank=self.low_rank, tp_group=groups.tp
        )
        self.enters_by_sequence = place.enters_by_sequence
        """Whether the first hidden-sharded layer gets a share of the sequence and must turn it into
        one of hidden; a builder that has done so already says False."""
        self.input_layernorm = self.projections.norm()
        self.self_attention = build_module(
            submodules.self_attention,
            config=config,
            low_rank=self.low_rank,
            projections=self.projections,
            core_attention=submodules.core_attention,
            layer_number=self.layer_number,
            prefix=f"{prefix}.self_attention",
            pg_collection=groups,
            crosses=place.crosses,
        )
        self.pre_mlp_layernorm = self.projections.norm()
        self.mlp = build_module(
            submodules.mlp,
            config=config,
            low_rank=self.low_rank,
            projections=self.projections,
            prefix=f"{prefix}.mlp",
            crosses=place.crosses,
        )

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        context: Any = None,
        rotary_pos_emb: Tensor | None = None,
        inference_context: Any = None,
        packed_seq_params: Any = None,
        **others: Any,
    ) -> tuple[Tensor, Any]:
        """`[s/T, b, d]` (or `[s, b, d]`) → the same shape.

        `context`, which Megatron hands from layer to layer untouched, carries LaX's latents within
        a pipeline stage; between stages and through full recomputation they are columns of
        `hidden_states` (`boost_layers.carry`).

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
        projections, attention, mlp = self.projections, self.self_attention, self.mlp
        x, previous = self._arrive(hidden_states, context)
        latents = LayerLatents(self.low_rank, previous, self.activation_amount)
        x = projections.enter(x, convert=self.enters_by_sequence)

        x, delta = projections.sublayer(
            x,
            None,
            self.input_layernorm,
            inputs=(attention.q_proj, attention.k_proj, attention.v_proj),
            between=partial(
                attention, attention_mask=attention_mask, rotary_pos_emb=rotary_pos_emb
            ),
            output=attention.o_proj,
            latents=latents,
        )
        x, delta = projections.sublayer(
            x,
            delta,
            self.pre_mlp_layernorm,
            inputs=(mlp.gate_proj, mlp.up_proj),
            between=mlp,
            output=mlp.down_proj,
            latents=latents,
        )

        if self.latent_observer is not None:
            self.latent_observer(self, latents.current)
        x = projections.leave(x, delta, convert=self.place.leaves_by_sequence)
        x, context = self._depart(x, latents.current)
        # A pipeline stage may not hand over a view: the schedule frees what it has sent.
        return make_viewless_tensor(x, requires_grad=True, keep_graph=True), context

    def _arrive(self, x: Tensor, context: Any) -> tuple[Tensor, Sequence[Latent] | None]:
        """The residual stream, and the latents of the layer before where they cross over."""
        place, hidden_size = self.place, self.config.hidden_size
        if self.packed_by_stage and not place.crosses:
            return x[..., :hidden_size].contiguous(), None
        if self.packed_by_stage or (place.crosses and self._packs_all):
            return unpack(
                x,
                hidden_size,
                latent_groups(self.low_rank, hidden_size),
                self.tp_group,
                by_rows=self.low_rank.hidden_sharded,
                share=self.packed_by_stage,
            )
        return x, context if place.crosses else None

    def _depart(self, x: Tensor, latents: Sequence[Latent]) -> tuple[Tensor, Any]:
        """The residual stream, with the latents in it where they cannot go beside it."""
        place, group = self.place, self.tp_group
        by_rows = self.low_rank.hidden_sharded
        if self.packs_for_stage and not place.hands_on:
            # Every stage's tensor has the same width, also where nothing crosses over.
            width = width_between_stages(place.low_rank, self.config.hidden_size, group.size())
            return torch.cat([x, x.new_zeros(*x.shape[:-1], width)], dim=-1), None
        if self.packs_for_stage or (place.hands_on and self._packs_all):
            packed = pack(x, latents, group, by_rows=by_rows, share=self.packs_for_stage)
            return packed, None
        return x, latents if place.hands_on else None

    @property
    def _packs_all(self) -> bool:
        """Whether latents are packed within a stage too: full recomputation passes on one tensor
        and drops the context."""
        return self.config.recompute_granularity == "full"
