"""A page that needs no other file and no network, light or dark as its reader has it."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape

_STYLE = """
:root { color-scheme: light dark; --text: #222; --ground: #fff; --faint: #666; --line: #ddd;
        --block: #f5f5f5; }
@media (prefers-color-scheme: dark) {
  :root { --text: #ddd; --ground: #16181b; --faint: #999; --line: #3a3d42; --block: #22252a; }
}
body { font: 16px/1.5 system-ui, sans-serif; color: var(--text); background: var(--ground);
       max-width: 64rem; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.6rem; } h2 { font-size: 1.2rem; margin-top: 2rem; }
svg { width: 100%; height: auto; } svg text { fill: currentColor; }
svg .values circle { fill-opacity: 0; } svg .values circle:hover { fill-opacity: .7; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { padding: .3rem .6rem; border-bottom: 1px solid var(--line); text-align: right; }
th:first-child, td:first-child { text-align: left; white-space: nowrap; }
.settings td { text-align: left; }
.note { color: var(--faint); font-size: .85rem; }
pre { background: var(--block); padding: .7rem; white-space: pre-wrap; overflow-wrap: anywhere;
      font-size: .8rem; }
"""


def page(title: str, parts: Iterable[str]) -> str:
    """A whole page of `parts`, elements of its body, with a title."""
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{_STYLE}</style></head>\n<body>\n"
        + "\n".join(parts)
        + "\n</body></html>\n"
    )


def table(head: Iterable[str], rows: Iterable[Iterable[str]], style: str = "") -> str:
    """A table of texts; `style` is a class."""
    attribute = f' class="{style}"' if style else ""
    heads = "".join(f"<th>{escape(cell)}</th>" for cell in head)
    body = "".join(
        "<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows
    )
    return f"<table{attribute}>" + (f"<tr>{heads}</tr>" if heads else "") + f"{body}</table>"
