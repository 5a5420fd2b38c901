"""Showing how far the demo is: a bar on a terminal, plain lines elsewhere."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from megatron.boost.training_log import Iteration

PLAIN_LINES_PER_RUN = 10


class Steps(Protocol):
    """What is told of every iteration of a run."""

    def __call__(self, iteration: Iteration, tokens_per_second: float) -> None:
        """Show that `iteration` is done."""


@contextmanager
def show_run(console: Console, title: str, total: int) -> Iterator[Steps]:
    """Show one run of `total` steps; yields what is to be called after each of them."""
    if console.is_terminal:
        with _bar(console) as bar:
            task = bar.add_task(title, total=total, loss="starting", speed="")

            def advance(iteration: Iteration, tokens_per_second: float) -> None:
                bar.update(
                    task,
                    completed=iteration.number,
                    loss=f"loss {iteration.loss:.3f}",
                    speed=f"{tokens_per_second:,.0f} tokens/s",
                )

            yield advance
        return

    def say(iteration: Iteration, tokens_per_second: float) -> None:
        if iteration.number % max(1, total // PLAIN_LINES_PER_RUN) == 0 or iteration.number == 1:
            console.print(
                f"{title}: step {iteration.number}/{total}, loss {iteration.loss:.3f}, "
                f"{tokens_per_second:,.0f} tokens/s",
                soft_wrap=True,
            )

    yield say


def _bar(console: Console) -> Progress:
    return Progress(
        TextColumn("{task.description:<16}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[loss]}"),
        TextColumn("{task.fields[speed]}"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        console=console,
    )
