"""The way from `pretrain_gpt.py` into a training run: device, quiet start, one-line errors.

Megatron is imported only here, after the device is known, so that on CPU its import-time warnings
go to the log file too.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Sequence

import torch

from megatron.boost.arguments import early_launch_flags
from megatron.boost.command_line import BAD_INPUT, print_error
from megatron.boost.cpu import megatron_on_cpu, process_group_ended, with_cpu_flags
from megatron.boost.flags import is_given, values_of
from megatron.boost.patches import apply_always
from megatron.boost.quiet import quiet_output

_AFTER_RANK_0_SECONDS = 5.0


def main(argv: Sequence[str], started: float | None = None) -> int:
    """Run `pretrain_gpt.py` with the flags `argv` on this rank.

    Returns:
        The exit code: 0, or 2 for bad input, which rank 0 names in one `error: …` line.
    """
    if _splits_layers(argv):
        start_kernels_in_order()
    with contextlib.ExitStack() as stack:
        try:
            launch = early_launch_flags(argv)
            if _on_cpu(launch.device):
                argv = with_cpu_flags(argv)
                stack.enter_context(quiet_output(verbose=launch.verbose))
                stack.enter_context(megatron_on_cpu())
            stack.enter_context(apply_always())
            from megatron.boost.training import configure, train

            plan = configure(argv)
        except ValueError as refusal:
            if int(os.environ.get("LOCAL_RANK", "0")) == 0:
                print_error(str(refusal))
            else:
                # torchrun ends all ranks when the first one ends, which must not be this one.
                time.sleep(_AFTER_RANK_0_SECONDS)
            return BAD_INPUT
        rendezvous_alone()
        with process_group_ended():
            train(plan, started)
    return 0


def start_kernels_in_order() -> None:
    """Set CUDA_DEVICE_MAX_CONNECTIONS=1 unless the user has set it; before CUDA is first used.
    Before Blackwell Megatron demands it for tensor parallelism, so that a collective starts in the
    order in which it is issued, and not after the GEMM that it shall run beside."""
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")


def _splits_layers(argv: Sequence[str]) -> bool:
    """Whether Megatron will demand `start_kernels_in_order`; with FSDP it forbids it."""
    if any(is_given(argv, flag) for flag in ("--use-torch-fsdp2", "--use-megatron-fsdp")):
        return False
    split = [
        value
        for flag in ("--tensor-model-parallel-size", "--context-parallel-size")
        for value in values_of(argv, flag)
    ]
    # A checkpoint's arguments hold the sizes too.
    return any(value != "1" for value in split) or is_given(argv, "--use-checkpoint-args")


def _on_cpu(device: str) -> bool:
    """Whether the run takes place on the CPU; said in one line by rank 0."""
    if device == "cuda" and not torch.cuda.is_available():
        raise ValueError("--device cuda: there is no CUDA device; nearest legal value: cpu")
    on_cpu = device == "cpu" or not torch.cuda.is_available()
    if on_cpu and int(os.environ.get("RANK", "0")) == 0:
        print("> device: cpu (gloo, Megatron's local implementation)", flush=True)
    return on_cpu


def rendezvous_alone() -> None:
    """Lets a single rank that no launcher started make its process group, at a free port."""
    if "RANK" not in os.environ and "WORLD_SIZE" not in os.environ:
        os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
        os.environ.setdefault("MASTER_PORT", "0")
