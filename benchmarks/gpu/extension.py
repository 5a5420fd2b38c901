"""Builds the extension, and runs the tests of a GPU."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections import deque
from pathlib import Path
from xml.etree import ElementTree

from benchmarks.command import REPOSITORY

TESTS = (
    "tests/gpu",
    "tests/unit/ops",
    "tests/unit/test_csrc_registration.py",
    "tests/unit/test_latent_ops.py",
    "tests/unit/test_statistics.py",
)
_LINES_SHOWN = 40


def build(device: str) -> str:
    """Build in place, with CUDA or for the CPU alone.

    Returns:
        How long it took.

    Raises:
        OSError: if it cannot be built.
    """
    if device == "cuda" and shutil.which("nvcc") is None:
        raise OSError("nvcc is not on the PATH")
    begin = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "setup.py", "build_ext", "--inplace", "--force"],
        cwd=REPOSITORY,
        env=os.environ | {"BOOST_BUILD": device},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    if done.returncode != 0:
        print("\n".join(deque(done.stdout.splitlines(), maxlen=_LINES_SHOWN)), flush=True)
        raise OSError(f"the compiler ended with {done.returncode}")
    return f"built in {time.perf_counter() - begin:.0f} s"


def run_tests() -> dict[str, int]:
    """Run `TESTS` and count them: `tests_passed`, `tests_failed` (errors are among them) and
    `tests_skipped`.

    Raises:
        OSError: if pytest did not get as far as to leave a report.
    """
    with tempfile.TemporaryDirectory(prefix="gpu-tests-") as folder:
        report = Path(folder) / "report.xml"
        done = subprocess.run(
            [sys.executable, "-m", "pytest", "-q", f"--junitxml={report}", *TESTS], cwd=REPOSITORY
        )
        if not report.is_file():
            raise OSError(f"pytest ended with {done.returncode} and without a report")
        return counted(report.read_text(encoding="utf-8"))


def counted(junit: str) -> dict[str, int]:
    """The counts in a report of pytest's `--junitxml`."""
    total = dict.fromkeys(("tests", "failures", "errors", "skipped"), 0)
    for suite in ElementTree.fromstring(junit).iter("testsuite"):
        for name in total:
            total[name] += int(suite.get(name, "0"))
    failed = total["failures"] + total["errors"]
    return {
        "tests_passed": total["tests"] - failed - total["skipped"],
        "tests_failed": failed,
        "tests_skipped": total["skipped"],
    }
