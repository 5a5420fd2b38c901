"""A tool on one rank of several, or alone."""

from __future__ import annotations

import contextlib
import io
import os
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, redirect_stderr, redirect_stdout
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch import distributed

from megatron.boost.command_line import BAD_INPUT
from megatron.boost.quiet import quiet_output

_AFTER_RANK_0_SECONDS = 5.0


def rank() -> int:
    """This process's number among those that torchrun started; 0 without it."""
    return int(os.environ.get("RANK", "0"))


def world_size() -> int:
    """The number of processes that torchrun started; 1 without it."""
    return int(os.environ.get("WORLD_SIZE", "1"))


@contextlib.contextmanager
def one_refusal() -> Iterator[None]:
    """Context in which bad input is said once on a machine, by its first rank."""
    if int(os.environ.get("LOCAL_RANK", "0")) == 0:
        yield
        return
    refused = False
    # The parser of a tool prints its refusals itself.
    with redirect_stderr(io.StringIO()):
        try:
            yield
        except ValueError:
            refused = True
        except SystemExit as end:
            if end.code != BAD_INPUT:
                raise
            refused = True
    if refused:
        # torchrun ends all ranks when the first one ends, which must not be this one.
        time.sleep(_AFTER_RANK_0_SECONDS)
        sys.exit(BAD_INPUT)


@contextlib.contextmanager
def notices_kept_away(verbose: bool) -> Iterator[None]:
    """Context in which the terminal shows nothing of what libraries say on standard output, nor
    their warnings; enter it before Megatron is imported.

    Args:
        verbose: sends it all to standard error instead.
    """
    if verbose:
        with redirect_stdout(sys.stderr):
            yield
        return
    with ExitStack() as stack:
        folder = Path(stack.enter_context(TemporaryDirectory(prefix="notices-")))
        stack.enter_context(quiet_output(folder / "log"))
        stack.enter_context(redirect_stdout(stack.enter_context((folder / "out").open("w"))))
        yield


def device_of(asked: str) -> torch.device:
    """The device of this rank.

    Args:
        asked: "cpu", "cuda", or "auto" for cuda where there is one.

    Raises:
        ValueError: if there is no CUDA device and one was asked for.
    """
    if asked == "cuda" and not torch.cuda.is_available():
        raise ValueError("--device cuda: there is no CUDA device; nearest legal value: cpu")
    if asked == "cpu" or not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))


def join_world(device: torch.device) -> None:
    """Make the process group of the ranks that torchrun started; alone, none."""
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if world_size() > 1 and not distributed.is_initialized():
        distributed.init_process_group("nccl" if device.type == "cuda" else "gloo")


def summed(values: Sequence[float], device: torch.device) -> list[float]:
    """The sum of each value over all ranks, in fp64; one all-reduce."""
    return _reduced(values, device, distributed.ReduceOp.SUM)


def largest(value: float, device: torch.device) -> float:
    """The largest value of all ranks; one all-reduce."""
    return _reduced([value], device, distributed.ReduceOp.MAX)[0]


def _reduced(
    values: Sequence[float], device: torch.device, operation: distributed.ReduceOp.RedOpType
) -> list[float]:
    tensor = torch.tensor(values, dtype=torch.float64, device=device)
    if distributed.is_initialized():
        distributed.all_reduce(tensor, operation)
    return tensor.tolist()
