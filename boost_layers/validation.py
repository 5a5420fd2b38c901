"""Which models the layers can run: checked before anything is built, in the user's terms.

A message names the flag, its value and the nearest legal one. The same checks serve the command
line (before any process group exists) and the Python API.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from boost_layers.config import MLP_PROJECTIONS, PROJECTIONS, LowRankConfig, flag_of
from boost_layers.rules import UNKNOWN
from boost_layers.transformer_features import (
    TRANSFORMER_FIELDS,
    default_of,
    flag_of_field,
    transformer_fields,
)

if TYPE_CHECKING:
    from megatron.core.transformer.transformer_config import TransformerConfig


@dataclass(frozen=True, kw_only=True)
class ModelSizes:
    """The sizes that tensor, sequence and pipeline parallelism must divide."""

    hidden_size: int
    ffn_hidden_size: int
    num_attention_heads: int
    num_query_groups: int
    tensor_parallel: int
    num_layers: int
    seq_length: int | None = None
    """None where it is not known, as in a `TransformerConfig`."""


def nearest_multiple(value: int, of: int) -> int:
    """The positive multiple of `of` that is nearest to `value`; the larger one of two."""
    return max(of, (2 * value + of) // (2 * of) * of)


def _require_multiple(flag: str, value: int, of: int, why: str) -> None:
    if value % of:
        raise ValueError(
            f"{flag} {value}: {why} --tensor-model-parallel-size {of}; "
            f"nearest legal value: {nearest_multiple(value, of)}"
        )


def _require_heads(heads: int, groups: int, tp: int) -> None:
    """KV heads divide the heads, and TP divides both."""
    if heads % tp:
        # With KV heads that stay as they are, the heads must remain a multiple of them.
        of = groups if groups != heads and groups % tp == 0 else tp
        raise ValueError(
            f"--num-attention-heads {heads}: are split over --tensor-model-parallel-size {tp}; "
            f"nearest legal value: {nearest_multiple(heads, of)}"
        )
    legal = [g for g in range(tp, heads + 1, tp) if heads % g == 0]
    if groups not in legal:
        nearest = min(legal, key=lambda g: abs(g - groups))
        raise ValueError(
            f"--num-query-groups {groups}: must divide --num-attention-heads {heads} and are split "
            f"over --tensor-model-parallel-size {tp}; nearest legal value: {nearest}"
        )


def validate_sizes(low_rank: LowRankConfig, sizes: ModelSizes) -> None:
    """Raise ValueError for the first size that the strategy cannot divide."""
    tp = sizes.tensor_parallel
    _require_heads(sizes.num_attention_heads, sizes.num_query_groups, tp)
    _require_multiple("--hidden-size", sizes.hidden_size, tp, "is split over")
    _require_multiple("--ffn-hidden-size", sizes.ffn_hidden_size, tp, "is split over")
    if sizes.seq_length is not None and low_rank.hidden_sharded:
        _require_multiple("--seq-length", sizes.seq_length, tp, "is split at the borders over")
    if not low_rank.low_rank:
        return
    if low_rank.last_layer is not None and low_rank.last_layer >= sizes.num_layers:
        last = sizes.num_layers - 1
        raise ValueError(
            f"{flag_of('layers')} {low_rank.layers}: --num-layers {sizes.num_layers} are counted "
            f"from 0; nearest legal value: {min(low_rank.first_layer, last)}-{last}"
        )
    for projection in PROJECTIONS:
        rank, flag = low_rank.rank_of(projection, sizes.hidden_size), low_rank.rank_flag(projection)
        largest = sizes.hidden_size
        if projection in MLP_PROJECTIONS:
            largest = min(largest, sizes.ffn_hidden_size)
        shown, prefix = f"{flag} {rank}", ""
        if flag == flag_of("ranks"):
            name = projection.removesuffix("_proj")
            shown, prefix = f"{flag} {name}={rank}", f"{name}="
        elif flag == flag_of("ratio"):
            shown, prefix = f"{flag} {low_rank.ratio} (rank {rank})", f"{flag_of('rank')} "
        if rank > largest:
            raise ValueError(
                f"{shown}: larger than the {projection}'s smaller side; "
                f"nearest legal value: {prefix}{largest}"
            )
        if low_rank.tp == "vanilla" and rank % tp:
            raise ValueError(
                f"{shown}: vanilla tensor parallelism splits the rank over "
                f"--tensor-model-parallel-size {tp}; nearest legal value: "
                f"{prefix}{nearest_multiple(rank, tp)}"
            )


def validate_model(low_rank: LowRankConfig, config: TransformerConfig) -> None:
    """Raise ValueError for a transformer that the layers would compute wrongly or not at all."""
    if low_rank.arch == "none":
        raise ValueError("--low-rank-arch none: Megatron's own layers have no low-rank spec")
    validate_sizes(
        low_rank,
        ModelSizes(
            hidden_size=config.hidden_size,
            ffn_hidden_size=config.ffn_hidden_size,
            num_attention_heads=config.num_attention_heads,
            num_query_groups=config.num_query_groups,
            tensor_parallel=config.tensor_model_parallel_size,
            num_layers=config.num_layers,
        ),
    )
    validate_features(low_rank, config)


def validate_features(low_rank: LowRankConfig, config: TransformerConfig) -> None:
    """Raise ValueError for the first feature of `config` that a LLaMA block of ours has not.

    What each field may be stands in `boost_layers.transformer_features`; a field that the table
    does not know, of another release of Megatron's, may only have its default.
    """
    for field in transformer_fields().values():
        rule = TRANSFORMER_FIELDS.get(field.name, UNKNOWN)
        value = getattr(config, field.name)
        if rule.outcome == "refused" and not rule.accepts(
            value, default_of(field), partial(getattr, config)
        ):
            raise ValueError(rule.refusal(flag_of_field(field), value, low_rank.arch))
    _validate_combinations(low_rank, config)


def _validate_combinations(low_rank: LowRankConfig, config: TransformerConfig) -> None:
    """What is refused for its company: the fields whose rule is "conditional"."""
    # Not at the top: the command line is checked without torch.
    from torch.nn.functional import silu

    vanilla = low_rank.low_rank and low_rank.tp == "vanilla"
    several = config.tensor_model_parallel_size > 1
    recomputed = config.recompute_modules if config.recompute_granularity == "selective" else []
    backend = config.attention_backend.name
    within_engine = takes_transformer_engine(low_rank)
    wrong = (
        (config.activation_func is not silu, "a gate's activation that is not SiLU", "--swiglu"),
        (
            any(module != "core_attn" for module in recomputed),
            f"--recompute-modules {' '.join(recomputed)}",
            "core_attn",
        ),
        (
            config.distribute_saved_activations and several and config.sequence_parallel,
            "--distribute-saved-activations with --sequence-parallel",
            "leave it out",
        ),
        # Vanilla's latents are sharded, and packed into the tensor that is recomputed from.
        (
            config.distribute_saved_activations and low_rank.crossing,
            "--distribute-saved-activations",
            "leave it out",
        ),
        (
            backend != "auto" and not within_engine,
            f"--attention-backend {backend} with --core-attention {low_rank.core_attention}",
            "auto",
        ),
        (
            config.flash_attention_version is not None and not within_engine,
            f"--flash-attention-version {config.flash_attention_version} with --core-attention "
            f"{low_rank.core_attention}",
            "leave it out",
        ),
        (
            not _draws_normal(config.init_method, config.init_method_std)
            or not _draws_normal(
                config.output_layer_init_method,
                config.init_method_std / math.sqrt(2 * config.num_layers),
            ),
            "an init_method other than N(0, init_method_std²)",
            "--init-method-std 0.02",
        ),
        (
            low_rank.hidden_sharded and several and not config.sequence_parallel,
            "BTP without sequence-parallel borders",
            "--sequence-parallel",
        ),
        (
            low_rank.recompute and config.recompute_granularity == "full",
            "--low-rank-recompute with --recompute-granularity full",
            "--low-rank-recompute alone",
        ),
        (vanilla and config.sequence_parallel, "--sequence-parallel with vanilla", "leave it out"),
    )
    for refused, what, instead in wrong:
        if refused:
            raise ValueError(
                f"{what}: not supported by --low-rank-arch {low_rank.arch}; "
                f"nearest legal value: {instead}"
            )


def takes_transformer_engine(low_rank: LowRankConfig) -> bool:
    """Whether Transformer Engine computes core attention: where it is asked for, or installed, the
    device is CUDA and each rank has heads of its own."""
    if low_rank.core_attention != "auto":
        return low_rank.core_attention == "te"
    import torch
    from megatron.core.extensions.transformer_engine import HAVE_TE

    return HAVE_TE and torch.cuda.is_available() and not low_rank.replicated_attention


def _draws_normal(method: Any, std: float) -> bool:
    """Whether an initialisation is the one that `TransformerConfig` makes of a standard deviation,
    which is all that the layers know of it."""
    from torch.nn.init import normal_

    drawn = getattr(method, "keywords", {}).get("std", math.nan)
    return getattr(method, "func", None) is normal_ and math.isclose(drawn, std)
