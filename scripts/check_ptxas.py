#!/usr/bin/env python3
"""Reads what `nvcc -Xptxas -v` printed and fails if a kernel spills registers to memory.

usage: check_ptxas.py LOG
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

_ENTRY = re.compile(r"Compiling entry function '(?P<name>[^']+)' for '(?P<architecture>\w+)'")
_SPILLS = re.compile(r"(?P<stores>\d+) bytes spill stores, (?P<loads>\d+) bytes spill loads")
_REGISTERS = re.compile(r"Used (?P<registers>\d+) registers")


class Kernel(NamedTuple):
    """One kernel as compiled for one architecture."""

    name: str
    architecture: str
    registers: int
    spilled_bytes: int


def kernels_in(log: str) -> list[Kernel]:
    """Every kernel that the log tells of."""
    found = []
    for report in re.split(r"(?=Compiling entry function)", log):
        entry, registers = _ENTRY.search(report), _REGISTERS.search(report)
        if entry is None or registers is None:
            continue
        spills = _SPILLS.search(report)
        spilled = int(spills["stores"]) + int(spills["loads"]) if spills else 0
        found.append(
            Kernel(entry["name"], entry["architecture"], int(registers["registers"]), spilled)
        )
    return found


def readable(name: str) -> str:
    """The C++ name of a symbol, where c++filt is there to tell it."""
    try:
        return subprocess.run(
            ["c++filt", name], capture_output=True, text=True, check=True
        ).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return name


def main() -> int:
    """0 if there are kernels and none spills."""
    if len(sys.argv) != 2:
        print(__doc__, file=sys.stderr)
        return 2
    kernels = kernels_in(Path(sys.argv[1]).read_text(errors="replace"))
    if not kernels:
        print(f"{sys.argv[1]}: no kernel in it", file=sys.stderr)
        return 1
    for architecture in sorted({kernel.architecture for kernel in kernels}):
        of_it = [kernel for kernel in kernels if kernel.architecture == architecture]
        most = max(of_it, key=lambda kernel: kernel.registers)
        print(f"{architecture}: {len(of_it)} kernels, at most {most.registers} registers")
    spilling = [kernel for kernel in kernels if kernel.spilled_bytes]
    for kernel in spilling:
        print(
            f"{kernel.architecture}: {kernel.spilled_bytes} bytes spilled: {readable(kernel.name)}",
            file=sys.stderr,
        )
    return 1 if spilling else 0


if __name__ == "__main__":
    raise SystemExit(main())
