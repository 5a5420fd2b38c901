"""What a converted model is, whatever format it stands in: its sizes, its settings, its tensors.

Every format is translated to and from this and the canonical names of `docs/checkpoints.md`, so
that two formats never need to know of each other.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

import torch

from boost_layers.config import ATTENTION_PROJECTIONS, PROJECTIONS, LowRankConfig
from boost_layers.initialization import balanced_factors
from boost_layers.place import LayerPlace

EMBEDDING = "embedding.word_embeddings.weight"
FINAL_NORM = "decoder.final_layernorm.weight"
HEAD = "output_layer.weight"
VOCABULARY_TENSORS = (EMBEDDING, HEAD)
"""The tensors with a row for each token, which Megatron pads."""


@dataclass(frozen=True, kw_only=True)
class RopeSettings:
    """Rotary position embedding: θ, and how its frequencies are scaled for longer contexts."""

    theta: float = 10000.0
    kind: Literal["default", "linear", "llama3"] = "default"
    factor: float = 1.0
    """linear: positions are divided by it; llama3: low frequencies are."""
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 8192
    """llama3 only, as the two before it."""


@dataclass(frozen=True, kw_only=True)
class ModelDescription:
    """A LLaMA, full-rank or low-rank, without its weights."""

    vocab_size: int
    """The tokens that exist, without the rows that Megatron pads the vocabulary with."""
    hidden_size: int
    ffn_hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_positions: int
    norm_eps: float
    tied: bool
    """Whether the head is the embedding."""
    dtype: torch.dtype
    rope: RopeSettings = field(default_factory=RopeSettings)
    low_rank: LowRankConfig = field(default_factory=lambda: LowRankConfig(arch="dense"))
    """What decides the function; `arch` is "dense" also where Megatron's own layers compute it.
    Its layout settings mean nothing here."""
    activation_amount: float = 1.0
    """a of φ_a(z) = (1 − a)·z + a·φ(z), for a model whose φ has not fully grown yet."""
    bos_token_id: int | None = None
    eos_token_id: int | tuple[int, ...] | None = None
    pad_token_id: int | None = None
    initializer_range: float = 0.02
    """The standard deviation that new weights would have; transformers keeps it."""

    def __post_init__(self) -> None:
        architecture = self.low_rank.architecture
        if architecture is not None and architecture.combine is not None:
            raise ValueError(
                f"--low-rank-arch {architecture.name}: is no model of another format; "
                "nearest legal value: cola, svd or lax"
            )

    def rank_of(self, projection: str) -> int:
        """The rank of a low-rank projection (`q_proj` …), the same in every low-rank layer."""
        return self.low_rank.rank_of(projection, self.hidden_size)

    def width_of(self, projection: str) -> tuple[int, int]:
        """out and in of a projection of the whole model."""
        hidden, ffn = self.hidden_size, self.ffn_hidden_size
        q, kv = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        return {
            "q_proj": (q, hidden),
            "k_proj": (kv, hidden),
            "v_proj": (kv, hidden),
            "o_proj": (hidden, q),
            "gate_proj": (ffn, hidden),
            "up_proj": (ffn, hidden),
            "down_proj": (hidden, ffn),
        }[projection]

    def is_low_rank(self, layer: int) -> bool:
        """Whether a layer, counted from 0, has factors."""
        return self.low_rank.of_layer(layer).low_rank

    def crosses(self, layer: int) -> bool:
        """Whether a layer, counted from 0, takes latents from the one before it (LaX)."""
        return LayerPlace(self.low_rank, layer, self.num_layers).crosses

    @property
    def identity_activation(self) -> bool:
        """Whether every factorised projection is linear, so that its factors can be multiplied."""
        linear = self.low_rank.activation == "identity" or self.activation_amount == 0.0
        return linear and not self.low_rank.crossing

    def tensors(self) -> dict[str, tuple[int, ...]]:
        """Shape by canonical name, in the model's order; a tied model has no head."""
        vocabulary = (self.vocab_size, self.hidden_size)
        shapes: dict[str, tuple[int, ...]] = {EMBEDDING: vocabulary}
        for layer in range(self.num_layers):
            shapes |= self.layer_tensors(layer)
        shapes[FINAL_NORM] = (self.hidden_size,)
        if not self.tied:
            shapes[HEAD] = vocabulary
        return shapes

    def layer_tensors(self, layer: int) -> dict[str, tuple[int, ...]]:
        """Shape by canonical name of one layer, counted from 0."""
        prefix = f"decoder.layers.{layer}"
        shapes: dict[str, tuple[int, ...]] = {
            f"{prefix}.input_layernorm.weight": (self.hidden_size,)
        }
        for projection in PROJECTIONS:
            if projection == "gate_proj":
                shapes[f"{prefix}.pre_mlp_layernorm.weight"] = (self.hidden_size,)
            whole = f"{prefix}.{module_of(projection)}.{projection}"
            for part, shape in self._parts(layer, projection):
                shapes[f"{whole}.{part}"] = shape
        return shapes

    def _parts(self, layer: int, projection: str) -> Iterator[tuple[str, tuple[int, ...]]]:
        """The tensors of one projection of a layer: last part of the name, and shape."""
        size_out, size_in = self.width_of(projection)
        if not self.is_low_rank(layer):
            yield "weight", (size_out, size_in)
            return
        rank = self.rank_of(projection)
        yield "A", (rank, size_in)
        yield "B", (size_out, rank)
        if not self.crosses(layer):
            return
        if self.low_rank.lax_gate == "tensor":
            left, right = balanced_factors(rank)
            yield "gate_left", (left, left)
            yield "gate_right", (right, right)
        elif self.low_rank.lax_gate == "linear":
            yield "gate_weight", (rank, rank)
            yield "gate_bias", (rank,)
        if self.low_rank.lax_norm != "none":
            yield "norm_weight", (rank,)
        if self.low_rank.lax_norm == "layernorm":
            yield "norm_bias", (rank,)

    def parameter_count(self) -> int:
        """Parameters, the tied head counted once and no padding."""
        return sum(math.prod(shape) for shape in self.tensors().values())


def module_of(projection: str) -> str:
    """The module of a layer that a projection stands in: `self_attention` or `mlp`."""
    return "self_attention" if projection in ATTENTION_PROJECTIONS else "mlp"
