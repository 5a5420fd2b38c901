"""A cluster as a file that `load_cluster` reads, each field under a comment that says what it means
and where its value is from."""

from __future__ import annotations

import json
import re
import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

from megatron.boost.command_line import write_text
from megatron.boost.planner.cluster import Cluster

_COLUMNS = 100


def write_cluster(cluster: Cluster, path: Path, notes: Mapping[str, str]) -> None:
    """Write `cluster` to `path`, under a temporary name first.

    `notes` are said of a field, by its dotted name in the file (`memory.capacity_gib`), or of a
    table by its own; "" is the head of the file.

    Raises:
        ValueError: for a note on a field that is not there.
    """
    lines = [*_comment(notes.get("", "")), ""]
    used = {""}
    lines += _table(cluster, "", notes, used)
    if strangers := sorted(set(notes) - used):
        raise ValueError(f"note on {strangers[0]}: the cluster's file has no such field")
    write_text(path, "\n".join(lines).strip() + "\n")


def _table(content: Any, prefix: str, notes: Mapping[str, str], used: set[str]) -> Iterator[str]:
    """The lines of a table: its values, and then the tables in it, as TOML demands."""
    tables: list[tuple[str, Any]] = []
    for each in fields(content):
        value, name = getattr(content, each.name), f"{prefix}{each.name}"
        if is_dataclass(value):
            tables.append((name, value))
        elif isinstance(value, Mapping) and all(is_dataclass(v) for v in value.values()):
            tables += [(f"{name}.{_key(key)}", inner) for key, inner in value.items()]
        else:
            used.add(name)
            meaning = each.metadata["meaning"]
            yield from _comment(". ".join(part for part in (meaning, notes.get(name)) if part))
            yield f"{each.name} = {_value(value)}"
    for name, inner in tables:
        used.add(name)
        yield from ("", f"[{name}]", *_comment(notes.get(name, "")))
        yield from _table(inner, f"{name}.", notes, used)


def _comment(text: str) -> list[str]:
    return [
        f"# {line}".rstrip()
        for paragraph in text.split("\n")
        for line in textwrap.wrap(paragraph, _COLUMNS - 2) or [""]
        if text
    ]


def _value(value: Any) -> str:
    if isinstance(value, Mapping):
        return "{ " + ", ".join(f"{_key(k)} = {_value(v)}" for k, v in value.items()) + " }"
    return json.dumps(value, ensure_ascii=False)


def _key(name: str) -> str:
    return name if re.fullmatch(r"[A-Za-z0-9_-]+", name) else json.dumps(name)
