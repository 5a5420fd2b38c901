"""Command-line flags from a dataclass: names, types, choices, defaults and help.

A field with `metadata["flag"]` becomes a flag; its type gives the accepted values, or
`metadata["words"]()` where more may be registered, and its docstring the help. A Boolean field
whose default is True appears as its negation (`--no-…`).
"""

from __future__ import annotations

import ast
import dataclasses
import difflib
import functools
import inspect
import types
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator, Sequence
from typing import Any, Literal, NoReturn, Union, get_args, get_origin, get_type_hints


@dataclasses.dataclass(frozen=True)
class Flag:
    """One flag and the field it sets."""

    name: str
    """As typed, e.g. `--low-rank-ratio`."""
    field: str
    default: Any
    kind: type
    """bool, int, float or str."""
    choices: tuple[str, ...]
    help: str
    keywords: dict[str, Any]
    """More keywords for `add_argument`."""

    @property
    def destination(self) -> str:
        """The attribute of the parsed arguments: the flag's name without a `no-`."""
        return self.name.removeprefix("--").removeprefix("no-").replace("-", "_")


def flags_of(cls: type) -> Iterator[Flag]:
    """The flags of a dataclass in the order of its fields."""
    helps = _docstrings(cls)
    hints = get_type_hints(cls)
    for field in dataclasses.fields(cls):
        if "flag" not in field.metadata:
            continue
        keywords = dict(field.metadata)
        del keywords["flag"]
        kind, choices = _kind(hints[field.name])
        if "words" in keywords:
            choices = keywords.pop("words")()
        yield Flag(
            name=field.metadata["flag"],
            field=field.name,
            default=field.default,
            kind=kind,
            choices=choices,
            help=helps[field.name],
            keywords=keywords,
        )


def add_flags(parser: ArgumentParser, cls: type, title: str) -> None:
    """Add a group with the flags of `cls` to `parser`."""
    group = parser.add_argument_group(title)
    for flag in flags_of(cls):
        options: dict[str, Any] = {"dest": flag.destination, "default": flag.default}
        shown = "" if flag.default is None or flag.kind is bool else f" (default: {flag.default})"
        options["help"] = (flag.help + shown).replace("%", "%%")
        if flag.kind is bool:
            options["action"] = "store_false" if flag.default else "store_true"
        elif flag.choices:
            options["choices"] = flag.choices
        else:
            options["type"] = flag.kind
        group.add_argument(flag.name, **options, **flag.keywords)


def config_from(arguments: Namespace, cls: type, **more: Any) -> Any:
    """An instance of `cls` from parsed arguments; `more` are fields without a flag."""
    values = {flag.field: getattr(arguments, flag.destination) for flag in flags_of(cls)}
    return cls(**values, **more)


def is_given(argv: Sequence[str], flag: str) -> bool:
    """Whether the command line `argv` has `flag`, as `--flag value` or `--flag=value`."""
    return any(argument == flag or argument.startswith(f"{flag}=") for argument in argv)


def values_of(argv: Sequence[str], flag: str) -> list[str]:
    """The values that `argv` gives `flag`, as `--flag value` or `--flag=value`."""
    values = []
    for position, argument in enumerate(argv):
        if argument == flag:
            values.append(argv[position + 1] if position + 1 < len(argv) else "")
        elif argument.startswith(f"{flag}="):
            values.append(argument.partition("=")[2])
    return values


def refuse_in_one_line(parser: ArgumentParser) -> None:
    """Make `parser` raise ValueError, naming the nearest legal value or flag where there is one,
    instead of printing its usage of several hundred lines."""

    def error(message: str) -> NoReturn:
        raise ValueError(_with_nearest(parser, message.removeprefix("argument ")))

    parser.error = error  # type: ignore[method-assign]


def make_help_printable(parser: ArgumentParser) -> None:
    """Escape the percent signs of help texts that argparse cannot format: with one such text, and
    Megatron 0.19 has one, `--help` ends in an error."""
    formatter = parser._get_formatter()
    for action in parser._actions:
        if action.help:
            try:
                formatter._expand_help(action)
            except (KeyError, TypeError, ValueError):
                action.help = action.help.replace("%", "%%")


def _with_nearest(parser: ArgumentParser, message: str) -> str:
    unrecognized = message.removeprefix("unrecognized arguments: ")
    if unrecognized != message:
        given = unrecognized.split()[0].partition("=")[0]
        if not given.startswith("-"):
            return f"{given}: stands where a flag is expected"
        known = [option for action in parser._actions for option in action.option_strings]
        near = difflib.get_close_matches(given, known, n=1, cutoff=0.0)
        return f"{given}: no such flag; the nearest is {near[0]}"
    flag, _, rest = message.partition(": ")
    for action in parser._actions:
        if flag.split("/")[0] in action.option_strings and action.choices and "'" in rest:
            value = rest.split("'")[1]
            legal = [str(choice) for choice in action.choices]
            near = difflib.get_close_matches(value, legal, n=1, cutoff=0.0)
            return f"{flag} {value}: legal values are {', '.join(legal)}; the nearest is {near[0]}"
    return message


def _kind(hint: Any) -> tuple[type, tuple[str, ...]]:
    """The scalar type and the choices of a field's type; Optional counts as what it wraps."""
    if get_origin(hint) in (Union, types.UnionType):
        hint = next(part for part in get_args(hint) if part is not type(None))
    if get_origin(hint) is Literal:
        return str, get_args(hint)
    return hint, ()


@functools.cache
def _docstrings(cls: type) -> dict[str, str]:
    """The docstring under each field of a class, in one line."""
    (definition,) = ast.parse(inspect.cleandoc("\n" + inspect.getsource(cls))).body
    assert isinstance(definition, ast.ClassDef)
    found = {}
    for statement, following in zip(definition.body, definition.body[1:], strict=False):
        if (
            isinstance(statement, ast.AnnAssign)
            and isinstance(statement.target, ast.Name)
            and isinstance(following, ast.Expr)
            and isinstance(following.value, ast.Constant)
        ):
            found[statement.target.id] = " ".join(str(following.value.value).split())
    return found
