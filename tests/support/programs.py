"""Whole programs as a user starts them, in processes of their own."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).parents[2]
LAUNCHER_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


def finished_python(command: Sequence[str]) -> tuple[str, str]:
    """As `finished`, of this interpreter with these arguments."""
    return finished([sys.executable, *command])


def finished(
    command: Sequence[str], environment: Mapping[str, str] | None = None, timeout_s: float = 240
) -> tuple[str, str]:
    """What a process printed on standard output and standard error, once it ended well.

    It starts in the project's folder, finds this interpreter's programs first, and none of the
    variables of a launcher.

    Args:
        command: the program and its arguments.
        environment: variables that it has besides.
        timeout_s: how long it may take.
    """
    inherited = {k: v for k, v in os.environ.items() if k not in LAUNCHER_VARIABLES}
    programs = f"{Path(sys.executable).parent}:{inherited['PATH']}"
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        env={**inherited, "PATH": programs, **(environment or {})},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        output, errors = process.communicate(timeout=timeout_s)
    finally:
        # torchrun ends its ranks when it is asked to end, but not when it is killed.
        process.terminate()
        process.wait()
    assert process.returncode == 0, output + errors
    return output, errors
