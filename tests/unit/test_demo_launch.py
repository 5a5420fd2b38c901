"""Running a training: its output, its error, and that nothing outlives it."""

import os
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from megatron.boost.demo import launch
from megatron.boost.demo.launch import TrainingFailed, own_error, run_training


def run(script, log, on_line=lambda line: None):
    command = [sys.executable, "-u", "-c", textwrap.dedent(script)]
    run_training("CoLA, BTP", command, log, on_line, environment=os.environ)


def test_output_is_logged_and_handed_on_while_it_comes(tmp_path):
    log = tmp_path / "new" / "log.txt"
    lines = []

    def on_line(line):
        lines.append(line)
        assert log.read_text() == "".join(lines)

    run(
        """
        import sys
        print("one")
        print("two", file=sys.stderr)
        """,
        log,
        on_line,
    )

    assert lines == ["one\n", "two\n"]


def test_a_failed_run_gives_its_own_error_and_its_log(tmp_path):
    log = tmp_path / "log.txt"

    with pytest.raises(TrainingFailed) as failure:
        run("raise RuntimeError('rank 1 of 2 lost its mind')", log)

    assert str(failure.value) == (
        "CoLA, BTP: training failed with exit code 1: "
        f"RuntimeError: rank 1 of 2 lost its mind (log: {log})"
    )


RANK_TRACEBACK = """\
[rank1]: Traceback (most recent call last):
[rank1]:   File "pretrain_gpt.py", line 9, in <module>
[rank1]: torch.OutOfMemoryError: 3 GiB too few
"""
LAUNCHER_TRACEBACK = """\
E1130 07:30:00.000000 12 torch/distributed/elastic/multiprocessing/api.py:882] failed (exitcode: 1)
Traceback (most recent call last):
  File "torch/distributed/run.py", line 9, in <module>
torch.distributed.elastic.multiprocessing.errors.ChildFailedError:
============================================================
pretrain_gpt.py FAILED
============================================================
"""


@pytest.mark.parametrize(
    ("output", "reason"),
    [
        (
            "error: --low-rank-rank 3: not divisible\n" + LAUNCHER_TRACEBACK,
            "--low-rank-rank 3: not divisible",
        ),
        (RANK_TRACEBACK + LAUNCHER_TRACEBACK, "torch.OutOfMemoryError: 3 GiB too few"),
        ("Killed\n------\n\n", "Killed"),
        ("", "it printed nothing"),
    ],
)
def test_the_reason_is_the_trainings_not_the_launchers(output, reason):
    assert own_error(output.splitlines()) == reason


STUBBORN_FAMILY = """
    import os, signal, subprocess, sys, time
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    child = subprocess.Popen(
        [sys.executable, "-c",
         "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN);"
         "print('ready', flush=True); time.sleep(600)"],
        start_new_session=True,
    )
    print(os.getpid(), child.pid, flush=True)
    time.sleep(600)
"""


@pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="needs Linux")
def test_ctrl_c_ends_ranks_that_will_not_end(tmp_path, monkeypatch):
    monkeypatch.setattr(launch, "GRACE_SECONDS", 0.5)
    seen = []

    def interrupt_when_both_are_up(line):
        seen.extend(line.split())
        if len(seen) == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(STUBBORN_FAMILY, tmp_path / "log.txt", interrupt_when_both_are_up)

    pids = [word for word in seen if word != "ready"]
    deadline = time.monotonic() + 10
    while any(alive(pid) for pid in pids):
        assert time.monotonic() < deadline, f"still running: {pids}"
        time.sleep(0.05)


def test_ctrl_c_lets_a_launcher_end_its_ranks_itself(tmp_path):
    def interrupt(line):
        raise KeyboardInterrupt

    log = tmp_path / "log.txt"
    marker = tmp_path / "ended"
    script = f"""
        import pathlib, signal, sys, time
        def end(*_):
            pathlib.Path({str(marker)!r}).touch()
            sys.exit(1)
        signal.signal(signal.SIGTERM, end)
        print("up")
        time.sleep(600)
    """

    with pytest.raises(KeyboardInterrupt):
        run(script, log, interrupt)

    assert marker.exists()


def alive(pid):
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"


def test_a_killed_run_is_a_failure_too(tmp_path):
    with pytest.raises(TrainingFailed, match=r"exit code -9: starting \(log: "):
        run(
            "import os, signal; print('starting'); os.kill(os.getpid(), signal.SIGKILL)",
            tmp_path / "log.txt",
        )


def test_descendants_are_found_at_any_depth():
    process = subprocess.Popen(
        [
            sys.executable,
            "-c",
            "import subprocess, sys; c = subprocess.Popen(['sleep', '60']);"
            "print(c.pid, flush=True); c.wait()",
        ],
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        grandchild = int(process.stdout.readline())
        assert {process.pid, grandchild} <= set(launch._descendants(os.getpid()))
        assert launch._descendants(process.pid) == [grandchild]
    finally:
        os.kill(grandchild, 9)
        process.communicate()
