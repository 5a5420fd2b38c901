"""How a setting of Megatron's is treated beside our layers: the rules of which the tables of
features and flags are made.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from collections.abc import Callable

Outcome = Literal["apart", "honoured", "conditional", "refused"]


@dataclass(frozen=True)
class Rule:
    """How settings of Megatron's that belong together are treated."""

    outcome: Outcome
    """apart: does not touch the layer and works as in Megatron; honoured: by our layers;
    conditional: honoured, but refused in some combination; refused: any but a legal value."""
    note: str
    """The reason, for the documentation: what honours it, or what the layers lack."""
    legal: tuple[Any, ...] | None = None
    """Of a refused setting, the values that are accepted, the usual one first; None: Megatron's
    default alone."""
    same_as: str | None = None
    """Another setting whose value is legal too."""
    shown: str | None = None
    """What a message calls a refused setting, where its flag is not what a user has left out."""
    instead: str | None = None
    """What a message proposes; None: the first legal value, or to leave the flag out."""

    def accepts(self, value: Any, default: Any, other: Callable[[str], Any]) -> bool:
        """Whether a refused setting may have this value.

        Args:
            value: the setting's.
            default: Megatron's.
            other: gives the value of another setting by name.
        """
        legal = (default,) if self.legal is None else self.legal
        if any(value is choice or value == choice for choice in legal):
            return True
        return self.same_as is not None and value == other(self.same_as)

    def refusal(self, flag: str, value: Any, arch: str) -> str:
        """The message about a value that is not accepted."""
        named = flag if isinstance(value, bool) else f"{flag} {shown_value(value)}"
        return (
            f"{self.shown or named}: not supported by --low-rank-arch {arch}; "
            f"nearest legal value: {self.proposal}"
        )

    @property
    def proposal(self) -> str:
        """The nearest legal value of a refused setting, as a user would type it."""
        if self.instead is not None:
            return self.instead
        usual = self.legal[0] if self.legal else None
        return "leave it out" if usual is None or isinstance(usual, bool) else str(usual)


def shown_value(value: Any) -> str:
    """A setting's value as a user would type it."""
    if isinstance(value, list | tuple):
        return " ".join(str(part) for part in value)
    return str(getattr(value, "name", value))


def rules(*groups: tuple[Rule, str]) -> dict[str, Rule]:
    """A table by name from rules and the names, separated by blanks, that each is for.

    Raises:
        ValueError: for a name that stands in it twice.
    """
    table: dict[str, Rule] = {}
    for rule, names in groups:
        for name in names.split():
            if name in table:
                raise ValueError(f"{name} has two rules")
            table[name] = rule
    return table


def apart(note: str) -> Rule:
    """A rule for settings that do not touch the layer."""
    return Rule("apart", note)


def honoured(note: str) -> Rule:
    """A rule for settings that our layers honour."""
    return Rule("honoured", note)


def conditional(note: str) -> Rule:
    """A rule for settings that are refused in some combination, which `note` names."""
    return Rule("conditional", note)


def refused(note: str, *legal: Any, **more: Any) -> Rule:
    """A rule for settings of which only the `legal` values (none: the default) are accepted."""
    return Rule("refused", note, legal=legal or None, **more)


UNKNOWN = refused("added by a later release of Megatron than the table of its features")
"""For what stands in no table."""
