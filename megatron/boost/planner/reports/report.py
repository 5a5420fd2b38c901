"""A report: paragraphs and tables for the terminal, and the same figures flat, for JSON."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import dataclass, field

from rich.console import Console
from rich.table import Table

_LEAST_WIDTH = 190


@dataclass
class Report:
    """Grows as it is written."""

    blocks: list[str | Table] = field(default_factory=list)
    flat: dict[str, object] = field(default_factory=dict)
    """Flat keys with units in their names."""

    def say(self, text: str) -> None:
        """Add a paragraph."""
        self.blocks.append(text)

    def table(self, title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        """Add a table; the first column is text, the others are numbers."""
        table = Table(title=title, title_justify="left", title_style="bold")
        for position, column in enumerate(columns):
            table.add_column(column, justify="right" if position else "left")
        for row in rows:
            table.add_row(*row)
        self.blocks.append(table)

    def show(self) -> None:
        """Print on standard output. No figure is cut for want of room: in a narrow terminal a
        table's lines go on in the next one."""
        width = max(_LEAST_WIDTH, shutil.get_terminal_size().columns)
        console = Console(width=width, highlight=False, markup=False)
        for block in self.blocks:
            console.print(block, soft_wrap=isinstance(block, str))
