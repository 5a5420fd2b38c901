"""What a user asks for where a dense model shall become a low-rank one."""

from __future__ import annotations

import re
from argparse import ArgumentParser, Namespace
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from boost_layers.config import PROJECTIONS, LowRankConfig, flag_of
from boost_layers.validation import ModelSizes, validate_sizes
from megatron.boost.command_line import whole_number
from megatron.boost.flags import flags_of

if TYPE_CHECKING:
    from megatron.boost.conversion.description import ModelDescription

ANNEAL_STEPS = 1000
"""Over how many steps φ grows where the user does not say."""

_RANK_FIELDS = ("ratio", "rank", "attn_rank", "mlp_rank", "ranks")
_FIELDS = (*_RANK_FIELDS, "layers", "act", "act_anneal", "lax_base", "lax_gate", "lax_norm")
_DEFAULTS = {
    "ratio": "0.25",
    "act_anneal": f"{ANNEAL_STEPS} where φ is not the identity",
    "lax_base": "svd",
    "lax_gate": "tensor",
    "lax_norm": "none",
}
"""Of the import, where a user would not expect them."""
_UNITS = {"": 1, "K": 10**3, "M": 10**6, "B": 10**9, "G": 10**9}


@dataclass(frozen=True, kw_only=True)
class FactorisationSettings:
    """How a dense model becomes a low-rank one.

    Raises:
        ValueError: on construction, for values that contradict each other or cannot be had.
    """

    low_rank: LowRankConfig
    """The low-rank model; its ranks mean nothing where `energy` or `parameter_budget` decides."""
    energy: float | None = None
    """The share of each projection's energy to keep in every layer."""
    parameter_budget: float | None = None
    """The most parameters of the whole model: a number, or up to 1 a share of the dense model's."""
    rank_multiple: int = 1
    """Ranks by energy are multiples of this."""
    calibration: Path | None = None
    """A text whose inputs weigh the errors."""
    calibration_tokens: int = 65536
    """How much of it is used."""

    @property
    def by_energy(self) -> bool:
        """Whether ranks are chosen by what they keep."""
        return self.energy is not None or self.parameter_budget is not None

    def __post_init__(self) -> None:
        low_rank = self.low_rank
        if not low_rank.low_rank:
            raise ValueError(
                f"{flag_of('arch')} {low_rank.arch}: has no factors; nearest legal value: svd"
            )
        if self.energy is not None and not 0.0 < self.energy <= 1.0:
            nearest = 1.0 if self.energy > 1.0 else 0.01
            raise ValueError(
                f"--energy {self.energy}: is a share above 0 and not above 1; "
                f"nearest legal value: {nearest}"
            )
        if low_rank.crossing:
            self._check_crossing()

    def _check_crossing(self) -> None:
        """The crossing must begin without an influence, or the dense model is lost at once."""
        gate, norm = self.low_rank.lax_gate, self.low_rank.lax_norm
        if norm != "none":
            raise ValueError(
                f"{flag_of('lax_norm')} {norm}: normalises every latent, which no factors of a "
                "dense weight can undo; nearest legal value: none"
            )
        if gate == "identity":
            raise ValueError(
                f"{flag_of('lax_gate')} identity: adds the latent of the layer before in full, "
                "while another gate begins at 0; nearest legal value: tensor"
            )


def add_factorisation_flags(parser: ArgumentParser) -> None:
    """Add the flags, without `--low-rank-arch`. None is required; what is not given is None."""
    group = parser.add_argument_group("from dense to low-rank")
    for flag in flags_of(LowRankConfig):
        if flag.field in _FIELDS:
            default = _DEFAULTS.get(flag.field)
            help_text = flag.help if default is None else f"{flag.help} (default: {default})"
            options: dict[str, Any] = {"dest": flag.destination, "default": None}
            options["help"] = help_text
            options |= {"choices": flag.choices} if flag.choices else {"type": flag.kind}
            group.add_argument(flag.name, **options, **flag.keywords)
    group.add_argument(
        "--energy",
        type=float,
        metavar="E",
        help="instead of a ratio or rank: the smallest rank that keeps this share of each "
        "projection's energy (the sum of its squared singular values) in every layer",
    )
    group.add_argument(
        "--parameter-budget",
        metavar="P",
        help="the most parameters that the low-rank model may have: a number (350M, 1.2B), or up "
        "to 1 a share of the dense model's; ranks grow where they keep the most energy for each "
        "parameter until --energy or the budget is reached",
    )
    group.add_argument(
        "--rank-multiple",
        type=whole_number(1),
        metavar="N",
        help="ranks chosen by energy are multiples of N (default: 1)",
    )
    group.add_argument(
        "--calibration",
        type=Path,
        metavar="FILE",
        help="a text: errors are weighed by the inputs that the projections get on it (SVD-LLM)",
    )
    group.add_argument(
        "--calibration-tokens",
        type=whole_number(1),
        metavar="N",
        help="tokens of the text that are used (default: 65536)",
    )


def given_factorisation_flags(arguments: Namespace) -> list[str]:
    """Those of `add_factorisation_flags` that the user gave, as typed."""
    flags = [flag.name for flag in flags_of(LowRankConfig) if flag.field in _FIELDS]
    flags += ["--energy", "--parameter-budget", "--rank-multiple"]
    flags += ["--calibration", "--calibration-tokens"]
    values = vars(arguments)
    return [flag for flag in flags if values.get(flag[2:].replace("-", "_")) is not None]


def is_factorisation(arguments: Namespace, source: ModelDescription) -> bool:
    """Whether parsed arguments ask for a low-rank model of a dense source.

    Raises:
        ValueError: for flags of a factorisation where none takes place.
    """
    arch, given = arguments.low_rank_arch, given_factorisation_flags(arguments)
    if source.low_rank.low_rank:
        given = [flag for flag in given if flag != flag_of("act_anneal")]
        if given:
            raise ValueError(
                f"{given[0]}: the source is low-rank already ({source.low_rank.arch}); "
                "nearest legal value: leave it out"
            )
        return False
    if arch in (None, "none", "dense"):
        if given:
            raise ValueError(
                f"{given[0]}: has an effect on low-rank layers only; "
                "nearest legal value: --low-rank-arch svd"
            )
        return False
    return True


def factorisation_settings(arguments: Namespace) -> FactorisationSettings:
    """The settings that parsed arguments (`add_factorisation_flags` and `low_rank_arch`) give.

    LaX starts from a dense model on the base svd and without a norm, unless the user says
    otherwise; φ, where it is not the identity, is annealed.

    Raises:
        ValueError: for flags that contradict each other, by name.
    """
    values = vars(arguments)
    given = given_factorisation_flags(arguments)
    arch = values["low_rank_arch"]
    fields = {
        flag.field: values[flag.destination]
        for flag in flags_of(LowRankConfig)
        if flag.name in given
    }
    _refuse_idle(given, arch)
    if arch == "lax":
        fields = {"lax_base": "svd", "lax_norm": "none", **fields}
    low_rank = LowRankConfig(arch=arch, mlp="swiglu", **fields)
    if low_rank.activation != "identity" and "act_anneal" not in fields:
        low_rank = replace(low_rank, act_anneal=ANNEAL_STEPS)
    budget = values["parameter_budget"]
    return FactorisationSettings(
        low_rank=low_rank,
        energy=values["energy"],
        parameter_budget=None if budget is None else _budget(budget),
        rank_multiple=values["rank_multiple"] or 1,
        calibration=values["calibration"],
        calibration_tokens=values["calibration_tokens"] or 65536,
    )


def annealing_steps(source: ModelDescription, given: int | None) -> int:
    """The steps over which φ of a low-rank model grows that is imported as it is. Its checkpoint
    begins at iteration 0, so with no φ or with all of it.

    Args:
        source: the low-rank model.
        given: the user's `--low-rank-act-anneal`, or None.

    Raises:
        ValueError: for a model whose φ is on the way, and steps that contradict its state.
    """
    flag, amount = flag_of("act_anneal"), source.activation_amount
    if 0.0 < amount < 1.0:
        raise ValueError(
            f"config.json: activation_amount {amount}: the source was exported in the midst of "
            "its annealing, with a part of φ, and an imported checkpoint begins at iteration 0, "
            f"without φ or with all of it; nearest legal value: {round(amount)}, of an export "
            f"from {'after' if round(amount) else 'before'} the annealing"
        )
    if amount == 1.0 and given:
        raise ValueError(
            f"{flag} {given}: φ of the source is whole already; nearest legal value: 0"
        )
    if amount == 0.0 and given == 0:
        raise ValueError(
            f"{flag} 0: the source was made to compute without its φ so far, which is to grow; "
            "nearest legal value: 1"
        )
    return 0 if amount == 1.0 else given or ANNEAL_STEPS


def _refuse_idle(given: list[str], arch: str) -> None:
    """Refuse flags that others leave without an effect, or that say the same thing twice."""
    by_energy = [flag for flag in ("--energy", "--parameter-budget") if flag in given]
    if by_energy:
        for name in _RANK_FIELDS:
            if flag_of(name) in given:
                raise ValueError(
                    f"{flag_of(name)}: {by_energy[0]} decides the ranks; "
                    "nearest legal value: leave one of them out"
                )
    elif "--rank-multiple" in given:
        raise ValueError(
            "--rank-multiple: has an effect on ranks chosen by energy only; "
            "nearest legal value: --energy 0.9"
        )
    if "--calibration-tokens" in given and "--calibration" not in given:
        raise ValueError(
            "--calibration-tokens: has no effect without a text; "
            "nearest legal value: --calibration FILE"
        )
    for name in ("lax_base", "lax_gate", "lax_norm"):
        if flag_of(name) in given and arch != "lax":
            raise ValueError(
                f"{flag_of(name)}: --low-rank-arch {arch} has no latent crossing; "
                "nearest legal value: --low-rank-arch lax"
            )


def _budget(text: str) -> float:
    """A number of parameters, or up to 1 a share of them."""
    found = re.fullmatch(r"([0-9.]+(?:[eE]\+?[0-9]+)?)([KMBG]?)", text.strip(), re.IGNORECASE)
    try:
        value = float(found[1]) * _UNITS[found[2].upper()] if found else 0.0
    except ValueError:
        value = 0.0
    if value <= 0.0:
        raise ValueError(
            f"--parameter-budget {text}: is a number of parameters (350M, 1.2B, 7e9), or up to 1 "
            "a share of the dense model's; nearest legal value: 0.5"
        )
    return value


def with_possible_ranks(
    low_rank: LowRankConfig, source: ModelDescription
) -> tuple[LowRankConfig, dict[str, int]]:
    """Settings in which no rank is larger than its weight's smaller side, as that of k and v may
    be where they are narrow, and the ranks that were lowered.

    Args:
        low_rank: as asked for.
        source: the dense model.

    Raises:
        ValueError: for a rank that the user gave for just this projection, and for what
            `validate_sizes` refuses.
    """
    validate_sizes(
        low_rank,
        ModelSizes(
            hidden_size=source.hidden_size,
            ffn_hidden_size=source.ffn_hidden_size,
            num_attention_heads=source.num_heads,
            num_query_groups=source.num_kv_heads,
            tensor_parallel=1,
            num_layers=source.num_layers,
        ),
    )
    ranks = {name: low_rank.rank_of(name, source.hidden_size) for name in PROJECTIONS}
    lowered = {}
    for name, rank in ranks.items():
        largest = min(source.width_of(name))
        if rank <= largest:
            continue
        short = name.removesuffix("_proj")
        if low_rank.rank_flag(name) == flag_of("ranks"):
            raise ValueError(
                f"{flag_of('ranks')} {short}={rank}: the weight of {name} is "
                f"{' by '.join(map(str, source.width_of(name)))}; "
                f"nearest legal value: {short}={largest}"
            )
        lowered[name] = largest
    if not lowered:
        return low_rank, {}
    return with_ranks(low_rank, {**ranks, **lowered}), lowered


def with_ranks(low_rank: LowRankConfig, ranks: dict[str, int]) -> LowRankConfig:
    """Settings with these ranks, by projection (`q_proj` …), in place of any others."""
    table = ",".join(f"{name.removesuffix('_proj')}={rank}" for name, rank in ranks.items())
    return replace(low_rank, ratio=0.25, rank=None, attn_rank=None, mlp_rank=None, ranks=table)
