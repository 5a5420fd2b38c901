"""The table of results, for the terminal and for the report: a row a quantity, a column a run."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rich.table import Table

from megatron.boost.demo.results import Result


@dataclass(frozen=True)
class Row:
    """A quantity and how it is written for one run."""

    heading: str
    cell: Callable[[Result], str]


ROWS = (
    Row("loss", lambda result: f"{result.loss:.3f}"),
    Row("validation loss", lambda result: f"{result.validation_loss:.3f}"),
    Row("tokens/s", lambda result: f"{result.tokens_per_second:,.0f}"),
    Row("iteration, ms", lambda result: f"{result.iteration_ms:,.0f}"),
    Row("collectives per layer, forward", lambda result: str(result.forward)),
    Row("collectives per layer, backward", lambda result: str(result.backward)),
    Row("MiB per layer, forward", lambda result: f"{result.forward.mib:.2f}"),
    Row("MiB per layer, backward", lambda result: f"{result.backward.mib:.2f}"),
    Row("parameters", lambda result: f"{result.parameters / 1e6:.2f} M"),
    Row("peak memory of a rank, MiB", lambda result: f"{result.peak_memory_mib:,.0f}"),
)

LEGEND = (
    "loss: mean of the last tenth of the training. tokens/s, iteration: median, without the first "
    "ten. AR all-reduce, AG all-gather, RS reduce-scatter: for one micro-batch, inside the layers; "
    "MiB of the tensors that one rank hands over. Memory: resident, libraries included."
)


def terminal_table(results: Sequence[Result]) -> Table:
    """The results as a table for the terminal."""
    table = Table(caption=LEGEND, caption_justify="left")
    table.add_column("")
    for result in results:
        table.add_column(result.strategy.title, justify="right")
    for row in ROWS:
        table.add_row(row.heading, *(row.cell(result) for result in results))
    return table
