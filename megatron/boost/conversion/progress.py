"""A progress bar for conversions, on a terminal only."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)
from rich.progress import (
    Progress as Bar,
)

Progress = Callable[[str, int], AbstractContextManager[Callable[[int], None]]]
"""Called with a title and a number of bytes; the context is told of bytes that are done."""


@contextmanager
def silent(title: str, total: int) -> Iterator[Callable[[int], None]]:
    """No progress bar."""
    yield lambda _: None


@contextmanager
def on_terminal(title: str, total: int) -> Iterator[Callable[[int], None]]:
    """A bar on standard error if that is a terminal, else nothing."""
    console = Console(stderr=True)
    columns = (
        TextColumn(title),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    with Bar(*columns, console=console, disable=not console.is_terminal) as bar:
        task = bar.add_task(title, total=total)
        yield lambda done: bar.advance(task, done)


@contextmanager
def without_bars() -> Iterator[None]:
    """Context in which transformers shows no progress bars; its own do not ask for a terminal."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()
