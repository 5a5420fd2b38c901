"""What a measurement was made with: hardware, commit and versions."""

import os
import platform
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

_PACKAGES = ("torch", "megatron-core", "transformers", "tokenizers", "numpy")


def describe_machine(repository: Path) -> dict[str, str]:
    """Name and value of everything that a result depends on besides its settings, for people.

    `repository` is the checkout whose commit is named; `-dirty` follows it when tracked files
    differ from it.
    """
    description = {
        "processor": processor(),
        "cores": str(len(os.sched_getaffinity(0)))
        if hasattr(os, "sched_getaffinity")
        else str(os.cpu_count()),
        "memory": _memory(),
        "system": f"{platform.system()} {platform.release()}",
        "commit": _commit(repository),
        "python": platform.python_version(),
    }
    for package in _PACKAGES:
        try:
            description[package] = version(package)
        except PackageNotFoundError:
            description[package] = "absent"
    return description


def processor() -> str:
    """The name that its maker gave it."""
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.is_file():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _memory() -> str:
    try:
        size = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError):
        return "unknown"
    return f"{size / 1024**3:.1f} GiB"


def _commit(repository: Path) -> str:
    try:
        found = subprocess.run(
            ["git", "describe", "--always", "--dirty", "--exclude=*"],
            cwd=repository,
            capture_output=True,
            text=True,
            check=True,
        )
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return found.stdout.strip()
