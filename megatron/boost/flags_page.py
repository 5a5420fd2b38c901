"""The documentation of the flags, generated: ours from their dataclasses, Megatron's from the table
of what becomes of each. `python -m megatron.boost.flags_page` writes both pages.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import get_args

from boost_layers.config import LowRankConfig
from boost_layers.rules import Outcome, Rule
from megatron.boost.arguments import LaunchConfig
from megatron.boost.flags import flags_of
from megatron.boost.megatron_flags import GROUPS, megatron_actions, megatron_parser, rule_of

DOCS = Path(__file__).parents[2] / "docs"

_MEANING: dict[Outcome, str] = {
    "honoured": "our layers do as it says",
    "conditional": "honoured, but refused by name in the combination that is named",
    "refused": "any value but the legal one is refused by name, before any process group is made",
    "apart": "does not touch the layer: works as in Megatron",
}
_INTRODUCTION = """\
# Megatron's flags

What becomes of every flag of Megatron-Core 0.19 beside `--low-rank-arch dense`, `cola`, `svd` or
`lax`. Without one of them the run is Megatron's own, and only data that `pretrain_gpt.py` does not
feed (`--sft`, `--perform-rl-step`, …) is refused. The table behind this page refuses the flags, and
the fields of `TransformerConfig` of a program that calls `low_rank_spec`; a test walks Megatron's
parser, so a new flag fails it until it is classified. `python -m megatron.boost.flags_page` writes
the page.
"""


def megatron_page() -> str:
    """The page about Megatron's flags, by its argument groups."""
    parser = megatron_parser()
    counts: Counter[Outcome] = Counter()
    sections = []
    for title, actions in megatron_actions(parser).items():
        by_rule: dict[tuple[int, str, str], list[str]] = {}
        for action in actions:
            rule = rule_of(action.dest, title)
            counts[rule.outcome] += 1
            row = (list(_MEANING).index(rule.outcome), _outcome(rule), rule.note)
            names = " or ".join(f"`{option}`" for option in action.option_strings)
            by_rule.setdefault(row, []).append(names)
        sections += ["", f"## {title}", ""]
        if title in GROUPS:
            outcome = _outcome(GROUPS[title])
            sections.append(f"{len(actions)} flags, {outcome}: {GROUPS[title].note}.")
            continue
        sections += ["| flags | | |", "|---|---|---|"]
        for row in sorted(by_rule):
            sections.append(f"| {', '.join(by_rule[row])} | {row[1]} | {row[2]} |")
    legend = [
        f"- **{outcome}** ({counts[outcome]}): {_MEANING[outcome]}" for outcome in get_args(Outcome)
    ]
    return "\n".join([_INTRODUCTION, *legend, *sections]) + "\n"


def _outcome(rule: Rule) -> str:
    if rule.outcome != "refused":
        return rule.outcome
    if rule.instead is not None and rule.instead.startswith("pass "):
        return "needed"
    values = [str(v) for v in rule.legal or () if isinstance(v, str | int) and v is not False]
    values += ["the tensor-parallel size"] if rule.same_as is not None else []
    if values:
        return f"refused, but for {', '.join(values)}"
    return "refused" if rule.instead is None else f"refused; use {rule.instead}"


def own_page() -> str:
    """The page about BOOST's own flags."""
    lines = [
        "# BOOST's flags",
        "",
        "Of `pretrain_gpt.py`, beside [Megatron's](megatron-flags.md). A flag that others leave "
        "without an effect is refused. In a program of your own each flag of the model is a field "
        "of `LowRankConfig`, and in `BOOST_LOW_RANK` a `field=value`. This page is generated: "
        "`python -m megatron.boost.flags_page`.",
    ]
    for cls, title in ((LowRankConfig, "The model"), (LaunchConfig, "The run")):
        lines += ["", f"## {title}", "", "| flag | field | default | |", "|---|---|---|---|"]
        for flag in flags_of(cls):
            values = "" if flag.kind is bool else _values(flag.choices, flag.keywords, flag.kind)
            default = "" if flag.default is None else str(flag.default)
            lines.append(
                f"| `{flag.name}{values}` | `{flag.field}` | {default} | {_cell(flag.help)} |"
            )
    return "\n".join(lines) + "\n"


def _values(choices: tuple[str, ...], keywords: dict[str, object], kind: type) -> str:
    if choices:
        return " " + _cell("|".join(choices))
    shown = str(keywords.get("metavar", kind.__name__.upper()))
    return f" [{shown}]" if keywords.get("nargs") == "?" else f" {shown}"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def pages() -> dict[Path, str]:
    """Both pages' text by file."""
    return {DOCS / "megatron-flags.md": megatron_page(), DOCS / "flags.md": own_page()}


if __name__ == "__main__":
    for path, text in pages().items():
        path.write_text(text, encoding="utf-8")
