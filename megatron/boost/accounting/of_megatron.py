"""The accounting's sizes from Megatron's arguments and configuration."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from megatron.boost.accounting.sizes import Layout, Model, Recompute

if TYPE_CHECKING:
    from argparse import Namespace

    from megatron.core.transformer.transformer_config import TransformerConfig

    from boost_layers.config import LowRankConfig


def model_of_arguments(
    arguments: Namespace, low_rank: LowRankConfig, vocab_size: int | None = None
) -> Model:
    """The model of Megatron's validated arguments.

    Args:
        arguments: after `validate_args`, and with the padded vocabulary known.
        low_rank: our settings; `arch` must not be "none".
        vocab_size: the number of tokens that exist; None: as many as rows.
    """
    rows = arguments.padded_vocab_size
    grouped = arguments.group_query_attention
    return Model(
        hidden_size=arguments.hidden_size,
        ffn_hidden_size=arguments.ffn_hidden_size,
        num_attention_heads=arguments.num_attention_heads,
        num_query_groups=arguments.num_query_groups if grouped else arguments.num_attention_heads,
        kv_channels=arguments.kv_channels,
        num_layers=arguments.num_layers,
        vocab_size=rows if vocab_size is None else vocab_size,
        padded_vocab_size=rows,
        tied=not arguments.untie_embeddings_and_output_weights,
        low_rank=low_rank,
        rotary_channels=_rotary_channels(arguments),
    )


def _rotary_channels(arguments: Namespace) -> int:
    if arguments.position_embedding_type == "rope":
        return int(arguments.kv_channels * arguments.rotary_percent)
    return arguments.kv_channels if arguments.position_embedding_type == "yarn" else 0


def layout_of_arguments(arguments: Namespace, micro_batches: int | None = None) -> Layout:
    """The layout of Megatron's validated arguments.

    Args:
        arguments: after `validate_args`.
        micro_batches: of one data-parallel rank in one iteration; None: as many as fill the
            pipeline.
    """
    from megatron.training.argument_utils import core_transformer_config_from_args

    virtual = arguments.virtual_pipeline_model_parallel_size or 1
    stages = arguments.pipeline_model_parallel_size
    return Layout(
        sequence_length=arguments.seq_length,
        micro_batch_size=arguments.micro_batch_size,
        micro_batches=micro_batches or stages * virtual,
        tensor_parallel=arguments.tensor_model_parallel_size,
        pipeline_parallel=stages,
        virtual_stages=virtual,
        data_parallel=arguments.data_parallel_size,
        stage_layers=stage_layers_of_config(core_transformer_config_from_args(arguments)),
        sequence_parallel=arguments.sequence_parallel,
        dtype=arguments.params_dtype,
        gradients_in_fp32=arguments.accumulate_allreduce_grads_in_fp32,
        distributed_optimizer=arguments.use_distributed_optimizer,
        recompute=_recompute(arguments),
        recompute_method=arguments.recompute_method or "uniform",
        recompute_layers=arguments.recompute_num_layers or 1,
    )


def _recompute(source: Any) -> Recompute:
    """Megatron's two flags (or fields of its configuration) in one word."""
    if source.recompute_granularity == "full":
        return "full"
    selected = source.recompute_granularity == "selective"
    # None: the command line leaves Megatron's default.
    modules = source.recompute_modules or ["core_attn"]
    return "core_attention" if selected and "core_attn" in modules else "none"


def stage_layers_of_config(
    config: TransformerConfig,
) -> tuple[tuple[tuple[int, ...], ...], ...]:
    """The layers that Megatron gives each pipeline rank and virtual stage, from 0: its own rules
    for uneven first and last stages, standalone embedding and loss, and explicit layouts."""
    from megatron.core.transformer.enums import LayerType
    from megatron.core.transformer.transformer_block import get_num_layers_to_build
    from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

    virtual = config.virtual_pipeline_model_parallel_size
    explicit = config.pipeline_model_parallel_layout

    def layers(pp_rank: int, vp_stage: int | None) -> tuple[int, ...]:
        if explicit is not None:
            kinds = explicit.layout
            before = sum(
                kinds[pp][vp].count(LayerType.decoder)
                for vp in range(vp_stage or 0)
                for pp in range(len(kinds))
            ) + sum(kinds[pp][vp_stage or 0].count(LayerType.decoder) for pp in range(pp_rank))
            number = kinds[pp_rank][vp_stage or 0].count(LayerType.decoder)
        else:
            before = get_transformer_layer_offset(config, vp_stage, pp_rank)
            number = get_num_layers_to_build(config, vp_stage, pp_rank)
        return tuple(range(before, before + number))

    stages: list[int | None] = [None] if virtual is None else list(range(virtual))
    return tuple(
        tuple(layers(pp_rank, vp_stage) for vp_stage in stages)
        for pp_rank in range(config.pipeline_model_parallel_size)
    )
