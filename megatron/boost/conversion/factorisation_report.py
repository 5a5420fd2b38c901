"""What became of a dense model's projections: errors and energies, layer by layer."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from math import sqrt

from rich.table import Table

from megatron.boost.conversion.truncation import Fit


@dataclass(frozen=True)
class _Row:
    layer: int
    projection: str
    rank: int
    fit: Fit
    squares: float
    """‖W‖², or with calibration the mean of ‖W·x‖²: what the errors are shares of."""


@dataclass
class FactorisationReport:
    """Filled while the factors are made; whole when the last layer is."""

    parameters_before: int
    parameters_after: int
    calibration_tokens: int = 0
    """0: without calibration."""
    notes: list[str] = field(default_factory=list)
    """What the user should know, a line each."""
    rows: list[_Row] = field(default_factory=list)

    def add(self, layer: int, projection: str, rank: int, fit: Fit, squares: float) -> None:
        """Take the result of one projection."""
        self.rows.append(_Row(layer, projection, rank, fit, squares))

    def by_layer(self) -> Iterator[tuple[int, float, float, _Row]]:
        """Of each layer: its number, the error and the energy kept over its seven projections
        together, and the projection that lost most."""
        layers: dict[int, list[_Row]] = defaultdict(list)
        for row in self.rows:
            layers[row.layer].append(row)
        for layer, rows in layers.items():
            whole = sum(row.squares for row in rows)
            lost = sum(row.squares * row.fit.error**2 for row in rows)
            share = lost / whole if whole else 0.0
            yield layer, sqrt(share), 1.0 - share, max(rows, key=lambda row: row.fit.error)

    def table(self) -> Table:
        """For the terminal: a row for each layer, the parameters below."""
        measured = "of the outputs" if self.calibration_tokens else "of the weights"
        table = Table(title=f"Truncated SVD (errors {measured}, relative)")
        for column in ("layer", "error", "energy kept", "worst projection", "its rank"):
            table.add_column(column, justify="left" if column == "worst projection" else "right")
        for layer, error, energy, worst in self.by_layer():
            table.add_row(
                str(layer),
                f"{error:.2e}",
                f"{energy:.2%}",
                f"{worst.projection} ({worst.fit.error:.2e})",
                str(worst.rank),
            )
        before, after = self.parameters_before, self.parameters_after
        table.caption = f"parameters: {before:,} before, {after:,} after ({after / before:.1%})"
        return table

    def values(self) -> dict[str, object]:
        """Flat, for `--json`: errors relative, energies as shares of 1."""
        values: dict[str, object] = {
            "parameters_before": self.parameters_before,
            "parameters_after": self.parameters_after,
            "parameters_after_over_before": self.parameters_after / self.parameters_before,
            "calibration_tokens": self.calibration_tokens,
            "least_energy_kept": min((row.fit.energy for row in self.rows), default=1.0),
        }
        for row in self.rows:
            values[f"rank_{row.projection}"] = row.rank
        for layer, error, energy, _ in self.by_layer():
            values[f"layer_{layer}_error"] = error
            values[f"layer_{layer}_energy_kept"] = energy
        for row in self.rows:
            prefix = f"layer_{row.layer}_{row.projection}"
            values[f"{prefix}_error"] = row.fit.error
            values[f"{prefix}_energy_kept"] = row.fit.energy
            values[f"{prefix}_weight_error"] = row.fit.weight_error
        return values
