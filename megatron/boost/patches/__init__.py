"""Gaps in the Megatron-Core that pip installs, one file each.

A patch is temporary by intent: it says why it is there, and its test runs the unpatched upstream
and fails when the fault is gone. Patches work at run time and are undone on leaving their context,
so nothing in site-packages changes.
"""

from __future__ import annotations

import contextlib
import importlib
import runpy
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Literal

MEGATRON_CORE_RELEASE = (0, 19)

# The first one spares the others' imports of Megatron that of TorchDynamo.
_MODULES = (
    "eager_jit_fuser",
    "allow_no_cuda",
    "tensor_type",
    "compile_helpers",
    "distrib_optimizer_empty_state",
    "distrib_optimizer_shared_step",
    "distrib_optimizer_lost_step",
    "distrib_optimizer_leaf_copy",
    "optimizer_of_another_kind",
    "forked_checkpoint_writer",
    "sequence_parallel_norm",
    "zero_centered_norm",
    "throughput",
    "theoretical_memory",
)


@dataclass(frozen=True)
class Patch:
    """One gap in upstream and the context that closes it."""

    name: str
    """The module's name under `megatron.boost.patches`."""

    reason: str
    """What goes wrong without it, in one sentence."""

    needs: Literal["cpu", "always"]
    """`cpu`: wrong only without a GPU. `always`: wrong on a GPU too."""

    apply: Callable[[], AbstractContextManager[None]]
    """Applies the patch on entry and undoes it on exit."""


def all_patches() -> list[Patch]:
    """Every patch, in the order of application."""
    return [importlib.import_module(f"{__name__}.{name}").PATCH for name in _MODULES]


def apply_cpu() -> AbstractContextManager[None]:
    """Context with the patches that Megatron needs on a machine without a GPU only."""
    return _applied("cpu")


def apply_always() -> AbstractContextManager[None]:
    """Context with the patches for what is wrong on every device."""
    return _applied("always")


@contextlib.contextmanager
def _applied(needs: str) -> Iterator[None]:
    check_megatron_core_release(installed_megatron_core())
    with contextlib.ExitStack() as stack:
        for patch in all_patches():
            if patch.needs == needs:
                stack.enter_context(patch.apply())
        yield


def installed_megatron_core() -> tuple[int, int, int]:
    """Version of the Megatron-Core that an import finds, without importing it.

    That may be a Megatron-LM checkout's, whatever the installed package's metadata say.
    """
    import megatron

    core = PathFinder.find_spec("megatron.core", megatron.__path__)
    assert core is not None and core.origin is not None
    info = runpy.run_path(str(Path(core.origin).with_name("package_info.py")))
    return info["MAJOR"], info["MINOR"], info["PATCH"]


def check_megatron_core_release(found: tuple[int, ...]) -> None:
    """Refuses a Megatron-Core that the patches were not written for.

    Raises:
        ValueError: naming the version `found` and the nearest one that is known.
    """
    if found[:2] != MEGATRON_CORE_RELEASE:
        release = ".".join(map(str, MEGATRON_CORE_RELEASE))
        raise ValueError(
            f"megatron-core {'.'.join(map(str, found))}: its gaps are not known, and patches for "
            f"another release would change the wrong code; nearest known release: {release} "
            f"(pip install 'megatron-core[training]~={release}.0')"
        )
