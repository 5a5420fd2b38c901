"""From what a run on a GPU found to its page and its flat keys."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from benchmarks.report import (
    flat_provenance,
    table,
)


@dataclass(frozen=True)
class Section:
    """One table, and its figures."""

    title: str
    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    note: str
    flat: Mapping[str, object]
    """With units in the keys; None is what was not measured."""

    def markdown(self) -> str:
        """For the page."""
        parts = [f"## {self.title}", self.note, table(self.head, self.rows)]
        return "\n\n".join(part for part in parts if part)


@dataclass(frozen=True, kw_only=True)
class GpuReport:
    """One run: what was done, what came out, where."""

    missing: str | None
    """Why nothing was measured, if so."""
    outcomes: Mapping[str, str]
    """How each step went."""
    sections: Sequence[Section]
    failures: Mapping[str, str]
    """Figures that are missing because of an error."""
    counts: Mapping[str, object]
    """Of the tests."""
    settings: Mapping[str, object]
    machine: Mapping[str, str]

    def flat(self) -> dict[str, object]:
        """Everything under flat keys."""
        result: dict[str, object] = {"measured": self.missing is None, "missing": self.missing}
        result |= {f"{step}_outcome": outcome for step, outcome in self.outcomes.items()}
        result |= dict(self.counts)
        for section in self.sections:
            result |= dict(section.flat)
        return result | flat_provenance(self.settings, self.machine)

    def json(self) -> str:
        """The flat keys as a file."""
        return json.dumps(self.flat(), indent=2) + "\n"

    def markdown(self) -> str:
        """The result for people, as a Markdown page."""
        parts = ["# csrc on one GPU: built, tested and timed"]
        if self.missing is not None:
            parts.append(f"Nothing was measured: {self.missing}.")
        parts.append(table(["step", ""], [list(each) for each in self.outcomes.items()]))
        parts += [section.markdown() for section in self.sections]
        if self.failures:
            parts.append("## Failures")
            parts.append(table(["figure", ""], [list(each) for each in self.failures.items()]))
        parts += [
            "How it is measured, and where the targets come from: the modules of benchmarks/gpu.",
            table(["setting", ""], [[name, str(value)] for name, value in self.settings.items()]),
            table(["machine", ""], [[name, value] for name, value in self.machine.items()]),
        ]
        return "\n\n".join(parts) + "\n"


def verdict(value: float | None, least: float | None) -> str:
    """Whether a figure meets its target."""
    if least is None:
        return "not judged"
    if value is None:
        return "not measured"
    return "yes" if value >= least else "NO"
