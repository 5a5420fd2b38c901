"""The multi-process helper: results come back, and whatever a rank does ends in a clear failure."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from torch import distributed

from tests.support.distributed import RankFailure, run_ranks


def _sum_over_ranks(scale: float, *, shift: torch.Tensor) -> dict:
    value = torch.full((3,), scale * (distributed.get_rank() + 1)) + shift
    distributed.all_reduce(value)
    return {"sum": value, "rank": distributed.get_rank(), "pid": os.getpid()}


def _raise_on(rank: int, delay_s: float = 0.0) -> None:
    if distributed.get_rank() == rank:
        time.sleep(delay_s)
        print("about to fail")
        raise ValueError(f"no luck on {rank}")
    distributed.barrier()


def _raise_while_another_sleeps() -> None:
    print("pid", os.getpid())
    distributed.barrier()
    if distributed.get_rank() == 0:
        raise ValueError("no luck on 0")
    time.sleep(3600)


def _hang_on(rank: int) -> None:
    print("pid", os.getpid())
    if distributed.get_rank() == rank:
        time.sleep(3600)
    distributed.barrier()


def _kill(rank: int) -> None:
    if distributed.get_rank() == rank:
        os.kill(os.getpid(), signal.SIGKILL)
    distributed.barrier()


def _leave_a_process() -> int:
    return subprocess.Popen(["sleep", "3600"], stdin=subprocess.DEVNULL).pid


def _exit_quietly() -> None:
    os._exit(0)


def _unpicklable_result():
    return lambda: None


def _surroundings() -> dict:
    server_status = Path(f"/proc/{os.getppid()}/status").read_text()
    return {
        "variables": dict(os.environ),
        "threads": torch.get_num_threads(),
        "cwd": os.getcwd(),
        "megatron_imported": "megatron.training.training" in sys.modules,
        "server_threads": int(server_status.split("Threads:")[1].split()[0]),
    }


def _make_world() -> int:
    """Makes the world from the environment alone, as `pretrain()` does, and leaves it standing."""
    distributed.init_process_group("gloo")
    value = torch.ones(())
    distributed.all_reduce(value, group=distributed.new_group([0, 1]))
    return int(value)


def _megatron_state() -> bool:
    from megatron.core import parallel_state

    was_initialized = parallel_state.model_parallel_is_initialized()
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=2)
    return was_initialized


def _pids(failure: RankFailure) -> list[int]:
    return [int(pid) for pid in re.findall(r"pid (\d+)", str(failure))]


def _runs(pid: int) -> bool:
    """Whether the process is there, and not only waits to be reaped by whoever inherited it."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def _assert_gone(pids: list[int]) -> None:
    assert pids
    assert not [pid for pid in pids if Path(f"/proc/{pid}").exists()]


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_results_come_back_by_rank(world_size: int) -> None:
    results = run_ranks(_sum_over_ranks, world_size, 2.0, shift=torch.tensor([0.0, 1.0, 2.0]))
    assert [result["rank"] for result in results] == list(range(world_size))
    expected = sum(range(1, world_size + 1)) * 2.0 + world_size * torch.tensor([0.0, 1.0, 2.0])
    for result in results:
        torch.testing.assert_close(result["sum"], expected, rtol=0, atol=0)
    _assert_gone([result["pid"] for result in results])


def test_first_failing_rank_is_named_with_its_traceback_and_output() -> None:
    with pytest.raises(RankFailure) as caught:
        run_ranks(_raise_on, 2, 1, delay_s=0.2)
    message = str(caught.value)
    assert caught.value.rank == 1
    assert message.startswith("rank 1 of 2 failed first: Traceback")
    assert "in _raise_on" in message
    assert "ValueError: no luck on 1" in message
    assert "--- rank 1 printed ---\nabout to fail" in message


def test_failure_ends_the_other_ranks_at_once() -> None:
    begin = time.monotonic()
    with pytest.raises(RankFailure, match="no luck on 0") as caught:
        run_ranks(_raise_while_another_sleeps, 2)
    assert time.monotonic() - begin < 60
    _assert_gone(_pids(caught.value))


def test_hanging_ranks_are_reported_with_their_stacks() -> None:
    with pytest.raises(RankFailure, match="still running after 2 s") as caught:
        run_ranks(_hang_on, 2, 1, timeout_s=2)
    message = str(caught.value)
    assert message.startswith("rank 0, 1 of 2")
    assert "in _hang_on" in message
    assert "barrier" in message
    _assert_gone(_pids(caught.value))


def test_killed_rank_is_named_although_its_peers_raise() -> None:
    with pytest.raises(RankFailure, match="rank 1 of 2 failed first: was killed by SIGKILL"):
        run_ranks(_kill, 2, 1)


def test_what_a_rank_leaves_running_ends_with_it() -> None:
    pids = run_ranks(_leave_a_process, 2)
    deadline = time.monotonic() + 5
    while any(map(_runs, pids)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(map(_runs, pids))


def _can_use_cuda() -> bool:
    return not torch.cuda._is_in_bad_fork()


def test_ranks_for_cuda_are_no_forks_of_what_has_looked_for_gpus() -> None:
    assert run_ranks(_can_use_cuda, 1) == [False]
    assert run_ranks(_can_use_cuda, 1, cuda=True) == [True]


def test_exit_without_a_result_is_a_failure() -> None:
    with pytest.raises(RankFailure, match="ended without a result"):
        run_ranks(_exit_quietly, 2)


def test_result_that_cannot_travel_is_a_failure() -> None:
    with pytest.raises(RankFailure, match="lambda"):
        run_ranks(_unpicklable_result, 1)


def test_each_case_starts_clean() -> None:
    for _ in range(2):
        assert run_ranks(_megatron_state, 2) == [False, False]
    with pytest.raises(RankFailure):
        run_ranks(_raise_on, 2, 0)
    assert run_ranks(_megatron_state, 2) == [False, False]


def test_ranks_see_torchruns_variables_and_the_callers_environment(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("A_TEST_SETS", "this")
    monkeypatch.chdir(tmp_path)
    for rank, seen in enumerate(run_ranks(_surroundings, 2)):
        variables = seen["variables"]
        assert variables["A_TEST_SETS"] == "this"
        assert (variables["RANK"], variables["LOCAL_RANK"]) == (str(rank), str(rank))
        assert (variables["WORLD_SIZE"], variables["LOCAL_WORLD_SIZE"]) == ("2", "2")
        assert variables["OMP_NUM_THREADS"] == "1"
        assert seen["threads"] == 1
        assert seen["cwd"] == str(tmp_path)


def test_server_has_megatron_imported_and_no_thread_that_a_fork_would_lose() -> None:
    (seen,) = run_ranks(_surroundings, 1)
    assert seen["megatron_imported"]
    assert seen["server_threads"] == 1


def test_code_under_test_may_make_the_world_itself() -> None:
    assert run_ranks(_make_world, 2, init_process_group=False) == [2, 2]
