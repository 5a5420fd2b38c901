"""Flags about checkpoints that follow from others, added before Megatron parses them."""

from __future__ import annotations

import importlib.util
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path

from boost_layers.config import LowRankConfig
from megatron.boost.checkpoint_settings import (
    FORGOTTEN_FLAGS,
    restored_flags,
    restored_megatron_flags,
)
from megatron.boost.flags import flags_of, is_given
from megatron.boost.preprocessing.inputs import nearest_path
from megatron.boost.stored_run import stored_run
from megatron.boost.vocabulary import padding_flags


def flags_of_checkpoint(argv: Sequence[str], arguments: Namespace) -> list[str]:
    """Flags for what the checkpoint was trained as: ours, since Megatron's `--use-checkpoint-args`
    restores its own only, those of Megatron's that it forgets, and the size of the vocabulary.

    Args:
        argv: the user's command line.
        arguments: the same, parsed.

    Raises:
        ValueError: for a flag of the user's that contradicts the checkpoint.
    """
    run = stored_run(arguments)
    if run is None:
        # Object stores and other formats are left to Megatron.
        local = arguments.load is not None and "://" not in arguments.load
        if local and arguments.ckpt_format in (None, "torch_dist"):
            if not Path(arguments.load).exists():
                near = nearest_path(Path(arguments.load))
                raise ValueError(f"--load {arguments.load}: no such folder{near}")
            raise ValueError(
                f"--use-checkpoint-args: there is no checkpoint at --load {arguments.load}; "
                "nearest legal value: leave it out until there is one"
            )
        return []
    given = {
        flag.field: getattr(arguments, flag.destination)
        for flag in flags_of(LowRankConfig)
        if is_given(argv, flag.name)
    }
    given_of_megatron = {
        name: getattr(arguments, name)
        for name, flag in FORGOTTEN_FLAGS.items()
        if is_given(argv, flag)
    }
    return [
        *restored_flags(given, run.arguments),
        *restored_megatron_flags(given_of_megatron, run.arguments),
        *padding_flags(argv, arguments, run.arguments),
    ]


def flags_for_async_save(argv: Sequence[str], arguments: Namespace) -> tuple[list[str], list[str]]:
    """What `--async-save` needs beside it, and the lines that say so: without the first Megatron
    saves synchronously, without the second it wants a package that is not installed.

    Args:
        argv: the user's command line.
        arguments: the same, parsed.

    Raises:
        ValueError: where the user asks for that package.
    """
    if not arguments.async_save or arguments.ckpt_format not in (None, "torch_dist"):
        return [], []
    added = [] if arguments.use_persistent_ckpt_worker else ["--use-persistent-ckpt-worker"]
    asked = arguments.async_strategy
    if asked != "mcore" and importlib.util.find_spec("nvidia_resiliency_ext") is None:
        if is_given(argv, "--async-strategy"):
            raise ValueError(
                f"--async-strategy {asked}: nvidia-resiliency-ext is not installed; "
                "nearest legal value: mcore"
            )
        added += ["--async-strategy", "mcore"]
    return added, [f"asynchronous save: {' '.join(added)}"] if added else []
