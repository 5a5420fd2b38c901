"""The settings of a low-rank model: one frozen dataclass.

`pretrain_gpt.py`'s flags, their help and the documentation of the flags are generated from
`LowRankConfig`: a field's docstring is the flag's help, its type the accepted values.
"""

from __future__ import annotations

import math
import re
from dataclasses import Field, dataclass, field, fields
from functools import cache
from typing import Any, Literal, get_args, get_type_hints

from boost_layers.architecture import SVD, Architecture, architecture_names, architecture_of

TensorParallelism = Literal["btp", "vanilla"]
Activation = Literal["auto", "silu", "gelu", "identity"]
MlpKind = Literal["auto", "swiglu", "product"]
NormMode = Literal["online", "sync"]
VanillaAttention = Literal["sliced", "replicated"]
LaxBase = Literal["cola", "svd"]
LaxGate = Literal["identity", "linear", "tensor"]
LaxNorm = Literal["none", "layernorm", "rmsnorm"]
CoreAttention = Literal["auto", "te", "sdpa", "local"]

ATTENTION_PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj")
MLP_PROJECTIONS = ("gate_proj", "up_proj", "down_proj")
PROJECTIONS = (*ATTENTION_PROJECTIONS, *MLP_PROJECTIONS)

LAX_SETTINGS = ("lax_base", "lax_gate", "lax_norm")
"""Fields of `LowRankConfig` that only a latent crossing gives a meaning."""


def _flag(name: str, default: Any, **more: Any) -> Any:
    """A dataclass field that appears on the command line as `name`; `more` are keywords of
    argparse's, and `words`, which gives the legal values of a choice that may grow."""
    return field(default=default, metadata={"flag": name, **more})


@dataclass(frozen=True, kw_only=True)
class LowRankConfig:
    """Architecture and tensor-parallel layout of a low-rank LLaMA.

    Raises:
        ValueError: on construction, when a value is illegal whatever the model's sizes are.
            What depends on the model's sizes is checked by `boost_layers.validation`.
    """

    arch: str = _flag("--low-rank-arch", "none", words=architecture_names)
    """none: Megatron's own layer and initialisation; dense: our full-rank block, the baseline of
    benchmarks; cola: y = B·φ(A·x) in all seven projections (arXiv 2502.10940); svd: the same with
    the identity for φ and SwiGLU kept; lax: latents cross over from layer to layer (arXiv
    2505.21732), on the base of --lax-base."""

    tp: TensorParallelism = _flag("--low-rank-tp", "btp")
    """Where the tensor-parallel boundary lies: btp, at the bottleneck (all-reduces of the rank-wide
    latent), or vanilla, inside each low-rank pair (all-reduces of its full-width output)."""

    ratio: float = _flag("--low-rank-ratio", 0.25, metavar="F")
    """The rank as a share of the hidden size: rank = round(F·hidden)."""

    rank: int | None = _flag("--low-rank-rank", None, metavar="R")
    """The rank of all seven projections, instead of the ratio's."""

    attn_rank: int | None = _flag("--low-rank-attn-rank", None, metavar="R")
    """The rank of q, k, v and o, instead of the common one."""

    mlp_rank: int | None = _flag("--low-rank-mlp-rank", None, metavar="R")
    """The rank of gate, up and down, instead of the common one."""

    ranks: str | None = _flag("--low-rank-ranks", None, metavar="q=256,k=128,…")
    """A rank for each projection named (q, k, v, o, gate, up, down), instead of the others."""

    layers: str | None = _flag("--low-rank-layers", None, metavar="A-B")
    """Only the layers from A to B, both included and counted from 0, are low-rank; the others are
    as with --low-rank-arch dense."""

    act: Activation = _flag("--low-rank-act", "auto")
    """φ, applied to the latent between the two factors; auto: silu for cola, identity for svd, that
    of the base for lax."""

    act_anneal: int = _flag("--low-rank-act-anneal", 0, metavar="STEPS")
    """φ grows from the identity to itself over these steps, φ_a(z) = (1 − a)·z + a·φ(z) with
    a = iteration/STEPS up to 1: for models that start from a dense one. 0: φ from the start."""

    mlp: MlpKind = _flag("--low-rank-mlp", "auto")
    """What joins gate and up: swiglu is SiLU(gate)·up, product is gate·up (CoLA's configurations
    from 350M on); auto: product for cola, swiglu for svd and dense, that of the base for lax."""

    lax_base: LaxBase = _flag("--lax-base", "cola")
    """What LaX adds its latent crossing to; decides its φ and MLP."""

    lax_gate: LaxGate = _flag("--lax-gate", "tensor")
    """G of LaX's v = Norm(A·x + G(z₋₁)): the identity; linear, r×r with a bias; tensor, E₁ᵀ·Z·E₂ on
    the latent seen as the most balanced p×q."""

    lax_norm: LaxNorm = _flag("--lax-norm", "layernorm")
    """LaX's norm over each projection's latent, ε = 1e-6."""

    norm: NormMode = _flag("--low-rank-norm", "online")
    """RMSNorm's statistics in the latent's all-reduce (online), or in one of their own before the
    down-projection (sync)."""

    grouping: bool = _flag("--no-low-rank-grouping", True)
    """One GEMM and one all-reduce per projection instead of grouped down-projections and batched
    up-projections, for comparison."""

    recompute: bool = _flag("--low-rank-recompute", False)
    """Keep only the pre-activation latents, the residual inputs and the norms' ρ for backward, and
    compute again what lies between two latents, which needs no communication; BTP only."""

    recompute_residual: bool = _flag("--low-rank-recompute-residual", False)
    """With --low-rank-recompute: do not keep the second residual input of a layer but compute it
    again, by one more up-projection of o."""

    recompute_shard: bool = _flag("--low-rank-recompute-shard", False)
    """With --low-rank-recompute: each rank keeps only its share of the latents' tokens; in
    backward, one all-gather for each group of projections brings them back."""

    vanilla_attention: VanillaAttention = _flag("--low-rank-vanilla-attention", "sliced")
    """Vanilla tensor parallelism's attention: each rank its own heads (sliced, the fair baseline),
    or all heads on every rank (replicated, the paper's)."""

    core_attention: CoreAttention = _flag("--core-attention", "auto")
    """softmax(Q·Kᵀ)·V of our layers: Transformer Engine (te), PyTorch's
    scaled_dot_product_attention (sdpa) or Megatron's local one (local); auto: te where it is
    installed and the device is CUDA, else sdpa."""

    seed: int = 1234
    """Seeds the initial weights, by canonical name; pretrain_gpt.py takes it from --seed."""

    def __post_init__(self) -> None:
        self._check_types()
        for name in ("rank", "attn_rank", "mlp_rank"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(
                    f"{flag_of(name)} {value}: a rank is a positive integer; nearest legal value: 1"
                )
        if not 0.0 < self.ratio <= 1.0:
            nearest = 1.0 if self.ratio > 1.0 else 0.01
            raise ValueError(
                f"{flag_of('ratio')} {self.ratio}: must lie above 0 and not above 1; "
                f"nearest legal value: {nearest}"
            )
        if self.arch == "dense" and self.act not in ("auto", "identity"):
            raise ValueError(
                f"{flag_of('act')} {self.act}: --low-rank-arch dense has no latent to apply it to; "
                "nearest legal value: auto"
            )
        self._check_anneal()
        self._check_idle()
        self._check_architecture()
        if self.ranks is not None:
            self._rank_table()
        if self.layers is not None:
            self._layer_range()

    def _check_anneal(self) -> None:
        """Refuse a number of steps that is none, or that has no φ to grow."""
        steps = self.act_anneal
        if type(steps) is not int or steps < 0:
            nearest = max(0, round(steps)) if math.isfinite(steps) else 0
            raise ValueError(
                f"{flag_of('act_anneal')} {steps}: is a number of steps, 0 or more; "
                f"nearest legal value: {nearest}"
            )
        if steps and not (self.low_rank and self.activation != "identity"):
            instead = "--low-rank-act silu" if self.low_rank else "--low-rank-arch cola"
            raise ValueError(
                f"{flag_of('act_anneal')} {steps}: φ of --low-rank-arch {self.arch} is the "
                f"identity and cannot grow; nearest legal value: 0 (or {instead})"
            )

    def _check_idle(self) -> None:
        """Refuse settings that would be without effect beside the others."""
        defaults = {setting.name: setting.default for setting in fields(self)}
        for name in LAX_SETTINGS:
            if not self.crossing and getattr(self, name) != defaults[name]:
                raise ValueError(
                    f"{flag_of(name)} {getattr(self, name)}: --low-rank-arch {self.arch} has no "
                    "latent crossing; nearest legal value: --low-rank-arch lax"
                )
        if self.recompute and not (self.low_rank and self.tp == "btp"):
            raise ValueError(
                f"{flag_of('recompute')}: keeps the latents that BTP has reduced, and this is "
                f"--low-rank-arch {self.arch} --low-rank-tp {self.tp}; nearest legal value: "
                "--recompute-granularity full"
            )
        for name in ("recompute_residual", "recompute_shard"):
            if getattr(self, name) and not self.recompute:
                raise ValueError(
                    f"{flag_of(name)}: is an option of {flag_of('recompute')}; "
                    f"nearest legal value: {flag_of('recompute')} {flag_of(name)}"
                )

    def _check_architecture(self) -> None:
        """Refuse the strategy that splits latents for an architecture that needs them whole."""
        found = self.architecture
        if found is None or found.combine is None or found.elementwise or self.tp != "vanilla":
            return
        raise ValueError(
            f"{flag_of('tp')} vanilla: splits latents over the ranks, and --low-rank-arch "
            f"{self.arch} is not elementwise in them; nearest legal value: btp"
        )

    def _check_types(self) -> None:
        """Refuse words that are none of a field's choices, and ranks that are no integers: a
        program is not checked by an argument parser, and another model would be computed."""
        for setting in fields(self):
            value, choices = getattr(self, setting.name), words_of(setting)
            if choices:
                if value not in choices:
                    raise ValueError(
                        f"{flag_of(setting.name)} {value}: legal values are {', '.join(choices)}"
                    )
            elif setting.name.endswith("rank") and value is not None and type(value) is not int:
                raise ValueError(
                    f"{flag_of(setting.name)} {value}: a rank is a positive integer; "
                    f"nearest legal value: {max(1, round(value))}"
                )

    @property
    def low_rank(self) -> bool:
        """Whether the projections are factorised."""
        return self.architecture is not None

    @property
    def architecture(self) -> Architecture | None:
        """The factors of a projection and what stands between them; None where projections are
        full-rank ("none" and "dense")."""
        return architecture_of(self.arch)

    @property
    def replicated_attention(self) -> bool:
        """Whether every rank computes the attention of all heads, as vanilla does in the paper."""
        return self.low_rank and self.tp == "vanilla" and self.vanilla_attention == "replicated"

    @property
    def hidden_sharded(self) -> bool:
        """Whether the residual stream is sharded along hidden within the layers (BTP)."""
        return self.low_rank and self.tp == "btp"

    @property
    def crossing(self) -> bool:
        """Whether latents cross over from layer to layer (LaX)."""
        return self.architecture is not None and self.architecture.crossing

    @property
    def activation(self) -> str:
        """φ with `auto` resolved: "silu", "gelu" or "identity"."""
        if self.act != "auto":
            return self.act
        return self._own("activation")

    def activation_amount(self, step: int) -> float:
        """a of φ_a(z) = (1 − a)·z + a·φ(z) in the step that follows `step` finished ones, and in
        an evaluation after them; 1 without annealing."""
        return min(1.0, step / self.act_anneal) if self.act_anneal else 1.0

    @property
    def mlp_kind(self) -> str:
        """The gate's semantics with `auto` resolved: "swiglu" or "product"."""
        if self.mlp != "auto":
            return self.mlp
        return self._own("mlp")

    def _own(self, field_name: str) -> str:
        """A field of the architecture, or of LaX's base where it leaves it to that; "dense" is as
        svd."""
        own: str | None = getattr(self.architecture or SVD, field_name)
        based: str = getattr(architecture_of(self.lax_base), field_name)
        return based if own is None else own

    def of_layer(self, index: int) -> LowRankConfig:
        """The settings of one layer of the model, counted from 0: these, or those of a dense layer
        where `layers` leaves it out."""
        if self.layers is None or not self.low_rank or index in self._layer_range():
            return self
        return LowRankConfig(arch="dense", core_attention=self.core_attention, seed=self.seed)

    @property
    def first_layer(self) -> int:
        """The first low-rank layer, counted from 0."""
        return self._layer_range().start if self.layers is not None else 0

    @property
    def last_layer(self) -> int | None:
        """The last low-rank layer, counted from 0; None: the model's last."""
        return self._layer_range().stop - 1 if self.layers is not None else None

    def rank_of(self, projection: str, hidden_size: int) -> int:
        """The rank of a projection (`q_proj` … `down_proj`) in a model of that hidden size; the
        more specific setting wins: table, attention or MLP, common, ratio."""
        named = self._rank_table().get(projection)
        if named is not None:
            return named
        specific = self.attn_rank if projection in ATTENTION_PROJECTIONS else self.mlp_rank
        if specific is not None:
            return specific
        return self.rank if self.rank is not None else max(1, round(self.ratio * hidden_size))

    def _rank_table(self) -> dict[str, int]:
        """`ranks` by projection (`q_proj` …)."""
        table: dict[str, int] = {}
        short = [projection.removesuffix("_proj") for projection in PROJECTIONS]
        for pair in re.split("[,;]", self.ranks) if self.ranks is not None else []:
            name, _, value = pair.strip().partition("=")
            if name not in short:
                raise ValueError(
                    f"{flag_of('ranks')} {self.ranks}: {name!r} is no projection; "
                    f"legal names: {', '.join(short)}"
                )
            if not value.isdecimal() or int(value) < 1 or f"{name}_proj" in table:
                raise ValueError(
                    f"{flag_of('ranks')} {self.ranks}: {name} takes one rank, a positive integer; "
                    f"nearest legal value: {name}=1"
                )
            table[f"{name}_proj"] = int(value)
        return table

    def _layer_range(self) -> range:
        """`layers` as a range of layers counted from 0."""
        found = re.fullmatch(r"(\d+)-(\d+)", self.layers or "")
        if found is None or int(found[1]) > int(found[2]):
            raise ValueError(
                f"{flag_of('layers')} {self.layers}: is A-B, the first and the last low-rank layer "
                "counted from 0; nearest legal value: 0-0"
            )
        return range(int(found[1]), int(found[2]) + 1)

    def rank_flag(self, projection: str) -> str:
        """The flag that decides `rank_of(projection, …)`, for messages."""
        if projection in self._rank_table():
            return flag_of("ranks")
        in_attention = projection in ATTENTION_PROJECTIONS
        specific = "attn_rank" if in_attention else "mlp_rank"
        if getattr(self, specific) is not None:
            return flag_of(specific)
        return flag_of("rank") if self.rank is not None else flag_of("ratio")


def words_of(setting: Field[Any]) -> tuple[str, ...]:
    """The values that a field of `LowRankConfig` may have, if it is a choice of words; else ()."""
    if "words" in setting.metadata:
        words: tuple[str, ...] = setting.metadata["words"]()
        return words
    choices = get_args(_types()[setting.name])
    return choices if all(isinstance(choice, str) for choice in choices) else ()


@cache
def _types() -> dict[str, Any]:
    """The types of `LowRankConfig`'s fields."""
    return get_type_hints(LowRankConfig)


def flag_of(field_name: str) -> str:
    """The command-line flag of a field of `LowRankConfig`."""
    flag: str = LowRankConfig.__dataclass_fields__[field_name].metadata["flag"]
    return flag
