"""The steps of a run that measure, each a module of this folder with `measure` and `sections`.

They are imported when they are needed: they load the extension, which may only just have been
built.
"""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Mapping
from types import ModuleType

import torch

from benchmarks.gpu.plan import Measured, Plan
from benchmarks.gpu.report import Section

MEASURING = ("kernels", "gemms", "layers", "capture")


def measure(device: torch.device, step: str, plan: Plan) -> Measured:
    """Run in a process of its own: what a step finds."""
    found: Measured = _module(f"benchmarks.gpu.{step}").measure(device, plan)
    return found


def sections(plan: Plan, found: Mapping[str, Measured]) -> list[Section]:
    """All steps' tables; what a step did not find, or was not run for, is not measured."""
    return [
        section
        for step in MEASURING
        for section in _module(f"benchmarks.gpu.{step}").sections(plan, found.get(step, Measured()))
    ]


def extension_in_use() -> str:
    """What `python -m boost_layers.ops` says of the extension."""
    line: str = _module("boost_layers.ops.__main__").report()[0]
    return line.removeprefix("extension (csrc): ")


def _module(name: str) -> ModuleType:
    with warnings.catch_warnings():
        # That csrc is absent, which the results say themselves.
        warnings.simplefilter("ignore")
        return importlib.import_module(name)
