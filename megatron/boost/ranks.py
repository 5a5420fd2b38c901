"""Starts ranks on this machine for something to be measured, and collects what they return.

A rank runs on one thread unless it is told otherwise, and all ranks talk over gloo on the loopback
(CPU) or over NCCL, one GPU each (CUDA).
"""

from __future__ import annotations

import contextlib
import logging
import os
import pickle
import tempfile
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import distributed, multiprocessing

from megatron.boost.cpu import megatron_on_cpu, process_group_ended

_SEED = 1234

_ENVIRONMENT = {
    # gloo looks up the machine's name otherwise, and that need not resolve.
    "GLOO_SOCKET_IFNAME": "lo",
    "CUDA_DEVICE_MAX_CONNECTIONS": "1",
    # glibc would give large blocks back to the kernel and take them anew, page fault by page fault,
    # in every step. It shall keep them in one heap, as torch keeps a GPU's memory.
    "MALLOC_MMAP_MAX_": "0",
    "MALLOC_TRIM_THRESHOLD_": str(2**40),
    "MALLOC_ARENA_MAX": "1",
}


def run_on_ranks(
    function: Callable[..., Any],
    world_size: int,
    device_type: str,
    *args: Any,
    threads: int = 1,
    init_process_group: bool = True,
) -> list[Any]:
    """Call `function(device, *args)` on `world_size` ranks, with a process group around it unless
    `init_process_group` says otherwise.

    Args:
        function: a function at the top level of an importable module.
        world_size: the number of ranks; as many GPUs are there on CUDA.
        device_type: "cpu" or "cuda".
        args: travel by pickle, as the results do.
        threads: of each rank.

    Returns:
        The results, by rank.

    Raises:
        torch.multiprocessing.ProcessRaisedException: with the traceback of the rank that failed
            first; the others have been ended.
    """
    environment = _ENVIRONMENT | {"OMP_NUM_THREADS": f"{threads}", "MKL_NUM_THREADS": f"{threads}"}
    environment |= {"CUDA_VISIBLE_DEVICES": ""} if device_type == "cpu" else {}
    with tempfile.TemporaryDirectory(prefix="ranks-") as folder:
        # Threads and heap are set up before a rank's first line of Python runs.
        with mock.patch.dict(os.environ, environment):
            multiprocessing.spawn(
                _rank_main,
                (
                    world_size,
                    device_type,
                    Path(folder),
                    threads,
                    init_process_group,
                    function,
                    args,
                ),
                nprocs=world_size,
            )
        return [pickle.loads(_result(Path(folder), r).read_bytes()) for r in range(world_size)]


def _result(folder: Path, rank: int) -> Path:
    return folder / f"result-{rank}"


def _rank_main(
    rank: int,
    world_size: int,
    device_type: str,
    folder: Path,
    threads: int,
    init_process_group: bool,
    function: Callable[..., Any],
    args: tuple[Any, ...],
) -> None:
    # Megatron names every optional package that it does without.
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    torch.set_num_threads(threads)
    device = torch.device(device_type)
    if device_type == "cuda":
        device = torch.device("cuda", rank)
        torch.cuda.set_device(device)
    if init_process_group:
        distributed.init_process_group(
            "nccl" if device_type == "cuda" else "gloo",
            init_method=f"file://{folder / 'store'}",
            rank=rank,
            world_size=world_size,
        )
    with process_group_ended():
        _result(folder, rank).write_bytes(pickle.dumps(function(device, *args)))


@contextlib.contextmanager
def megatron_group(device: torch.device, tensor_parallel: int | None = None) -> Iterator[None]:
    """Megatron's parallel state on a rank, with tensor-parallel groups of that size; None: with the
    whole world as one."""
    with megatron_on_cpu() if device.type == "cpu" else contextlib.nullcontext():
        from megatron.core import parallel_state
        from megatron.core import tensor_parallel as megatron_tensor_parallel

        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=tensor_parallel or distributed.get_world_size()
        )
        megatron_tensor_parallel.model_parallel_cuda_manual_seed(_SEED)
        try:
            yield
        finally:
            parallel_state.destroy_model_parallel()
