"""Runs a test's function on several gloo ranks of this machine, each a fresh process.

Importing torch and Megatron takes seconds, so one fork server imports them once per test run and
every rank is a fork of it. A fork starts without process groups, model-parallel state or changed
globals, whatever the case before it did, and a case that fails, hangs or dies takes down nothing
but its own ranks.
"""

import contextlib
import faulthandler
import io
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing import connection, forkserver
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import distributed

_CONTEXT = multiprocessing.get_context("forkserver")
# The project's are left out: a module that does not import must fail the case that uses it, not the
# server.
_CONTEXT.set_forkserver_preload(
    [
        "torch",
        "megatron.core",
        "megatron.training",
        "megatron.core.tokenizers.text",
        "pytest",
        "tests.support.upstream_flags",
    ]
)

_STACKS_SIGNAL = signal.SIGUSR1
_STACKS_SECONDS = 1.0
_GRACE_SECONDS = 0.2
_OUTPUT_CHARACTERS = 6000


class RankFailure(AssertionError):
    """A rank raised, died, hung or left no result; `rank` is the first that did."""

    def __init__(self, rank: int, message: str) -> None:
        super().__init__(message)
        self.rank = rank


def run_ranks(
    function: Callable[..., Any],
    world_size: int,
    *args: Any,
    timeout_s: float = 120.0,
    init_process_group: bool = True,
    cuda: bool = False,
    **kwargs: Any,
) -> list[Any]:
    """Calls `function(*args, **kwargs)` on `world_size` ranks and returns the results by rank.

    Each rank finds torchrun's variables (RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE,
    MASTER_ADDR, MASTER_PORT) and otherwise its caller's environment and working directory, runs on
    one thread, and with `init_process_group` has a gloo world that is destroyed after the call.
    The store behind MASTER_PORT is hosted by the caller, as torchrun does: no port can be lost
    between finding and using it. A process can make only one world on it.

    Args:
        function: a function at the top level of an importable module. It, its arguments and its
            results travel by pickle, tensors by value.
        world_size: number of ranks.
        timeout_s: seconds after which ranks that are still running count as hanging.
        init_process_group: False for code that makes the world itself, as `pretrain()` does.
        cuda: whether the ranks use CUDA. They start from nothing then: what the fork server has
            imported has looked for GPUs, and no fork can use CUDA after that.

    Raises:
        RankFailure: with the first failing rank's traceback, exit code or stacks, and what every
            rank printed. All ranks have ended by then.
    """
    case = _to_bytes((function, args, kwargs))
    store = distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    # OpenMP reads its thread count when torch is loaded, and threads do not survive a fork.
    with mock.patch.dict(os.environ, OMP_NUM_THREADS="1"):
        forkserver.ensure_running()
    context = multiprocessing.get_context("spawn") if cuda else _CONTEXT
    with tempfile.TemporaryDirectory(prefix="ranks-") as folder:
        ranks: list[_Rank] = []
        try:
            for number in range(world_size):
                environment = _rank_environment(number, world_size, store.port)
                ranks.append(
                    _Rank(
                        context,
                        number,
                        Path(folder),
                        case,
                        environment,
                        timeout_s,
                        init_process_group,
                    )
                )
            _watch(ranks, timeout_s)
        finally:
            for rank in ranks:
                rank.end()
            for rank in ranks:
                rank.process.join()
        return [_from_bytes(rank.result.read_bytes()) for rank in ranks]


def _to_bytes(value: Any) -> bytes:
    # Plain pickle would need Megatron on both sides: its import redirects how tensors are pickled.
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def _from_bytes(content: bytes) -> Any:
    return torch.load(io.BytesIO(content), map_location="cpu", weights_only=False)


def _rank_environment(rank: int, world_size: int, port: int) -> dict[str, str]:
    return {
        **os.environ,
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        # Someone already listens at that port: rank 0 must not host a store of its own.
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "OMP_NUM_THREADS": "1",
        # gloo looks up the machine's name otherwise, and that need not resolve.
        "GLOO_SOCKET_IFNAME": "lo",
    }


class _Rank:
    """One running rank as its caller sees it: the process and the files it leaves."""

    def __init__(
        self,
        context: Any,
        number: int,
        folder: Path,
        case: bytes,
        environment: dict[str, str],
        timeout_s: float,
        init_process_group: bool,
    ) -> None:
        self.number = number
        self.result = folder / f"result-{number}"
        self.failure = folder / f"failure-{number}"
        self.output = folder / f"output-{number}"
        self.process = context.Process(
            target=_rank_main,
            args=(
                case,
                environment,
                timeout_s,
                init_process_group,
                self.result,
                self.failure,
                self.output,
            ),
        )
        self.process.start()

    @property
    def failed(self) -> bool:
        code = self.process.exitcode
        return code is not None and (code != 0 or not self.result.exists())

    def raised(self) -> tuple[float, str] | None:
        """When the rank raised (on the clock that all processes share) and the traceback."""
        return pickle.loads(self.failure.read_bytes()) if self.failure.exists() else None

    def died(self) -> str:
        """How the rank ended without raising."""
        code = self.process.exitcode
        if code is not None and code < 0:
            return f"was killed by {signal.Signals(-code).name}"
        return f"exited with code {code}" if code else "ended without a result"

    def end(self) -> None:
        """Kills the rank and whatever processes it started and left."""
        self.process.kill()
        assert self.process.pid is not None
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)

    def print_stacks(self) -> None:
        """Makes the rank write the stacks of its threads to its standard error."""
        assert self.process.pid is not None
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.process.pid, _STACKS_SIGNAL)

    def printed(self) -> str:
        """The end of what the rank wrote to standard output and standard error."""
        text = self.output.read_text(errors="replace") if self.output.exists() else ""
        return text[-_OUTPUT_CHARACTERS:].strip()


def _watch(ranks: list[_Rank], timeout_s: float) -> None:
    """Returns when all ranks are done; raises RankFailure once one failed or time is up."""
    deadline = time.monotonic() + timeout_s
    while running := [rank for rank in ranks if rank.process.exitcode is None]:
        if time.monotonic() >= deadline:
            raise _hanging(ranks, running, timeout_s)
        connection.wait(
            [rank.process.sentinel for rank in running], max(0.0, deadline - time.monotonic())
        )
        if any(rank.failed for rank in ranks):
            break
    if any(rank.failed for rank in ranks):
        # Peers of a killed rank raise at once; its own exit code may arrive a moment later.
        time.sleep(_GRACE_SECONDS)
        raise _first_failure(ranks)


def _first_failure(ranks: list[_Rank]) -> RankFailure:
    # A death makes the peers raise, hardly ever the other way round: a rank that died comes first.
    failures = sorted(
        (rank.raised() or (0.0, rank.died()), rank.number) for rank in ranks if rank.failed
    )
    (_, first_text), first = failures[0]
    parts = [f"rank {first} of {len(ranks)} failed first: {first_text}"]
    parts += [f"then rank {number}: {text}" for (_, text), number in failures[1:]]
    return RankFailure(first, "\n".join([*parts, _all_printed(ranks)]))


def _hanging(ranks: list[_Rank], running: list[_Rank], timeout_s: float) -> RankFailure:
    for rank in running:
        rank.print_stacks()
    time.sleep(_STACKS_SECONDS)
    numbers = ", ".join(str(rank.number) for rank in running)
    return RankFailure(
        running[0].number,
        f"rank {numbers} of {len(ranks)} still running after {timeout_s:g} s, "
        f"stacks below\n{_all_printed(ranks)}",
    )


def _all_printed(ranks: list[_Rank]) -> str:
    return "\n".join(f"--- rank {rank.number} printed ---\n{rank.printed()}" for rank in ranks)


def _rank_main(
    case: bytes,
    environment: dict[str, str],
    timeout_s: float,
    init_process_group: bool,
    result: Path,
    failure: Path,
    output: Path,
) -> None:
    """Body of a rank's process: from its start to its result or failure file."""
    # A process group of its own, by which what it starts can be ended with it.
    os.setsid()
    _redirect_output(output)
    faulthandler.enable(2)
    faulthandler.register(_STACKS_SIGNAL, 2, all_threads=True)
    # Ends the rank should its caller be gone by then.
    faulthandler.dump_traceback_later(timeout_s + 60, exit=True, file=2)
    os.environ.clear()
    os.environ.update(environment)
    torch.set_num_threads(1)
    try:
        function, args, kwargs = _from_bytes(case)
        if init_process_group:
            # The caller's time-out comes first: it says more about a hang than gloo does.
            distributed.init_process_group("gloo", timeout=timedelta(seconds=2 * timeout_s))
        _write_whole(result, _to_bytes(function(*args, **kwargs)))
        if distributed.is_initialized():
            distributed.destroy_process_group()
    except BaseException:
        # Written before this rank's connections close and its peers raise in turn. The world is not
        # destroyed, which could wait for them: the end of the process closes it.
        _write_whole(failure, pickle.dumps((time.monotonic(), traceback.format_exc())))
        sys.stdout.flush()
        os._exit(1)


def _redirect_output(path: Path) -> None:
    target = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(target, 1)
    os.dup2(target, 2)
    os.close(target)
    # By lines, for what a rank that is killed said before.
    sys.stdout = open(1, "w", buffering=1, closefd=False)


def _write_whole(path: Path, content: bytes) -> None:
    part = path.with_suffix(".part")
    part.write_bytes(content)
    part.rename(path)
