"""A size in bytes on the command line, as transformers spells it: 5GB, 200MB, 1GiB."""

from __future__ import annotations

import argparse
import re

_UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


def byte_size(text: str) -> int:
    """An argparse type: bytes from a number with a unit or without one."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMG]I?B)?", text.strip().upper())
    size = int(float(found[1]) * _UNITS[found[2] or ""]) if found is not None else 0
    if size < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no size; a usual value is 5GB")
    return size
