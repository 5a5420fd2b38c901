"""All that a run's next step depends on, as whole tensors whatever the layout: weights, the fp32
main parameters, Adam's moments and steps.

Read from the model and from the wrapped torch optimizer, not from what Megatron would save.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from megatron.boost.recipes.meta_rank import canonical_name

QUANTITIES = ("weight", "main", "exp_avg", "exp_avg_sq")
State = dict[str, dict[str, Tensor]]
"""Whole tensors by quantity and canonical name."""


@dataclass(frozen=True)
class Piece:
    """A run of consecutive elements of one rank's shard of a tensor."""

    elements: Tensor
    start: int
    shape: tuple[int, ...]
    """Of the shard."""
    axis: int | None
    """The one along which the tensor is cut into shards; None: a rank has all of it."""
    tp_rank: int


@dataclass(frozen=True)
class RankState:
    """What one rank holds."""

    pieces: dict[str, dict[str, Piece]]
    """By quantity and canonical name."""
    steps: set[float]
    """Adam's, over all parameters."""
    settings: list[dict[str, Any]]
    """Of each group of parameters: learning rate, weight decay and the like."""
    loss_scale: float


def rank_state(models: Sequence[nn.Module], optimizer: Any) -> RankState:
    """This rank's part of the state of a model in chunks and its Megatron optimizer."""
    from megatron.core import parallel_state

    tp_rank = parallel_state.get_tensor_model_parallel_rank()
    pieces: dict[str, dict[str, Piece]] = {quantity: {} for quantity in QUANTITIES}
    steps: set[float] = set()
    names = {
        parameter: canonical_name(model, name)
        for model in models
        for name, parameter in model.named_parameters()
    }

    def keep(quantity: str, parameter: Tensor, values: Tensor, start: int) -> None:
        sharded = getattr(parameter, "tensor_model_parallel", False)
        axis = parameter.partition_dim if sharded else None
        elements = values.detach().flatten().clone()
        piece = Piece(elements, start, tuple(parameter.shape), axis, tp_rank)
        pieces[quantity][names[parameter]] = piece

    for parameter in names:
        keep("weight", parameter, parameter, 0)
    for part in optimizer.chained_optimizers:
        for parameter, main, start in _main_parameters(part):
            keep("main", parameter, main, start)
            state = part.optimizer.state.get(main, {})
            for moment in ("exp_avg", "exp_avg_sq"):
                if moment in state:
                    keep(moment, parameter, state[moment], start)
            if "step" in state:
                steps.add(float(state["step"]))
    return RankState(pieces, steps, _group_settings(optimizer), float(optimizer.get_loss_scale()))


def _group_settings(optimizer: Any) -> list[dict[str, Any]]:
    settings = [
        {key: value for key, value in group.items() if key not in ("params", "step")}
        for group in optimizer.param_groups
    ]
    return sorted(settings, key=lambda group: group["wd_mult"])


def _main_parameters(part: Any) -> Iterator[tuple[Tensor, Tensor, int]]:
    """A model's parameter, the one that the torch optimizer has for it and where in the flattened
    model's parameter that begins, for each parameter of one Megatron optimizer on this rank."""
    groups = part.optimizer.param_groups
    if hasattr(part, "model_param_group_index_map"):
        for parameter, (group, position) in part.model_param_group_index_map.items():
            window = part._get_model_param_range_map(parameter)["param"]
            yield parameter, groups[group]["params"][position], window.start
    elif hasattr(part, "float16_groups"):
        for group in part.float16_groups:
            yield from ((parameter, parameter.main_param, 0) for parameter in group)
    else:
        for group in groups:
            yield from ((parameter, parameter, 0) for parameter in group["params"])


def whole_state(ranks: Sequence[RankState], vocab_size: int) -> State:
    """The state put together from all ranks, without the rows of tokens that do not exist.

    Raises:
        AssertionError: where a part is on no rank, or two ranks differ in what both hold.
    """
    return {
        quantity: {
            name: _whole(
                [rank.pieces[quantity][name] for rank in ranks if name in rank.pieces[quantity]],
                name,
                vocab_size,
            )
            for name in sorted({name for rank in ranks for name in rank.pieces[quantity]})
        }
        for quantity in QUANTITIES
    }


def _whole(pieces: Sequence[Piece], name: str, vocab_size: int) -> Tensor:
    axis = pieces[0].axis
    shards: dict[int, Tensor] = {}
    for piece in pieces:
        slot = 0 if axis is None else piece.tp_rank
        empty = torch.full(piece.shape, torch.nan, dtype=piece.elements.dtype).flatten()
        shard = shards.setdefault(slot, empty)
        window = shard[piece.start : piece.start + piece.elements.numel()]
        known = ~window.isnan()
        assert torch.equal(window[known], piece.elements[known]), f"ranks differ in {name}"
        window.copy_(piece.elements)
    ordered = [shards[slot].view(pieces[0].shape) for slot in sorted(shards)]
    whole = ordered[0] if axis is None else torch.cat(ordered, dim=axis)
    if name.endswith(("word_embeddings.weight", "output_layer.weight")):
        whole = whole[:vocab_size]
    assert not whole.isnan().any(), f"no rank holds all of {name}"
    return whole


def differing(value: State, reference: State) -> list[str]:
    """The tensors that are not bitwise equal, as "quantity of name"."""
    assert value.keys() == reference.keys()
    found = []
    for quantity, tensors in reference.items():
        assert value[quantity].keys() == tensors.keys(), quantity
        found += [
            f"{quantity} of {name}"
            for name, tensor in tensors.items()
            if not torch.equal(value[quantity][name], tensor)
        ]
    return found
