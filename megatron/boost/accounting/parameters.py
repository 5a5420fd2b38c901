"""Parameters: every tensor of a model by name, shape and sharded axis, and their numbers.

The counts are sums over the same tensors that a rank's model holds, so that shapes, parameters and
bytes cannot disagree.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

from boost_layers.initialization import balanced_factors
from megatron.boost.accounting.sizes import Layout, Model


@dataclass(frozen=True)
class ShardedShape:
    """A whole tensor and the axis along which tensor parallelism splits it (None: replicated)."""

    shape: tuple[int, ...]
    axis: int | None

    @property
    def numbers(self) -> int:
        """Of the whole tensor."""
        return math.prod(self.shape)

    def on_rank(self, tensor_parallel: int) -> tuple[int, ...]:
        """The shape of one rank's shard."""
        return tuple(
            size // tensor_parallel if axis == self.axis else size
            for axis, size in enumerate(self.shape)
        )


Tensors = dict[str, ShardedShape]


def layer_tensors(model: Model, layer: int) -> Tensors:
    """Every parameter of one layer by its name within the layer."""
    strategy = model.strategy(layer)
    d = model.hidden_size
    norm = ShardedShape((d,), 0 if strategy == "btp" else None)
    tensors = {"input_layernorm.weight": norm, "pre_mlp_layernorm.weight": norm}
    for projection in model.projections(layer):
        size_in, size_out, rank = (
            projection.in_features,
            projection.out_features,
            projection.rank,
        )
        if rank is None:
            closes_residual = projection.name.endswith(("o_proj", "down_proj"))
            axis = 1 if closes_residual else 0
            tensors[f"{projection.name}.weight"] = ShardedShape((size_out, size_in), axis)
            continue
        a_axis, b_axis = (1, 0) if strategy == "btp" else (0, 1)
        for name in projection.downs:
            tensors[f"{projection.name}.{name}"] = ShardedShape((rank, size_in), a_axis)
        tensors[f"{projection.name}.B"] = ShardedShape((size_out, rank), b_axis)
        if model.place(layer).crosses:
            crossing = crossing_tensors(model, layer, rank)
            tensors |= {f"{projection.name}.{name}": shape for name, shape in crossing.items()}
    return tensors


def crossing_tensors(model: Model, layer: int, rank: int) -> Tensors:
    """The parameters of one projection's LaX gate and latent norm, replicated on every rank:
    tensor gate p² + q² with p·q = r, linear gate r² + r, layernorm 2r, rmsnorm r."""
    settings = model.settings(layer)
    tensors: Tensors = {}
    if settings.lax_gate == "linear":
        tensors["gate_weight"] = ShardedShape((rank, rank), None)
        tensors["gate_bias"] = ShardedShape((rank,), None)
    elif settings.lax_gate == "tensor":
        p, q = balanced_factors(rank)
        tensors["gate_left"] = ShardedShape((p, p), None)
        tensors["gate_right"] = ShardedShape((q, q), None)
    if settings.lax_norm != "none":
        tensors["norm_weight"] = ShardedShape((rank,), None)
    if settings.lax_norm == "layernorm":
        tensors["norm_bias"] = ShardedShape((rank,), None)
    return tensors


def vocabulary_tensor(model: Model) -> ShardedShape:
    """The embedding or the head, `[V, d]` with the rows that pad the vocabulary."""
    return ShardedShape((model.padded_vocab_size, model.hidden_size), 0)


def stage_tensors(model: Model, layout: Layout, pp_rank: int) -> Tensors:
    """Every parameter of a pipeline rank by its canonical name. A tied head is there on the last
    stage of several, where it is a copy of the first one's embedding."""
    tensors = _outer_tensors(model, layout, pp_rank)
    for layer in layout.layers(model, pp_rank):
        for name, shape in layer_tensors(model, layer).items():
            tensors[f"decoder.layers.{layer}.{name}"] = shape
    return tensors


def _outer_tensors(model: Model, layout: Layout, pp_rank: int) -> Tensors:
    """Those of a pipeline rank that belong to no layer: embedding, final norm and head."""
    tensors: Tensors = {}
    if layout.has_embedding(pp_rank):
        tensors["embedding.word_embeddings.weight"] = vocabulary_tensor(model)
    if layout.has_head(pp_rank):
        tensors["decoder.final_layernorm.weight"] = ShardedShape((model.hidden_size,), None)
        if not model.tied or not layout.has_embedding(pp_rank):
            tensors["output_layer.weight"] = vocabulary_tensor(model)
    return tensors


def layer_parameters(model: Model, layer: int) -> int:
    """Parameters of one whole layer."""
    return sum(tensor.numbers for tensor in layer_tensors(model, layer).values())


def rank_parameters(model: Model, layout: Layout, pp_rank: int) -> int:
    """Parameters that one rank of a pipeline stage holds, those replicated over tensor parallelism
    and the rows that pad the vocabulary included."""
    tp = layout.tensor_parallel
    outer = _outer_tensors(model, layout, pp_rank).values()
    return sum(
        _rank_layer_parameters(model, layer, tp) for layer in layout.layers(model, pp_rank)
    ) + sum(math.prod(tensor.on_rank(tp)) for tensor in outer)


@lru_cache(maxsize=4096)
def _rank_layer_parameters(model: Model, layer: int, tp: int) -> int:
    """A planner asks for them once for every layer of thousands of layouts."""
    return sum(math.prod(tensor.on_rank(tp)) for tensor in layer_tensors(model, layer).values())


def model_parameters(model: Model) -> int:
    """Parameters of the whole model, which do not depend on its layout: each tensor once, without
    the rows that pad the vocabulary."""
    layers = sum(layer_parameters(model, layer) for layer in range(model.num_layers))
    matrices = 1 if model.tied else 2
    return layers + model.hidden_size * (1 + matrices * model.vocab_size)
