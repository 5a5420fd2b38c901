"""A checkpoint's optimizer state loads only into the kind of optimizer that wrote it.

Megatron's fp32, float16 and distributed optimizers store the same moments under the same names
(`optimizer.state.exp_avg.KEY`), but name the fp32 main parameters differently and keep step,
parameter groups and loss scale elsewhere: with and without `--use-distributed-optimizer` a run
cannot read the other's state. Here the checkpoint says which kind wrote it, and an optimizer of
another kind asks for its tensors under that kind's names and puts the rest where it has its own.

The distributed optimizer's state must be in the format that any layout can read
(`--dist-ckpt-optim-fully-reshardable`). Where main parameters are not in the checkpoint, or this
run keeps none, the model's weights stand for them, rounded to the precision that they have there.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch

from megatron.boost.patches import Patch
from megatron.boost.patches.replacement import replaced

Kind = Literal["fp32", "float16", "distributed"]

_STORED_KIND = "stored_optimizer_kind"
_RESHARDABLE = "fully_reshardable"
_OWN = "of this run's kind"
_MAIN_PARAMETERS: dict[Kind, str | None] = {
    "fp32": None,
    "float16": "fp32_param",
    "distributed": "param",
}
"""What a kind calls the fp32 copy of a parameter, in the tensor's name."""


@dataclass(frozen=True)
class _Settings:
    """What an optimizer stores beside tensors."""

    param_groups: list[dict[str, Any]]
    """Without parameters and step."""
    step: int | None
    """None for an optimizer that counts none, as SGD."""
    grad_scaler: dict[str, Any] | None


def stored_kind(stored: dict[Any, Any]) -> Kind | None:
    """The kind of optimizer that a checkpoint's common state `stored` is from, by its structure;
    None for one without optimizer. Of several chained optimizers the first one counts."""
    optimizer = stored.get("optimizer")
    if not optimizer:
        return None
    first = optimizer.get(0, optimizer)
    if "param_state_sharding_type" in first:
        return "distributed"
    return "float16" if "optimizer" in first else "fp32"


def _settings(stored: dict[str, Any]) -> _Settings:
    """The settings in one optimizer's stored state, of any kind."""
    inner = stored.get("optimizer", stored)
    groups = inner["param_groups"]
    steps = [inner.get("state", {}).get("common_step"), *(group.get("step") for group in groups)]
    known = [int(step) for step in steps if step is not None]
    return _Settings(
        [{k: v for k, v in group.items() if k not in ("params", "step")} for group in groups],
        max(known, default=None),
        stored.get("grad_scaler"),
    )


def _renamed(tensor: Any, name: str) -> Any:
    """A main parameter's `ShardedTensor` (or factory) under another kind's name for it."""
    *_, canonical = tensor.key.split(".", 3)
    return replace(tensor, key=f"optimizer.state.{name}.{canonical}")


def _ask_for_main_parameters(description: dict[str, Any], own: Kind, stored: Kind) -> None:
    """Make an optimizer's description of what it loads ask for the main parameters under the stored
    kind's name, or not at all where there are none."""
    name = _MAIN_PARAMETERS[stored]
    if own == "float16":
        groups = description.pop("fp32_from_fp16_params")
        if name is not None:
            description["fp32_from_fp16_params"] = [
                [_renamed(tensor, name) for tensor in group] for group in groups
            ]
    if own == "distributed":
        for tensors in description["param_state"].values():
            tensor = tensors.pop("param")
            if name is not None:
                tensors["param"] = _renamed(tensor, name)


def _torch_state(optimizer: Any, loaded: dict[str, Any], settings: _Settings) -> dict[str, Any]:
    """The state of the optimizer that Megatron wraps, from its loaded tensors and the settings."""
    counts_by_parameter = isinstance(optimizer, torch.optim.Adam)
    state = dict(loaded.get("state", {}))
    more: dict[str, Any] = {}
    if settings.step is not None:
        if counts_by_parameter:
            state["common_step"] = torch.tensor(float(settings.step))
        else:
            more["step"] = settings.step
    own = loaded["param_groups"]
    if len(own) != len(settings.param_groups):
        raise ValueError(
            f"--load: the checkpoint's optimizer has {len(settings.param_groups)} groups of "
            f"parameters and this run's has {len(own)}; nearest legal value: --no-load-optim"
        )
    groups = [
        {**stored, **more, "params": group["params"]}
        for stored, group in zip(settings.param_groups, own, strict=True)
    ]
    return {"state": state, "param_groups": groups}


def _fp32_state(optimizer: Any, loaded: dict[str, Any], settings: _Settings) -> dict[str, Any]:
    return _torch_state(optimizer.optimizer, loaded, settings)


def _float16_state(optimizer: Any, loaded: dict[str, Any], settings: _Settings) -> dict[str, Any]:
    if "fp32_from_fp16_params" not in loaded:
        optimizer.reload_model_params()
    return {
        "optimizer": _torch_state(optimizer.optimizer, loaded["optimizer"], settings),
        "fp32_from_fp16_params": loaded.get("fp32_from_fp16_params", []),
        **_scaler(settings),
    }


def _distributed_state(
    optimizer: Any, loaded: dict[str, Any], settings: _Settings
) -> dict[str, Any]:
    step = {} if settings.step is None else {"step": settings.step}
    # In the order in which the optimizer describes its tensors.
    parameters = [
        parameter
        for number, ranges in enumerate(optimizer.gbuf_ranges)
        for _ in ranges
        for parameter in optimizer.buffers[number].param_index_map
    ]
    for index, parameter in enumerate(parameters):
        loaded["param_state"][index].setdefault("param", parameter.detach().float())
    return {
        "optimizer": {"param_groups": [{**group, **step} for group in settings.param_groups]},
        "param_state": loaded["param_state"],
        "param_state_sharding_type": _RESHARDABLE,
        **_scaler(settings),
    }


def _scaler(settings: _Settings) -> dict[str, Any]:
    return {} if settings.grad_scaler is None else {"grad_scaler": settings.grad_scaler}


_STATES: dict[Kind, Callable[[Any, dict[str, Any], _Settings], dict[str, Any]]] = {
    "fp32": _fp32_state,
    "float16": _float16_state,
    "distributed": _distributed_state,
}
"""The state that an optimizer of a kind loads, from its own tensors and the stored settings."""


def _kind_in_metadata(upstream: Callable[..., Any], load_common: Callable[..., Any]) -> Any:
    """`dist_checkpointing.load_content_metadata` that adds the kind which wrote the checkpoint."""

    @functools.wraps(upstream)
    def load_content_metadata(
        checkpoint_dir: str | None = None, *, preloaded_state_dict: dict[str, Any] | None = None
    ) -> dict[str, Any] | None:
        if preloaded_state_dict is None and checkpoint_dir is not None:
            preloaded_state_dict = load_common(checkpoint_dir)
        metadata = upstream(checkpoint_dir, preloaded_state_dict=preloaded_state_dict)
        kind = stored_kind(preloaded_state_dict or {})
        if metadata is None or kind is None:
            return metadata
        marked = {**metadata, _STORED_KIND: kind}
        if kind != "distributed":
            # Megatron looks this up for a distributed optimizer, whatever wrote the checkpoint. The
            # other kinds' tensors are whole, as those of this format are.
            marked["distrib_optim_sharding_type"] = _RESHARDABLE
        return marked

    return load_content_metadata


def _describing(upstream: Callable[..., Any], own: Kind) -> Any:
    """`sharded_state_dict` that asks for its tensors under the names of the stored kind."""

    @functools.wraps(upstream)
    def sharded_state_dict(
        self: Any, model_sharded_state_dict: Any, is_loading: bool = False, **more: Any
    ) -> Any:
        metadata = more.get("metadata") or {}
        stored = metadata.get(_STORED_KIND)
        if not is_loading or stored is None or stored == own:
            return upstream(self, model_sharded_state_dict, is_loading, **more)
        if metadata.get("distrib_optim_sharding_type") != _RESHARDABLE:
            raise ValueError(
                "--load: the checkpoint's optimizer state lies in the order of the distributed "
                "optimizer's buffers, which only that can read; nearest legal value: "
                "--use-distributed-optimizer (--dist-ckpt-optim-fully-reshardable when saving "
                "gives a state that every optimizer can read)"
            )
        description = upstream(self, model_sharded_state_dict, is_loading, **more)
        _ask_for_main_parameters(description, own, stored)
        return {_OWN: description}

    return sharded_state_dict


def _loading(upstream: Callable[..., Any], own: Kind) -> Any:
    """`load_state_dict` that takes the state of another kind apart."""

    @functools.wraps(upstream)
    def load_state_dict(self: Any, state_dict: dict[str, Any]) -> None:
        if _OWN in state_dict:
            stored = {key: value for key, value in state_dict.items() if key != _OWN}
            state_dict = _STATES[own](self, state_dict[_OWN], _settings(stored))
        upstream(self, state_dict)

    return load_state_dict


@contextlib.contextmanager
def _apply() -> Iterator[None]:
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing import load_common_state_dict, load_content_metadata
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
    from megatron.core.optimizer.optimizer import Float16OptimizerWithFloat16Params, FP32Optimizer

    classes: dict[Kind, Any] = {
        "fp32": FP32Optimizer,
        "float16": Float16OptimizerWithFloat16Params,
        "distributed": DistributedOptimizer,
    }
    with contextlib.ExitStack() as stack:
        marking = _kind_in_metadata(load_content_metadata, load_common_state_dict)
        stack.enter_context(replaced(dist_checkpointing, "load_content_metadata", marking))
        for kind, owner in classes.items():
            for name, patched in (
                ("sharded_state_dict", _describing(owner.sharded_state_dict, kind)),
                ("load_state_dict", _loading(owner.load_state_dict, kind)),
            ):
                stack.enter_context(replaced(owner, name, patched))
        yield


PATCH = Patch(
    name="optimizer_of_another_kind",
    reason="with the distributed optimizer a run cannot load the state of one without, or back",
    needs="always",
    apply=_apply,
)
