"""What every figure of the accounting is computed from: the model's sizes and its layout.

Legend of the package: n = s·b tokens of a micro-batch, s sequence length, b micro-batch size, d
hidden, f FFN width, h heads, q = heads·head size, kv = KV heads·head size, r rank, L layers, V
vocabulary rows, T tensor-, P pipeline-, D data-parallel size. A *layer* is named by its index in
the whole model, from 0; a *stage* is what one pipeline rank holds, all its virtual stages together.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Literal

import torch

from boost_layers.architecture import Architecture
from boost_layers.config import LowRankConfig
from boost_layers.place import LayerPlace
from boost_layers.validation import ModelSizes, validate_sizes

Strategy = Literal["dense", "vanilla", "btp"]
Recompute = Literal["none", "full", "core_attention"]


@dataclass(frozen=True)
class Projection:
    """One of a layer's seven projections, before sharding: y `[out]` = W·x `[in]`, or B·z with z
    made of the latents of its down-projections, φ(A·x)."""

    name: str
    """Within the layer, e.g. `self_attention.q_proj`."""
    in_features: int
    out_features: int
    rank: int | None
    """None where the projection is full-rank."""
    downs: tuple[str, ...] = ()
    """The names of its down-projections' weights."""

    @property
    def short_name(self) -> str:
        """Without the module, e.g. `q_proj`."""
        return self.name.rpartition(".")[2]

    @property
    def weights(self) -> int:
        """Number of weights: in·out, or with m down-projections r·(m·in + out)."""
        if self.rank is None:
            return self.in_features * self.out_features
        return self.rank * (len(self.downs) * self.in_features + self.out_features)

    @property
    def latent_width(self) -> int:
        """Numbers of a token's latents side by side, m·r; 0 where the projection is full-rank."""
        return len(self.downs) * (self.rank or 0)


@dataclass(frozen=True, kw_only=True)
class Model:
    """The sizes of a model, whatever its layout, and the settings of its projections.

    Raises:
        ValueError: on construction, for `arch` "none", whose layers are Megatron's own.
    """

    hidden_size: int
    ffn_hidden_size: int
    num_attention_heads: int
    num_query_groups: int
    """KV heads."""
    kv_channels: int
    """The size of a head."""
    num_layers: int
    vocab_size: int
    """The number of tokens that exist."""
    padded_vocab_size: int
    """Rows of the embedding and of the head, as Megatron pads them."""
    tied: bool
    """Whether the head is the embedding."""
    low_rank: LowRankConfig
    rotary_channels: int | None = None
    """Channels of a head that RoPE turns; None: all; 0: no rotary embedding."""

    def __post_init__(self) -> None:
        if self.low_rank.arch == "none":
            raise ValueError(
                "--low-rank-arch none: Megatron accounts for its own layers; "
                "nearest legal value: dense"
            )

    @property
    def query_width(self) -> int:
        """q: heads · head size."""
        return self.num_attention_heads * self.kv_channels

    @property
    def key_width(self) -> int:
        """kv: KV heads · head size."""
        return self.num_query_groups * self.kv_channels

    @property
    def rotated_channels(self) -> int:
        """Channels of a head that RoPE turns."""
        return self.kv_channels if self.rotary_channels is None else self.rotary_channels

    def settings(self, layer: int) -> LowRankConfig:
        """The settings of one layer, which are "dense" where `layers` leaves it out."""
        return self.low_rank.of_layer(layer)

    def strategy(self, layer: int) -> Strategy:
        """The tensor-parallel strategy of one layer."""
        settings = self.settings(layer)
        if not settings.low_rank:
            return "dense"
        return "btp" if settings.tp == "btp" else "vanilla"

    def place(self, layer: int) -> LayerPlace:
        """Where a layer stands among the others."""
        return LayerPlace(self.low_rank, layer, self.num_layers)

    def latent_width(self, layer: int) -> int:
        """Numbers of a token's latents in a layer; 0 where its projections are full-rank."""
        return sum(projection.latent_width for projection in self.projections(layer))

    def projections(self, layer: int) -> tuple[Projection, ...]:
        """q, k, v, o, gate, up, down of one layer."""
        return _projections(self, self.settings(layer).architecture)

    def groups(self, layer: int) -> tuple[tuple[Projection, ...], ...]:
        """The projections that share their input: (q, k, v), (o), (gate, up), (down)."""
        q, k, v, o, gate, up, down = self.projections(layer)
        return (q, k, v), (o,), (gate, up), (down,)

    def dense_equivalent(self) -> Model:
        """The full-rank model of the same sizes."""
        return replace(self, low_rank=LowRankConfig(arch="dense"))


@lru_cache(maxsize=256)
def _projections(model: Model, architecture: Architecture | None) -> tuple[Projection, ...]:
    """A planner asks for them once for every layer of thousands of layouts."""
    d, f = model.hidden_size, model.ffn_hidden_size
    return tuple(
        Projection(
            f"{block}.{name}",
            size_in,
            size_out,
            None if architecture is None else model.low_rank.rank_of(name, d),
            () if architecture is None else architecture.downs,
        )
        for block, name, size_in, size_out in (
            ("self_attention", "q_proj", d, model.query_width),
            ("self_attention", "k_proj", d, model.key_width),
            ("self_attention", "v_proj", d, model.key_width),
            ("self_attention", "o_proj", model.query_width, d),
            ("mlp", "gate_proj", d, f),
            ("mlp", "up_proj", d, f),
            ("mlp", "down_proj", f, d),
        )
    )


@dataclass(frozen=True, kw_only=True)
class Layout:
    """How a model is laid out over ranks and trained."""

    sequence_length: int
    micro_batch_size: int
    micro_batches: int = 1
    """Of one data-parallel rank in one iteration."""
    tensor_parallel: int = 1
    pipeline_parallel: int = 1
    virtual_stages: int = 1
    """Model chunks of a pipeline rank (interleaved pipeline)."""
    data_parallel: int = 1
    stage_layers: tuple[tuple[tuple[int, ...], ...], ...] | None = None
    """Layers by pipeline rank and virtual stage; None: spread evenly."""
    sequence_parallel: bool = False
    """Megatron's sequence parallelism; under BTP the borders have it whatever this says."""
    dtype: torch.dtype = torch.bfloat16
    """Of weights and activations."""
    gradients_in_fp32: bool = True
    """Whether gradients are accumulated and reduced in fp32 (they are for fp32 weights)."""
    distributed_optimizer: bool = False
    """Whether optimiser state is spread over the data-parallel ranks (ZeRO-1)."""
    recompute: Recompute = "none"
    """Megatron's recompute; that of the latents is `LowRankConfig.recompute`."""
    recompute_method: Literal["uniform", "block"] = "uniform"
    """With full recompute: every `recompute_layers` layers are one unit, or the first
    `recompute_layers` layers of a virtual stage are a unit each and the others are kept."""
    recompute_layers: int = 1

    @property
    def gpus(self) -> int:
        """T·P·D."""
        return self.tensor_parallel * self.pipeline_parallel * self.data_parallel

    @property
    def tokens(self) -> int:
        """n: tokens of a micro-batch."""
        return self.sequence_length * self.micro_batch_size

    def chunks(self, model: Model, pp_rank: int) -> tuple[tuple[int, ...], ...]:
        """The layers of a pipeline rank, by virtual stage.

        Raises:
            ValueError: where the layers do not divide over the virtual stages.
        """
        if self.stage_layers is not None:
            return self.stage_layers[pp_rank]
        stages = self.pipeline_parallel * self.virtual_stages
        if model.num_layers % stages:
            raise ValueError(
                f"--num-layers {model.num_layers}: is split over {stages} pipeline stages; "
                f"nearest legal value: {max(1, round(model.num_layers / stages)) * stages}"
            )
        length = model.num_layers // stages
        starts = [
            (virtual * self.pipeline_parallel + pp_rank) * length
            for virtual in range(self.virtual_stages)
        ]
        return tuple(tuple(range(start, start + length)) for start in starts)

    def opens_stage(self, model: Model, layer: int) -> bool:
        """Whether a layer is the first of a (virtual) stage other than the model's first."""
        stages = range(self.pipeline_parallel)
        firsts = [chunk[:1] for stage in stages for chunk in self.chunks(model, stage)]
        return layer > 0 and (layer,) in firsts

    def layers(self, model: Model, pp_rank: int) -> tuple[int, ...]:
        """All layers of a pipeline rank."""
        return tuple(layer for chunk in self.chunks(model, pp_rank) for layer in chunk)

    def has_embedding(self, pp_rank: int) -> bool:
        """Whether this pipeline rank looks tokens up."""
        return pp_rank == 0

    def has_head(self, pp_rank: int) -> bool:
        """Whether this pipeline rank computes logits and loss."""
        return pp_rank == self.pipeline_parallel - 1

    def split_tokens(self, model: Model) -> int:
        """Into how many parts the tokens are split at the borders of the stack of layers: T with
        sequence parallelism, which BTP always has there, else 1."""
        split = model.low_rank.hidden_sharded or self.sequence_parallel
        return self.tensor_parallel if split else 1


def validate_layout(model: Model, layout: Layout) -> None:
    """Raise ValueError, by flag, value and nearest legal value, for a model that the layout cannot
    divide."""
    validate_sizes(
        model.low_rank,
        ModelSizes(
            hidden_size=model.hidden_size,
            ffn_hidden_size=model.ffn_hidden_size,
            num_attention_heads=model.num_attention_heads,
            num_query_groups=model.num_query_groups,
            tensor_parallel=layout.tensor_parallel,
            num_layers=model.num_layers,
            seq_length=layout.sequence_length,
        ),
    )
    layout.chunks(model, 0)
