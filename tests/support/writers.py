"""Stand-ins for TensorBoard's and W&B's packages, as far as Megatron uses them."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock


@dataclass
class Written:
    """What a run wrote, in that order: tag, value, step."""

    tensorboard: list[tuple[str, float, int]] = field(default_factory=list)
    wandb: list[tuple[str, float, int]] = field(default_factory=list)

    def of(self, beginning: str) -> dict[tuple[str, int], float]:
        """TensorBoard's values by tag and step, of the tags that begin so."""
        return {(t, s): value for t, value, s in self.tensorboard if t.startswith(beginning)}


@contextmanager
def recorded_writers() -> Iterator[Written]:
    """Context in which both packages are there and record what they are given."""
    written = Written()

    class SummaryWriter:
        def __init__(self, log_dir: str, max_queue: int):
            self.log_dir = log_dir

        def add_scalar(self, tag: str, value: Any, step: int) -> None:
            written.tensorboard.append((tag, float(value), step))

        def add_text(self, *_: Any, **__: Any) -> None:
            pass

        def flush(self) -> None:
            pass

    def log(values: dict[str, Any], step: int) -> None:
        written.wandb.extend((tag, float(value), step) for tag, value in values.items())

    tensorboard, wandb = ModuleType("torch.utils.tensorboard"), ModuleType("wandb")
    tensorboard.SummaryWriter = SummaryWriter  # type: ignore[attr-defined]
    config = SimpleNamespace(update=lambda *_: None)
    for name, value in (
        ("init", lambda **_: None),
        ("log", log),
        ("config", config),
        ("finish", lambda: None),
        ("run", None),
    ):
        setattr(wandb, name, value)
    with (
        mock.patch.dict(sys.modules, {"torch.utils.tensorboard": tensorboard, "wandb": wandb}),
        mock.patch("megatron.boost.writers._installed", lambda package: True),
    ):
        yield written
