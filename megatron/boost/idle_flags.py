"""Flags of ours that the others leave without an effect: refused where they are given."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields

from boost_layers.config import LAX_SETTINGS, LowRankConfig, flag_of

_ALL = {field.name for field in fields(LowRankConfig) if "flag" in field.metadata}
_LAX = set(LAX_SETTINGS)
# With another value than its default, φ of a dense layer is refused by LowRankConfig.
_OF_DENSE = {"arch", "act", "mlp", "core_attention"}


@dataclass(frozen=True)
class _Idle:
    """Settings that have no effect in a situation, and how to give them one."""

    where: str
    settings: frozenset[str]
    instead: str


def _situations(low_rank: LowRankConfig) -> Iterable[_Idle]:
    """Those that hold for `low_rank`, the most general first."""
    if low_rank.arch == "none":
        yield _idle("on Megatron's own layers (--low-rank-arch none)", _ALL - {"arch"}, "arch cola")
        return
    if low_rank.arch == "dense":
        where = "on full-rank layers (--low-rank-arch dense)"
        yield _idle(where, _ALL - _OF_DENSE - _LAX, "arch cola")
    elif low_rank.activation == "identity":
        yield _idle("where φ is the identity", {"act_anneal"}, "act silu")
    if not low_rank.crossing:
        where = f"without a latent crossing (--low-rank-arch {low_rank.arch})"
        yield _idle(where, _LAX, "arch lax")
    if low_rank.tp == "btp":
        yield _idle("under --low-rank-tp btp", {"vanilla_attention"}, "tp vanilla")
    else:
        yield _idle("under --low-rank-tp vanilla", {"norm"}, "tp btp")


def _idle(where: str, settings: Iterable[str], setting_and_value: str) -> _Idle:
    name, value = setting_and_value.split()
    return _Idle(where, frozenset(settings), f"{flag_of(name)} {value}")


def refuse_idle_flags(argv: Sequence[str], low_rank: LowRankConfig) -> None:
    """Raise ValueError for the first flag of `argv` that the settings leave without an effect.

    Args:
        argv: the command line, as typed.
        low_rank: the settings that it gives.
    """
    for idle in _situations(low_rank):
        flags = {flag_of(name) for name in idle.settings}
        for argument in argv:
            flag = argument.partition("=")[0]
            if flag in flags:
                raise ValueError(
                    f"{flag}: has no effect {idle.where}; nearest legal value: {idle.instead}"
                )
