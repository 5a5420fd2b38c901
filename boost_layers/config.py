"""The settings of a low-rank model: one frozen dataclass.

`pretrain_gpt.py`'s flags, their help and the documentation of the flags are generated from
`LowRankConfig`: a field's docstring is the flag's help, its type the accepted values.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any, Literal, get_args, get_type_hints

Arch = Literal["none", "dense", "cola"]
TensorParallelism = Literal["btp", "vanilla"]
Activation = Literal["auto", "silu", "gelu", "identity"]
MlpKind = Literal["auto", "swiglu", "product"]
NormMode = Literal["online", "sync"]
VanillaAttention = Literal["sliced", "replicated"]
CoreAttention = Literal["auto", "te", "sdpa", "local"]

ATTENTION_PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj")
MLP_PROJECTIONS = ("gate_proj", "up_proj", "down_proj")


def _flag(name: str, default: Any, **argparse_keywords: Any) -> Any:
    """A dataclass field that appears on the command line as `name`."""
    return field(default=default, metadata={"flag": name, **argparse_keywords})


@dataclass(frozen=True, kw_only=True)
class LowRankConfig:
    """Architecture and tensor-parallel layout of a low-rank LLaMA.

    Raises:
        ValueError: on construction, when a value is illegal whatever the model's sizes are.
            What depends on the model's sizes is checked by `boost_layers.validation`.
    """

    arch: Arch = _flag("--low-rank-arch", "none")
    """none: Megatron's own layer and initialisation; dense: our full-rank block, the baseline of
    benchmarks; cola: y = B·φ(A·x) in all seven projections (arXiv 2502.10940)."""

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

    act: Activation = _flag("--low-rank-act", "auto")
    """φ, applied to the latent between the two factors; auto: silu for cola."""

    mlp: MlpKind = _flag("--low-rank-mlp", "auto")
    """What joins gate and up: swiglu is SiLU(gate)·up, product is gate·up (CoLA's configurations
    from 350M on); auto: product for cola, swiglu for dense."""

    norm: NormMode = _flag("--low-rank-norm", "online")
    """RMSNorm's statistics in the latent's all-reduce (online), or in one of their own before the
    down-projection (sync)."""

    grouping: bool = _flag("--no-low-rank-grouping", True)
    """One GEMM and one all-reduce per projection instead of grouped down-projections and batched
    up-projections, for comparison."""

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

    def _check_types(self) -> None:
        """Refuse words that are none of a field's choices, and ranks that are no integers: a
        program is not checked by an argument parser, and another model would be computed."""
        hints = get_type_hints(LowRankConfig)
        for setting in fields(self):
            value, choices = getattr(self, setting.name), get_args(hints[setting.name])
            if all(isinstance(choice, str) for choice in choices) and choices:
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
        return self.arch == "cola"

    @property
    def activation(self) -> str:
        """φ with `auto` resolved: "silu", "gelu" or "identity"."""
        if self.act != "auto":
            return self.act
        return "silu" if self.arch == "cola" else "identity"

    @property
    def mlp_kind(self) -> str:
        """The gate's semantics with `auto` resolved: "swiglu" or "product"."""
        if self.mlp != "auto":
            return self.mlp
        return "product" if self.arch == "cola" else "swiglu"

    def rank_of(self, projection: str, hidden_size: int) -> int:
        """The rank of a projection (`q_proj` … `down_proj`) in a model of that hidden size; the
        specific setting wins over the common one, that over the ratio."""
        specific = self.attn_rank if projection in ATTENTION_PROJECTIONS else self.mlp_rank
        if specific is not None:
            return specific
        return self.rank if self.rank is not None else max(1, round(self.ratio * hidden_size))

    def rank_flag(self, projection: str) -> str:
        """The flag that decides `rank_of(projection, …)`, for messages."""
        in_attention = projection in ATTENTION_PROJECTIONS
        specific = "attn_rank" if in_attention else "mlp_rank"
        if getattr(self, specific) is not None:
            return flag_of(specific)
        return flag_of("rank") if self.rank is not None else flag_of("ratio")


def flag_of(field_name: str) -> str:
    """The command-line flag of a field of `LowRankConfig`."""
    flag: str = LowRankConfig.__dataclass_fields__[field_name].metadata["flag"]
    return flag
