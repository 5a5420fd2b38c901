"""From parsed settings to the model that Megatron's training loop builds."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from boost_layers.layer import LowRankLayer
from boost_layers.specs import finish_model, layer_spec, low_rank_spec
from boost_layers.validation import validate_model
from megatron.boost.stored_run import TRUE_VOCABULARY

if TYPE_CHECKING:
    from argparse import Namespace

    from megatron.core.models.gpt import GPTModel
    from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
    from megatron.training.models.gpt import GPTModelConfig

    from boost_layers.config import LowRankConfig


def model_config(arguments: Namespace, low_rank: LowRankConfig) -> GPTModelConfig:
    """Megatron's model configuration, with our layers in it unless `arch` is "none".

    Raises:
        ValueError: for a model that our layers would compute wrongly or not at all.
    """
    from megatron.training.argument_utils import gpt_config_from_args

    config: GPTModelConfig = gpt_config_from_args(arguments)
    if low_rank.arch != "none":
        # Megatron 0.19 leaves it at its default.
        config.rope_scaling_factor = arguments.rope_scaling_factor
        validate_model(low_rank, config.transformer)
        layer_spec(low_rank)
        config.transformer_layer_spec = partial(_block_spec, low_rank)
        config.pre_wrap_hooks.append(partial(_finish_model, arguments, low_rank))
    return config


def _block_spec(
    low_rank: LowRankConfig, config: GPTModelConfig, vp_stage: int | None = None
) -> TransformerBlockSubmodules:
    spec = low_rank_spec(config.transformer, low_rank, vp_stage)
    # The stages of our own run know the width of the tensor between them (wide_pipeline_tensor).
    config.transformer.variable_seq_lengths = False
    return spec


def _finish_model(
    arguments: Namespace, low_rank: LowRankConfig, stages: list[GPTModel]
) -> list[GPTModel]:
    """What Megatron's builder leaves to do: layout-invariant embedding and head, the padded
    vocabulary's mask, the fused first border, and a look at what was really built."""
    vocab_size = true_vocabulary(arguments)
    for stage in stages:
        for layer in stage.decoder.layers:
            assert isinstance(layer, LowRankLayer), f"Megatron built a {type(layer).__name__}"
        finish_model(stage, vocab_size, low_rank.seed)
        if arguments.use_cpu_initialization:
            # Megatron 0.19 leaves that to the distributed optimizer's buffers.
            stage.cuda()
    return stages


def true_vocabulary(arguments: Namespace) -> int:
    """The number of tokens that exist, without the rows that Megatron pads the vocabulary with:
    that of the checkpoint that is loaded, else the tokenizer's."""
    from megatron.training import get_tokenizer

    of_checkpoint = getattr(arguments, TRUE_VOCABULARY, None)
    if of_checkpoint is not None:
        return int(of_checkpoint)

    tokenizer: Any = get_tokenizer()
    known = tokenizer.vocab_size if tokenizer is not None else arguments.vocab_size
    return int(known if known is not None else arguments.padded_vocab_size)
