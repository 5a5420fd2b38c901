"""Running one training as a child process: its log, its error, its end."""

import contextlib
import os
import re
import signal
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

GRACE_SECONDS = 15.0

_RANK_PREFIX = re.compile(r"^\[(?:default|rank)\d+\]:\s?")
_EXCEPTION = re.compile(r"^(?:[A-Za-z_]\w*\.)*[A-Z]\w*(?:Error|Exception|Interrupt|Exit)\b.*")
_LAUNCHERS_OWN = ("ChildFailedError", "SignalException")


class TrainingFailed(ChildProcessError):
    """A training that ended with an error; its message has the run's own error and the log."""


def run_training(
    title: str,
    command: Sequence[str],
    log: Path,
    on_line: Callable[[str], None],
    *,
    environment: Mapping[str, str],
) -> None:
    """Run `command`, write its output to `log` and hand each line to `on_line`.

    Raises `TrainingFailed` when it fails. However this function is left (Ctrl-C included), the
    command and all its descendants have ended.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    process = subprocess.Popen(
        command,
        env=dict(environment),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        stdin=subprocess.DEVNULL,
        text=True,
        encoding="utf-8",
        errors="replace",
        # Ctrl-C in the terminal reaches the demo alone, which then ends the ranks in order.
        start_new_session=True,
    )
    assert process.stdout is not None
    try:
        with log.open("w", encoding="utf-8") as file:
            for line in process.stdout:
                file.write(line)
                file.flush()
                on_line(line)
        code = process.wait()
    finally:
        _end(process)
        process.stdout.close()
    if code != 0:
        reason = own_error(log.read_text(encoding="utf-8").splitlines())
        raise TrainingFailed(
            f"{title}: training failed with exit code {code}: {reason} (log: {log})"
        )


def own_error(lines: Sequence[str]) -> str:
    """The line of a training's output that says why it failed.

    That is its first `error: …` line, else the last line of the first traceback, else its last
    line. What the launcher says about its children is passed over.
    """
    lines = [_RANK_PREFIX.sub("", line).strip() for line in lines]
    for line in lines:
        if line.startswith("error: "):
            return line.removeprefix("error: ")
    for line in lines:
        if _EXCEPTION.match(line) and not any(name in line for name in _LAUNCHERS_OWN):
            return line
    spoken = [line for line in lines if line.strip("-=| ")]
    return spoken[-1] if spoken else "it printed nothing"


def _end(process: "subprocess.Popen[str]") -> None:
    """End the launcher and its ranks: politely, and after some seconds by force."""
    if process.poll() is not None:
        return
    with _held(_descendants(process.pid)) as ranks:
        process.terminate()
        try:
            # The launcher passes the signal on: its ranks are in sessions of their own.
            process.wait(GRACE_SECONDS)
        except subprocess.TimeoutExpired:
            pass
        finally:
            process.kill()
            for rank in ranks:
                with contextlib.suppress(ProcessLookupError):
                    signal.pidfd_send_signal(rank, signal.SIGKILL)
            process.wait()


@contextlib.contextmanager
def _held(pids: Sequence[int]) -> Iterator[list[int]]:
    """File descriptors for processes, which never mean another process of the same number."""
    descriptors = []
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            descriptors.append(os.pidfd_open(pid))
    try:
        yield descriptors
    finally:
        for descriptor in descriptors:
            os.close(descriptor)


def _descendants(pid: int) -> list[int]:
    """Process ids of all descendants of `pid`; none where there is no /proc to read them from."""
    children: dict[int, list[int]] = {}
    for status in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            # The name, in brackets, may hold anything; the parent is the second field after it.
            parent = int(status.read_text().rpartition(")")[2].split()[1])
            children.setdefault(parent, []).append(int(status.parent.name))
    found = list(children.get(pid, []))
    for child in found:
        found.extend(children.get(child, []))
    return found
