"""Which models the layers can run: checked before anything is built, in the user's terms.

A message names the flag, its value and the nearest legal one. The same checks serve the command
line (before any process group exists) and the Python API.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from boost_layers.config import MLP_PROJECTIONS, PROJECTIONS, LowRankConfig, flag_of

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
    """Raise ValueError for the first feature of `config` that a LLaMA block of ours has not."""
    # Not at the top: the command line is checked without torch.
    from torch.nn.functional import silu

    vanilla = low_rank.low_rank and low_rank.tp == "vanilla"
    recomputed = config.recompute_modules if config.recompute_granularity == "selective" else []
    wrong = (
        (config.add_bias_linear, "--add-bias-linear", "pass --disable-bias-linear"),
        (config.add_qkv_bias, "--add-qkv-bias", "leave it out"),
        (config.normalization != "RMSNorm", f"--normalization {config.normalization}", "RMSNorm"),
        (not config.gated_linear_unit, "an MLP without a gate", "pass --swiglu"),
        (config.activation_func is not silu, "a gate's activation that is not SiLU", "--swiglu"),
        (
            config.activation_func_clamp_value is not None,
            "--activation-func-clamp-value",
            "leave it out",
        ),
        (config.glu_linear_offset != 0, f"--glu-linear-offset {config.glu_linear_offset}", "0"),
        (config.layernorm_zero_centered_gamma, "--apply-layernorm-1p", "leave it out"),
        (config.qk_layernorm, "--qk-layernorm", "leave it out"),
        (config.qk_l2_norm, "--qk-l2-norm", "leave it out"),
        (
            config.apply_residual_connection_post_layernorm,
            "--apply-residual-connection-post-layernorm",
            "leave it out",
        ),
        (config.use_mup, "--use-mup", "leave it out"),
        (config.init_model_with_meta_device, "--init-model-with-meta-device", "leave it out"),
        (
            config.heterogeneous_block_specs,
            "--heterogeneous-layers-config-path",
            "leave it out",
        ),
        (config.multi_latent_attention, "--multi-latent-attention", "leave it out"),
        (config.num_moe_experts is not None, "--num-experts", "leave it out"),
        (config.mtp_num_layers is not None, "--mtp-num-layers", "leave it out"),
        (config.context_parallel_size > 1, "--context-parallel-size", "1"),
        (config.hidden_dropout > 0, f"--hidden-dropout {config.hidden_dropout}", "0"),
        (config.attention_dropout > 0, f"--attention-dropout {config.attention_dropout}", "0"),
        (config.window_size is not None, "--window-size", "leave it out"),
        (config.softmax_type != "vanilla", f"--softmax-type {config.softmax_type}", "vanilla"),
        (config.attention_output_gate, "--attention-output-gate", "leave it out"),
        (config.no_rope_freq is not None, "--no-rope-freq", "leave it out"),
        (
            config.experimental_attention_variant is not None,
            "--experimental-attention-variant",
            "leave it out",
        ),
        (bool(config.fp8), "--fp8-format", "--bf16"),
        (bool(config.fp4), "--fp4-format", "--bf16"),
        (config.fp32_residual_connection, "--fp32-residual-connection", "leave it out"),
        (config.cpu_offloading, "--cpu-offloading-num-layers", "0"),
        (config.cuda_graph_impl != "none", f"--cuda-graph-impl {config.cuda_graph_impl}", "none"),
        (
            config.apply_query_key_layer_scaling,
            "--apply-query-key-layer-scaling",
            "leave it out",
        ),
        (
            any(module != "core_attn" for module in recomputed),
            f"--recompute-modules {' '.join(recomputed)}",
            "core_attn",
        ),
        (
            low_rank.hidden_sharded
            and config.tensor_model_parallel_size > 1
            and not config.sequence_parallel,
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
