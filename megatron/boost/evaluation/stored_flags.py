"""The Megatron command line of the model in a checkpoint, from the arguments that it holds.

Megatron's own `--use-checkpoint-args` leaves out some that change the function (ε of the norms, the
scaling of RoPE) and takes the vocabulary's padding as it was, which need not fit another
tensor-parallel size.
"""

from __future__ import annotations

from argparse import Action, ArgumentParser, Namespace
from collections.abc import Iterator

from megatron.boost.checkpoint_settings import restored_flags
from megatron.boost.megatron_flags import megatron_parser

_FUNCTION = (
    # sizes
    "num_layers hidden_size ffn_hidden_size num_attention_heads group_query_attention "
    "num_query_groups kv_channels max_position_embeddings make_vocab_size_divisible_by "
    "untie_embeddings_and_output_weights "
    # positions
    "position_embedding_type use_rotary_position_embeddings rotary_base rotary_percent "
    "rotary_interleaved rotary_seq_len_interpolation_factor use_rope_scaling rope_scaling_factor "
    "yarn_original_max_position_embeddings yarn_beta_fast yarn_beta_slow "
    "yarn_correction_range_round_to_int rotary_scaling_factor mscale mscale_all_dim no_rope_freq "
    # norms and the residual stream
    "normalization layernorm_epsilon layernorm_zero_centered_gamma fp32_residual_connection "
    "apply_residual_connection_post_layernorm qk_layernorm qk_l2_norm "
    # attention and MLP
    "add_bias_linear add_qkv_bias attention_output_gate apply_query_key_layer_scaling "
    "attention_softmax_in_fp32 softmax_type window_size window_attn_skip_freq swiglu squared_relu "
    "quick_geglu openai_gelu glu_linear_offset activation_func_clamp_value "
    # precision
    "bf16 fp16"
).split()
"""Megatron's settings that decide what the model computes, by destination."""

_REFUSED = {
    "num_experts": "a mixture of experts",
    "multi_latent_attention": "multi-latent attention",
    "experimental_attention_variant": "an experimental attention",
    "hybrid_layer_pattern": "a hybrid of several kinds of layers",
    "heterogeneous_layers_config_path": "layers of different sizes",
    "heterogeneous_layers_config_encoded_json": "layers of different sizes",
    "mtp_num_layers": "multi-token prediction",
    "use_mup": "maximal update parametrisation",
    "spec": "a layer spec of the user's",
}
"""Kinds of models that are not rebuilt, by the argument that makes them."""


def flags_of_model(where: str, stored: Namespace) -> list[str]:
    """The flags that make the stored model again, Megatron's and ours, without those of its layout.

    Args:
        where: the flag that names the checkpoint, and its value.
        stored: the arguments that it holds.

    Raises:
        ValueError: for a kind of model that is not rebuilt.
    """
    for name, kind in _REFUSED.items():
        if getattr(stored, name, None):
            raise ValueError(
                f"{where}: the model has {kind} ({name} {getattr(stored, name)}), which is not "
                "evaluated here; nearest legal value: Megatron's own --skip-train"
            )
    parser = megatron_parser()
    flags: list[str] = []
    for name in _FUNCTION:
        # Of a checkpoint of an older release that lacks a setting, the setting was its default.
        value = getattr(stored, name, parser.get_default(name))
        if name == "num_query_groups" and not getattr(stored, "group_query_attention", False):
            continue
        flags += _typed(parser, name, value)
    return [*flags, *restored_flags({}, stored)]


def _typed(parser: ArgumentParser, name: str, value: object) -> list[str]:
    """The words of a command line that give `value` to the setting `name`."""
    if value == parser.get_default(name) or value is None:
        return []
    actions = list(_actions(parser, name))
    for action in actions:
        # A switch: it has no value of its own, or one that its name stands for.
        if action.nargs == 0 and getattr(action, "const", None) == value:
            return [action.option_strings[0]]
    for action in actions:
        if action.nargs == 0:
            options = [text for text in action.option_strings if text.startswith("--no-")]
            if value is False and options:
                return options[:1]
            continue
        words = value if isinstance(value, list | tuple) and action.nargs else [value]
        return [action.option_strings[0], *map(str, words)]
    raise AssertionError(f"no flag of Megatron's gives {name} the value {value!r}")


def _actions(parser: ArgumentParser, name: str) -> Iterator[Action]:
    return (action for action in parser._actions if action.dest == name)
