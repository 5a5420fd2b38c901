"""The table of sizes, trainings and layouts, which the recipes' script and the planner share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

TABLE = Path(__file__).with_name("recipes.txt")


def table_rows(kind: str) -> Iterator[list[str]]:
    """The rows of the table that begin with `kind`, without that word."""
    for line in TABLE.read_text(encoding="utf-8").splitlines():
        first, *words = line.split() or [""]
        if first == kind:
            yield words
