"""The arguments that stand in a Megatron checkpoint, to and from a `ModelDescription`."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path
from typing import Any

import torch

from boost_layers.config import LowRankConfig
from megatron.boost.conversion.description import ModelDescription, RopeSettings
from megatron.boost.conversion.tokenizer_files import token_count
from megatron.boost.flags import flags_of
from megatron.boost.stored_run import KEPT_SETTINGS, TRUE_VOCABULARY

_KEPT = ("bos_token_id", "eos_token_id", "pad_token_id", "initializer_range")
"""What stands in `KEPT_SETTINGS`, by its name in a description."""

_OF_THE_FUNCTION = (
    "arch",
    "ratio",
    "rank",
    "attn_rank",
    "mlp_rank",
    "ranks",
    "layers",
    "act",
    "mlp",
    "lax_base",
    "lax_gate",
    "lax_norm",
)

# What a LLaMA has; a checkpoint whose arguments say otherwise is another model. Arguments that a
# checkpoint lacks are those of a release that had no such feature.
_LLAMA: dict[str, tuple[str, tuple[Any, ...]]] = {
    "normalization": ("--normalization", ("RMSNorm",)),
    "swiglu": ("--swiglu", (True,)),
    "position_embedding_type": ("--position-embedding-type", ("rope",)),
    "add_bias_linear": ("--disable-bias-linear", (False,)),
    "add_qkv_bias": ("--add-qkv-bias", (False,)),
    "rotary_percent": ("--rotary-percent", (1.0,)),
    "rotary_interleaved": ("--rotary-interleaved", (False,)),
    "apply_layernorm_1p": ("--apply-layernorm-1p", (False,)),
    "layernorm_zero_centered_gamma": ("--apply-layernorm-1p", (False,)),
    "apply_residual_connection_post_layernorm": (
        "--apply-residual-connection-post-layernorm",
        (False,),
    ),
    "num_experts": ("--num-experts", (None,)),
    "multi_latent_attention": ("--multi-latent-attention", (False,)),
    "qk_layernorm": ("--qk-layernorm", (False,)),
    "qk_l2_norm": ("--qk-l2-norm", (False,)),
    "attention_output_gate": ("--attention-output-gate", (False,)),
    "window_size": ("--window-size", (None,)),
    "softmax_type": ("--softmax-type", ("vanilla",)),
    "mtp_num_layers": ("--mtp-num-layers", (None, 0)),
    "hybrid_layer_pattern": ("--hybrid-layer-pattern", (None,)),
    "heterogeneous_layers_config_path": ("--heterogeneous-layers-config-path", (None,)),
    "activation_func_clamp_value": ("--activation-func-clamp-value", (None,)),
    "glu_linear_offset": ("--glu-linear-offset", (0.0,)),
    "use_mup": ("--use-mup", (False,)),
    "no_rope_freq": ("--no-rope-freq", (None,)),
}


def description_from_arguments(
    arguments: Namespace,
    *,
    vocab_size: int,
    iteration: int,
    dtype: torch.dtype,
) -> ModelDescription:
    """The model that a checkpoint's arguments describe.

    Args:
        arguments: as Megatron validated and stored them.
        vocab_size: the tokens that exist.
        iteration: of the checkpoint; decides how far φ has grown.
        dtype: of the stored weights.

    Raises:
        ValueError: for another model than a LLaMA, by flag and value.
    """
    for name, (flag, legal) in _LLAMA.items():
        value = getattr(arguments, name, legal[0])
        if value not in legal:
            raise ValueError(
                f"the checkpoint's {flag} {value}: is no LLaMA's; legal value: {legal[0]}"
            )
    heads = arguments.num_attention_heads
    grouped = getattr(arguments, "group_query_attention", False)
    head_dim = getattr(arguments, "kv_channels", None) or arguments.hidden_size // heads
    low_rank = _low_rank(arguments)
    steps = getattr(arguments, "low_rank_act_anneal", 0) or 0
    kept: dict[str, Any] = {"initializer_range": getattr(arguments, "init_method_std", 0.02)}
    kept |= getattr(arguments, KEPT_SETTINGS, {})
    return ModelDescription(
        vocab_size=vocab_size,
        hidden_size=arguments.hidden_size,
        ffn_hidden_size=arguments.ffn_hidden_size,
        num_layers=arguments.num_layers,
        num_heads=heads,
        num_kv_heads=arguments.num_query_groups if grouped else heads,
        head_dim=head_dim,
        max_positions=arguments.max_position_embeddings,
        # Called norm_epsilon up to Megatron 0.16.
        norm_eps=getattr(arguments, "layernorm_epsilon", getattr(arguments, "norm_epsilon", 1e-5)),
        tied=not getattr(arguments, "untie_embeddings_and_output_weights", False),
        dtype=dtype,
        rope=_rope(arguments),
        low_rank=low_rank,
        activation_amount=min(1.0, iteration / steps) if steps and low_rank.low_rank else 1.0,
        **kept,
    )


def arguments_from_description(
    description: ModelDescription,
    *,
    megatrons_own: bool = False,
    act_anneal: int = 0,
    tokenizer: Path | None = None,
) -> Namespace:
    """What a checkpoint must say of a model so that `--use-checkpoint-args` restores it.

    Args:
        description: the model.
        megatrons_own: whether it is stored in Megatron's own layers, `--low-rank-arch none`.
        act_anneal: the steps over which φ grows, `--low-rank-act-anneal`.
        tokenizer: the folder of the model's tokenizer.
    """
    rope, low_rank = description.rope, description.low_rank
    scaled = rope.kind == "linear"
    values: dict[str, Any] = {
        "num_layers": description.num_layers,
        "encoder_num_layers": description.num_layers,
        "hidden_size": description.hidden_size,
        "ffn_hidden_size": description.ffn_hidden_size,
        "num_attention_heads": description.num_heads,
        "group_query_attention": description.num_kv_heads != description.num_heads,
        "num_query_groups": description.num_kv_heads,
        "kv_channels": description.head_dim,
        "max_position_embeddings": description.max_positions,
        "position_embedding_type": "rope",
        "add_position_embedding": True,
        "use_rotary_position_embeddings": False,
        "rotary_base": int(rope.theta),
        "rotary_percent": 1.0,
        "rotary_interleaved": False,
        "rotary_seq_len_interpolation_factor": int(rope.factor) if scaled else None,
        "use_rope_scaling": rope.kind == "llama3",
        "rope_scaling_factor": rope.factor if rope.kind == "llama3" else 8.0,
        "normalization": "RMSNorm",
        "layernorm_epsilon": description.norm_eps,
        "swiglu": True,
        "squared_relu": False,
        "add_bias_linear": False,
        "add_qkv_bias": False,
        "apply_layernorm_1p": False,
        "apply_query_key_layer_scaling": False,
        "untie_embeddings_and_output_weights": not description.tied,
        "attention_dropout": 0.0,
        "hidden_dropout": 0.0,
        "vocab_size": description.vocab_size,
        TRUE_VOCABULARY: description.vocab_size,
        KEPT_SETTINGS: {name: getattr(description, name) for name in _KEPT},
        "ckpt_format": "torch_dist",
        "tensor_model_parallel_size": 1,
        "pipeline_model_parallel_size": 1,
        "params_dtype": description.dtype,
        "bf16": description.dtype == torch.bfloat16,
        "fp16": description.dtype == torch.float16,
    }
    for flag in flags_of(LowRankConfig):
        values[flag.destination] = flag.default
        if flag.field in _OF_THE_FUNCTION:
            values[flag.destination] = getattr(low_rank, flag.field)
    if megatrons_own:
        values["low_rank_arch"] = "none"
    values["low_rank_act_anneal"] = act_anneal
    if tokenizer is not None:
        values |= {"tokenizer_type": "HuggingFaceTokenizer", "tokenizer_model": str(tokenizer)}
    return Namespace(**values)


def known_vocabulary(arguments: Namespace, tokenizer: Path | None) -> int | None:
    """The tokens that exist, as far as a checkpoint's arguments or its tokenizer say.

    Args:
        arguments: the checkpoint's.
        tokenizer: a folder with its tokenizer, if there is one; else that of the arguments is
            looked for.
    """
    stored = getattr(arguments, TRUE_VOCABULARY, None)
    if stored is not None:
        return int(stored)
    if getattr(arguments, "tokenizer_type", None) == "NullTokenizer":
        return int(arguments.vocab_size)
    model = getattr(arguments, "tokenizer_model", None)
    for folder in (tokenizer, Path(model) if model else None):
        count = None if folder is None else token_count(folder)
        if count is not None:
            return count
    size = getattr(arguments, "vocab_size", None)
    return None if size is None else int(size)


def _low_rank(arguments: Namespace) -> LowRankConfig:
    """The settings that decide the function; those of the layout keep their defaults."""
    values = {
        flag.field: getattr(arguments, flag.destination, flag.default)
        for flag in flags_of(LowRankConfig)
        if flag.field in _OF_THE_FUNCTION
    }
    if values["arch"] == "none":
        return LowRankConfig(arch="dense")
    low_rank = LowRankConfig(**values)
    if low_rank.arch == "dense" and low_rank.mlp_kind != "swiglu":
        raise ValueError(
            f"the checkpoint's --low-rank-mlp {low_rank.mlp}: no LLaMA has it; legal value: swiglu"
        )
    return low_rank


def _rope(arguments: Namespace) -> RopeSettings:
    theta = float(getattr(arguments, "rotary_base", 10000))
    factor = getattr(arguments, "rotary_seq_len_interpolation_factor", None)
    scaled = getattr(arguments, "use_rope_scaling", False)
    if factor not in (None, 1) and scaled:
        raise ValueError(
            f"the checkpoint's --rotary-seq-len-interpolation-factor {factor}: Hugging Face's "
            "LLaMA has no such scaling beside --use-rope-scaling"
        )
    if factor not in (None, 1):
        return RopeSettings(theta=theta, kind="linear", factor=float(factor))
    if not scaled:
        return RopeSettings(theta=theta)
    # Megatron 0.19's own model is built with 8 whatever the flag says; ours honours it.
    own = getattr(arguments, "low_rank_arch", "none") == "none"
    value = 8.0 if own else float(getattr(arguments, "rope_scaling_factor", 8.0))
    return RopeSettings(theta=theta, kind="llama3", factor=value)
