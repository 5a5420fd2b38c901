"""The report: one HTML file with the findings, the curves, the table and the configuration."""

from collections.abc import Mapping, Sequence
from html import escape

from megatron.boost.demo.results import Result
from megatron.boost.demo.table import LEGEND, ROWS
from megatron.boost.plotting.page import page, table


def html_report(
    findings: Sequence[str],
    results: Sequence[Result],
    curves: str,
    settings: Mapping[str, Mapping[str, str]],
    commands: Mapping[str, str],
) -> str:
    """The page; it needs no other file and no network.

    `findings` are sentences, `curves` an `<svg>` element, `settings` tables of names and values by
    heading, `commands` the command line of each run by its title.
    """
    titles = [result.strategy.title for result in results]
    parts = [
        "<h1>BOOST demo: one model, trained three ways</h1>",
        "".join(f"<p>{escape(sentence)}</p>" for sentence in findings),
        "<h2>Training loss</h2>",
        curves,
        '<p class="note">Faint: every iteration. Strong: the mean of ten.</p>',
        "<h2>Results</h2>",
        table(["", *titles], ([r.heading, *(r.cell(result) for result in results)] for r in ROWS)),
        f'<p class="note">{escape(LEGEND)}</p>',
    ]
    for heading, values in settings.items():
        parts.append(f"<h2>{escape(heading)}</h2>")
        parts.append(table([], values.items(), style="settings"))
    parts.append("<h2>Commands</h2>")
    for title, command in commands.items():
        parts.append(f"<p>{escape(title)}</p><pre>{escape(command)}</pre>")
    return page("BOOST demo", parts)
