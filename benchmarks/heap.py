"""Memory in use by this process's tensors, to the byte, on either kind of device."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable

import torch


class _MallocInfo(ctypes.Structure):
    """glibc's `struct mallinfo2`."""

    _fields_ = tuple(
        (name, ctypes.c_size_t)
        for name in (
            "arena",
            "ordblks",
            "smblks",
            "hblks",
            "hblkhd",
            "usmblks",
            "fsmblks",
            "uordblks",
            "fordblks",
            "keepcost",
        )
    )


def bytes_in_use(device: torch.device) -> int:
    """On CUDA what torch's allocator has given out; on CPU what malloc has, to tensors and to
    everything else, which hardly changes between two moments of a loop.

    Raises:
        RuntimeError: on CPU without glibc 2.33 or newer.
    """
    if device.type == "cuda":
        torch.cuda.synchronize()
        return torch.cuda.memory_allocated(device)
    info = _mallinfo()()
    return int(info.uordblks + info.hblkhd)


@functools.cache
def _mallinfo() -> Callable[[], _MallocInfo]:
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "mallinfo2"):
        raise RuntimeError("memory on CPU is read from glibc's mallinfo2, which is not there")
    libc.mallinfo2.restype = _MallocInfo
    return libc.mallinfo2
