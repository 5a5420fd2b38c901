"""What `make check-cuda` makes of the compiler's report."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "scripts" / "check_ptxas.py"
REPORT = """\
nvcc -O3 -Xptxas -v kernel.cu
ptxas info    : Compiling entry function '_Z4goodPf' for 'sm_80'
ptxas info    : Function properties for _Z4goodPf
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 32 registers, used 0 barriers, 360 bytes cmem[0]
ptxas info    : Compiling entry function '_Z5otherPf' for 'sm_90'
ptxas info    : Function properties for _Z5otherPf
    8 bytes stack frame, {stores} bytes spill stores, {loads} bytes spill loads
ptxas info    : Used 64 registers, used 1 barriers
"""


def check(folder: Path, report: str) -> subprocess.CompletedProcess:
    log = folder / "log"
    log.write_text(report)
    return subprocess.run([sys.executable, SCRIPT, log], capture_output=True, text=True)


def test_no_spill_passes_and_is_summed_up(tmp_path: Path) -> None:
    result = check(tmp_path, REPORT.format(stores=0, loads=0))
    assert result.returncode == 0
    assert "sm_80: 1 kernels, at most 32 registers" in result.stdout
    assert "sm_90: 1 kernels, at most 64 registers" in result.stdout


def test_a_spill_fails_and_names_the_kernel(tmp_path: Path) -> None:
    result = check(tmp_path, REPORT.format(stores=8, loads=4))
    assert result.returncode == 1
    assert "sm_90: 12 bytes spilled" in result.stderr and "other" in result.stderr
    assert "good" not in result.stderr


def test_a_log_without_kernels_fails(tmp_path: Path) -> None:
    assert check(tmp_path, "nothing to be done\n").returncode == 1
