"""Megatron's writers of scalars, TensorBoard's and W&B's: what we add to them, and what is found
out about them before a run instead of in it.

The last rank of the world has them; Megatron makes and closes them.
"""

from __future__ import annotations

import importlib.util
from argparse import Namespace
from collections.abc import Mapping

from boost_layers.config import LowRankConfig

LATENTS_FLAG = "--low-rank-log-latents-interval"


def write_scalars(values: Mapping[str, float], iteration: int) -> None:
    """Write `values` by tag to those of the two writers that this rank has."""
    from megatron.training import get_tensorboard_writer, get_wandb_writer

    tensorboard, wandb = get_tensorboard_writer(), get_wandb_writer()
    if tensorboard is not None:
        for tag, value in values.items():
            tensorboard.add_scalar(tag, value, iteration)
    if wandb is not None:
        wandb.log(dict(values), iteration)


def writes_scalars() -> bool:
    """Whether this rank has a writer."""
    from megatron.training import get_tensorboard_writer, get_wandb_writer

    return get_tensorboard_writer() is not None or get_wandb_writer() is not None


def check_writers(arguments: Namespace, low_rank: LowRankConfig) -> list[str]:
    """What is to be said of the run's writers.

    Args:
        arguments: Megatron's and ours, before Megatron's validation.
        low_rank: the settings of the model.

    Raises:
        ValueError: for W&B without what Megatron needs for it, and for statistics of latents that
            are not there, or that nothing would log.
    """
    project = getattr(arguments, "wandb_project", "")
    if project:
        _check_wandb(arguments)
    folder = arguments.tensorboard_dir
    lacks_tensorboard = bool(folder) and not _installed("tensorboard")
    lacking = (
        "needs the package tensorboard, which is not installed "
        "(pip install 'boost-lowrank[tensorboard]')"
    )
    interval = arguments.low_rank_log_latents_interval
    if interval:
        shown = f"{LATENTS_FLAG} {interval}"
        if not low_rank.low_rank:
            raise ValueError(
                f"{shown}: --low-rank-arch {low_rank.arch} has no latents; nearest legal value: 0"
            )
        if not folder and not project:
            raise ValueError(
                f"{shown}: needs --tensorboard-dir or --wandb-project to log to; nearest legal "
                "value: 0"
            )
        if lacks_tensorboard and not project:
            raise ValueError(f"--tensorboard-dir {folder}: {lacking}")
    if lacks_tensorboard:
        return [f"--tensorboard-dir {folder}: nothing is written there; it {lacking}"]
    return []


def _check_wandb(arguments: Namespace) -> None:
    """Refuse what Megatron's last rank would end with, after the others have started."""
    shown = f"--wandb-project {arguments.wandb_project}"
    if not arguments.wandb_exp_name:
        raise ValueError(f"{shown}: needs --wandb-exp-name, the name of the run in it")
    if not (arguments.wandb_save_dir or arguments.save):
        raise ValueError(f"{shown}: needs --wandb-save-dir, or --save, for its files")
    if not _installed("wandb"):
        raise ValueError(
            f"{shown}: needs the package wandb, which is not installed (pip install wandb)"
        )


def _installed(package: str) -> bool:
    return importlib.util.find_spec(package) is not None
