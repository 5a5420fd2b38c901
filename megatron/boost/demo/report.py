"""The report: one HTML file with the findings, the curves, the table and the configuration."""

from collections.abc import Mapping, Sequence
from html import escape

from megatron.boost.demo.results import Result
from megatron.boost.demo.table import LEGEND, ROWS

_STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; color: #222; max-width: 64rem; margin: 2rem auto;
       padding: 0 1rem; }
h1 { font-size: 1.6rem; } h2 { font-size: 1.2rem; margin-top: 2rem; }
svg { width: 100%; height: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { padding: .3rem .6rem; border-bottom: 1px solid #ddd; text-align: right; }
th:first-child, td:first-child { text-align: left; white-space: nowrap; }
.settings td { text-align: left; }
.note { color: #666; font-size: .85rem; }
pre { background: #f5f5f5; padding: .7rem; white-space: pre-wrap; overflow-wrap: anywhere;
      font-size: .8rem; }
"""


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
    parts = [
        "<h1>BOOST demo: one model, trained three ways</h1>",
        "".join(f"<p>{escape(sentence)}</p>" for sentence in findings),
        "<h2>Training loss</h2>",
        curves,
        '<p class="note">Faint: every iteration. Strong: the mean of ten.</p>',
        "<h2>Results</h2>",
        _results_table(results),
        f'<p class="note">{escape(LEGEND)}</p>',
    ]
    for heading, values in settings.items():
        parts.append(f"<h2>{escape(heading)}</h2>")
        parts.append(_settings_table(values))
    parts.append("<h2>Commands</h2>")
    for title, command in commands.items():
        parts.append(f"<p>{escape(title)}</p><pre>{escape(command)}</pre>")
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>BOOST demo</title><style>{_STYLE}</style></head>\n<body>\n"
        + "\n".join(parts)
        + "\n</body></html>\n"
    )


def _results_table(results: Sequence[Result]) -> str:
    titles = "".join(f"<th>{escape(result.strategy.title)}</th>" for result in results)
    rows = []
    for row in ROWS:
        cells = "".join(f"<td>{escape(row.cell(result))}</td>" for result in results)
        rows.append(f"<tr><td>{escape(row.heading)}</td>{cells}</tr>")
    return f"<table><tr><th></th>{titles}</tr>{''.join(rows)}</table>"


def _settings_table(values: Mapping[str, str]) -> str:
    rows = "".join(
        f"<tr><td>{escape(name)}</td><td>{escape(value)}</td></tr>"
        for name, value in values.items()
    )
    return f'<table class="settings">{rows}</table>'
