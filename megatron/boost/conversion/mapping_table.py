"""The table that `--dry-run` prints: which tensor of the source goes into which of the target.

Every tensor of both sides stands in it: readers refuse a source with one too many or one too few,
and the targets are all those that will be written.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from megatron.boost.conversion.exporting import Export
from megatron.boost.conversion.importing import ImportPlan


@dataclass(frozen=True)
class Row:
    """One tensor of the target and what it is made of."""

    sources: tuple[str, ...]
    """Each with shape and dtype; none for what the target has and the source has not."""
    target: str
    """With shape and dtype; "-" where the source is not needed."""
    how: str


def import_rows(plan: ImportPlan) -> list[Row]:
    """The rows of an import."""
    source, rows = plan.source, []
    for entry in plan.entries:
        names = [name for each in entry.canonical for name in plan.sources(each)]
        sources = []
        for name in names:
            found = source.entry(name)
            sources.append(_shown(found.name, found.stored_shape, source.dtype(name)))
        exact = all(plan.sources(name) == (name,) for name in entry.canonical)
        how = "truncated" if names else "new"
        form = source.entry(names[0]).form if len(names) == 1 and exact else entry.form
        place = "" if entry.layer is None else f"[{entry.layer}]"
        target = _shown(f"{entry.name}{place}", entry.shape, plan.dtypes[entry.canonical[0]])
        rows.append(Row(tuple(sources), target, form if exact else how))
    for name in source.ignored:
        info = source.reader.tensors[name]
        rows.append(Row((_shown(name, info.shape, info.dtype),), "-", "follows from the others"))
    return rows


def export_rows(export: Export) -> list[Row]:
    """The rows of an export."""
    reader, rows = export.reader, []
    by_canonical = {name: entry for entry in reader.entries for name in entry.canonical}
    for entry in export.entries:
        sources = []
        for name in export.sources(entry):
            found = by_canonical[name]
            place = "" if found.layer is None else f"[{found.layer}]"
            sources.append(_shown(f"{found.name}{place}", found.shape, reader.dtype(name)))
        kind = by_canonical[export.sources(entry)[0]].form
        how = "product" if len(sources) > 1 else f"part of {kind}" if "over" in kind else kind
        how = "part of qkv by group" if kind == "qkv by group" else how
        target = _shown(entry.name, entry.shape, export.dtype_of(entry))
        rows.append(Row(tuple(sources), target, how))
    return rows


def lines(rows: Sequence[Row]) -> Iterable[str]:
    """The table as text, a line for each source of a target."""
    shown = [(source, row) for row in rows for source in row.sources or ("-",)]
    width = max(len(source) for source, _ in shown)
    right = max(len(row.target) for row in rows)
    for source, row in shown:
        last = not row.sources or source is row.sources[-1]
        target = f"{row.target:<{right}}  {row.how}" if last else ""
        yield f"{source:<{width}}  {'->' if last else ' +'}  {target}".rstrip()
    sources = {source for source, _ in shown if source != "-"}
    targets = {row.target for row in rows if row.target != "-"}
    yield f"{len(sources)} tensors of the source, {len(targets)} of the target"


def _shown(name: str, shape: Sequence[int], dtype: torch.dtype) -> str:
    return f"{name} {list(shape)} {str(dtype).removeprefix('torch.')}"
