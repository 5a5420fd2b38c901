"""What the layers make of every field of Megatron's `TransformerConfig`: one table.

It is read by `boost_layers.validation`, by the command line and by the documentation of Megatron's
flags; a test compares it with the class, so a field of a new release fails it until it is placed
here.
"""

from __future__ import annotations

from dataclasses import MISSING, Field, fields
from functools import cache
from typing import TYPE_CHECKING, Any

from boost_layers.rules import Rule, apart, conditional, honoured, refused, rules

if TYPE_CHECKING:
    from collections.abc import Iterable

KERNELS = apart(
    "chooses among Megatron's own kernels for the same function; our layers have theirs, and "
    "embedding and head follow it"
)
MOE = refused("mixture of experts and its options: the MLP is one dense, gated product")
MTP = refused("multi-token prediction builds layers of Megatron's from the model's spec")
ATTENTION_VARIANTS = refused("another attention than softmax(Q·Kᵀ)·V, and its options")
LOW_PRECISION = refused("FP8 and FP4 GEMMs of Transformer Engine, and their options")
TP_OVERLAP = refused(
    "overlaps the collectives of Transformer Engine's linear layers; ours overlap their own"
)
CONTEXT_PARALLEL = refused("splits the sequence within attention; ours sees all of it")
CUDA_GRAPHS = refused("captures Megatron's own layers; ours keep a ledger and wait for collectives")
OFFLOADING = refused("moves the activations of Megatron's own layers to the host")
SERVING = refused("generation with a key-value cache, which the layers do not have")
RECURRENT = refused("layers of hybrid models (Mamba and others) are none of ours")
MUP = refused("maximal update parametrisation scales Megatron's own layers")
WEIGHT_SHARDS = refused(
    "shards the weights of Megatron's own linear layers once more",
    None,
    same_as="tensor_model_parallel_size",
)
DROPOUT = refused(
    "the layers have no dropout; pretrain_gpt.py makes an unset one 0 and says so", 0.0, instead="0"
)

TRANSFORMER_FIELDS: dict[str, Rule] = rules(
    (
        honoured("sizes; KV heads must be a multiple of the tensor-parallel size"),
        "num_layers hidden_size ffn_hidden_size num_attention_heads num_query_groups kv_channels",
    ),
    (
        honoured("the layers are sharded, counted and placed accordingly"),
        "tensor_model_parallel_size pipeline_model_parallel_size "
        "virtual_pipeline_model_parallel_size num_layers_in_first_pipeline_stage "
        "num_layers_in_last_pipeline_stage pipeline_model_parallel_layout "
        "account_for_embedding_in_pipeline_split account_for_loss_in_pipeline_split",
    ),
    (honoured("ε of every RMSNorm"), "layernorm_epsilon"),
    (honoured("rotary embedding of adjacent pairs"), "rotary_interleaved"),
    (honoured("the scale of Q·Kᵀ in every core attention"), "softmax_scale"),
    (
        honoured("--core-attention local follows it; the others accumulate in fp32 anyway"),
        "attention_softmax_in_fp32",
    ),
    (
        honoured(
            "embedding, head and full-rank layers; low-rank factors have their own initialisation"
        ),
        "init_method_std embedding_init_method_std",
    ),
    (honoured("no initial weights are drawn"), "perform_initialization"),
    (honoured("the weights are drawn on the CPU"), "use_cpu_initialization"),
    (honoured("the dtype of weights and activations"), "bf16 fp16 params_dtype"),
    (
        honoured("full recomputation, by Megatron's block"),
        "recompute_method recompute_num_layers",
    ),
    (
        conditional("full or of core attention; full is refused with --low-rank-recompute"),
        "recompute_granularity",
    ),
    (honoured("through PyTorch's deterministic algorithms"), "deterministic_mode"),
    (
        honoured("a global setting of PyTorch's, for our GEMMs too"),
        "disable_bf16_reduced_precision_matmul",
    ),
    # Refused in a combination, by `boost_layers.validation`.
    (
        conditional("core_attn alone is recomputed selectively; others are refused with selective"),
        "recompute_modules",
    ),
    (
        conditional("needed by BTP at TP > 1, refused with vanilla, either way with dense"),
        "sequence_parallel",
    ),
    (
        conditional(
            "refused with sequence parallelism and LaX, where ranks hold different activations"
        ),
        "distribute_saved_activations",
    ),
    (
        conditional("chooses within Transformer Engine; refused with another core attention"),
        "attention_backend flash_attention_version",
    ),
    (
        conditional("Megatron's N(0, init_method_std²) is honoured, another method is refused"),
        "init_method output_layer_init_method",
    ),
    # What makes a LLaMA block.
    (refused("the block is pre-norm with RMSNorm", "RMSNorm"), "normalization"),
    (
        refused(
            "no projection has a bias",
            False,
            shown="--add-bias-linear",
            instead="pass --disable-bias-linear",
        ),
        "add_bias_linear",
    ),
    (
        refused("the MLP is gated", True, shown="an MLP without a gate", instead="pass --swiglu"),
        "gated_linear_unit",
    ),
    (
        conditional("the gate's activation is SiLU (--swiglu), which the product variant omits"),
        "activation_func",
    ),
    (refused("no projection has a bias"), "add_qkv_bias"),
    (
        refused("the gate's activation is plain SiLU"),
        "activation_func_clamp_value activation_func_fp8_input_store use_te_activation_func "
        "use_fused_weighted_squared_relu",
    ),
    (refused("the gate is not offset", 0.0, instead="0"), "glu_linear_offset"),
    (refused("γ of the norms is not centred at zero"), "layernorm_zero_centered_gamma"),
    (refused("queries and keys are not normalised"), "qk_layernorm qk_l2_norm"),
    (refused("the block is pre-norm"), "apply_residual_connection_post_layernorm"),
    (refused("the residual stream has the dtype of the weights"), "fp32_residual_connection"),
    (DROPOUT, "hidden_dropout attention_dropout"),
    (refused("mixes dtypes within a layer"), "enable_autocast"),
    (refused("all layers have RoPE"), "no_rope_freq"),
    (refused("RoPE of images and video"), "mrope_section"),
    (refused("attention is causal over the whole sequence"), "window_size window_attn_skip_freq"),
    (refused("softmax has no sink", "vanilla"), "softmax_type"),
    (refused("attention is not scaled by layer"), "apply_query_key_layer_scaling"),
    (refused("attention's output is not gated"), "attention_output_gate"),
    (
        refused("the largest attention logit is not known outside of core attention"),
        "qk_clip qk_clip_alpha qk_clip_threshold log_max_attention_logit",
    ),
    (refused("all layers are alike, but for --low-rank-layers"), "heterogeneous_block_specs"),
    (
        ATTENTION_VARIANTS,
        "multi_latent_attention experimental_attention_variant "
        "experimental_attention_variant_loss_scale_func dsa_indexer_n_heads dsa_indexer_head_dim "
        "dsa_indexer_topk dsa_indexer_topk_freq dsa_indexer_skip_topk_offset "
        "dsa_indexer_loss_coeff dsa_indexer_use_sparse_loss dsa_kernel_backend "
        "dsa_indexer_rope_interleaved dsa_indexer_rotate_activation dsa_indexer_scoring_relu "
        "dsa_indexer_k_norm_epsilon dsa_indexer_k_norm_fp32 linear_attention_freq "
        "linear_conv_kernel_dim linear_key_head_dim linear_value_head_dim linear_num_key_heads "
        "linear_num_value_heads",
    ),
    (
        RECURRENT,
        "is_hybrid_model mamba_state_dim mamba_head_dim mamba_num_groups mamba_num_heads "
        "mamba_training_ssm_states_dtype use_mamba_mem_eff_path",
    ),
    (
        MUP,
        "use_mup mup_width_mult mup_base_hidden_size mup_embedding_mult mup_output_mult "
        "mup_base_head_dim mup_attn_scale_power",
    ),
    (
        honoured("parameters on the meta device, for shapes and memory without a run"),
        "init_model_with_meta_device",
    ),
    (
        MTP,
        "mtp_num_layers mtp_loss_scaling_factor mtp_use_repeated_layer mtp_detach_heads "
        "mtp_hybrid_override_pattern mtp_standalone",
    ),
    (
        MOE,
        "num_moe_experts moe_shared_expert_intermediate_size moe_shared_expert_gate "
        "moe_shared_expert_overlap use_grouped_gemm_for_shared_expert "
        "moe_shared_expert_glu_interleave_size moe_layer_freq moe_ffn_hidden_size "
        "moe_router_load_balancing_type moe_router_topk moe_enable_routing_replay "
        "moe_router_topk_limited_devices moe_router_padding_for_quantization "
        "moe_router_padding_for_fp8 moe_router_num_groups moe_router_group_topk "
        "moe_router_pre_softmax moe_router_topk_scaling_factor moe_router_score_function "
        "moe_router_dtype moe_router_enable_expert_bias moe_router_bias_update_rate "
        "moe_router_quantile_balancing_ema moe_router_force_load_balancing "
        "moe_router_force_biased use_grouped_gemm_for_dense_mlp moe_grouped_gemm "
        "moe_single_grouped_weight moe_single_grouped_bias moe_aux_loss_coeff moe_z_loss_coeff "
        "moe_input_jitter_eps moe_token_dropping moe_token_dispatcher_type moe_enable_deepep "
        "moe_flex_dispatcher_backend moe_permute_fusion_into_hybridep "
        "moe_hybridep_pad_uneven_dispatch_inputs moe_per_layer_logging "
        "moe_expert_capacity_factor moe_pad_expert_input_to_capacity "
        "moe_pad_experts_for_cuda_graph_inference moe_token_drop_policy moe_layer_recompute "
        "moe_permute_fusion moe_router_fusion moe_apply_probs_on_input moe_latent_size "
        "moe_flex_dispatcher_num_sms moe_deepep_num_sms moe_hybridep_num_sms "
        "moe_hybridep_num_blocks_permute moe_hybridep_num_blocks_unpermute "
        "moe_hybridep_num_sms_preprocessing moe_ncclep_static_shape moe_ncclep_zero_copy "
        "moe_mlp_glu_interleave_size moe_expert_rank_capacity_factor moe_paged_stash "
        "moe_paged_stash_page_size moe_paged_stash_buffer_size_factor_cuda "
        "moe_paged_stash_buffer_size_factor_cpu high_priority_a2a_comm_stream "
        "expert_model_parallel_size overlap_moe_expert_parallel_comm "
        "overlap_dispatch_backward_with_experts_wgrad ep_overlap_early_attn_memory_release",
    ),
    (
        apart("of experts, which are refused; Megatron sets it to the tensor-parallel size"),
        "expert_tensor_parallel_size expert_tensor_parallel_num_weight_shards",
    ),
    (WEIGHT_SHARDS, "tensor_parallel_num_weight_shards"),
    (refused(WEIGHT_SHARDS.note, 1), "gtp_weight_remat_size expert_gtp_weight_remat_size"),
    (
        refused(CONTEXT_PARALLEL.note, 1),
        "context_parallel_size",
    ),
    (
        CONTEXT_PARALLEL,
        "hierarchical_context_parallel_sizes max_seqlen_per_dp_cp_rank hybrid_context_parallel",
    ),
    (
        refused(CONTEXT_PARALLEL.note, None, "p2p", ["p2p"]),
        "cp_comm_type",
    ),
    (
        LOW_PRECISION,
        "fp8_recipe fp8_param fp8_quantizer_factory fp8_margin fp8_interval fp8_amax_history_len "
        "fp8_amax_compute_algo fp8_wgrad fp8_output_proj fp8_dot_product_attention "
        "fp8_multi_head_attention tp_only_amax_red first_last_layers_bf16 "
        "num_layers_at_start_in_bf16 num_layers_at_end_in_bf16 use_kitchen use_kitchen_attention "
        "kitchen_attention_backend fp4_recipe fp4_param fp4_quantizer_factory quant_recipe "
        "disable_parameter_transpose_cache",
    ),
    (refused(LOW_PRECISION.note, instead="--bf16"), "fp8 fp4"),
    (
        TP_OVERLAP,
        "tp_comm_overlap tp_comm_bulk_wgrad tp_comm_bulk_dgrad tp_comm_overlap_ag "
        "tp_comm_overlap_rs tp_comm_overlap_rs_dgrad tp_comm_split_ag tp_comm_atomic_ag "
        "tp_comm_split_rs tp_comm_atomic_rs tp_comm_overlap_disable_qkv "
        "tp_comm_overlap_disable_fc1 tp_comm_bootstrap_backend",
    ),
    (refused("BTP puts off no weight gradient"), "delay_wgrad_compute"),
    (
        refused(CUDA_GRAPHS.note, "none"),
        "cuda_graph_impl",
    ),
    (
        CUDA_GRAPHS,
        "enable_cuda_graph external_cuda_graph cuda_graph_use_single_mempool "
        "cuda_graph_retain_backward_graph cuda_graph_warmup_steps cuda_graph_scope",
    ),
    (refused(CUDA_GRAPHS.note, [], "full", instead="leave it out"), "cuda_graph_modules"),
    (refused(OFFLOADING.note, 0), "cpu_offloading_num_layers"),
    (
        OFFLOADING,
        "cpu_offloading cpu_offloading_activations cpu_offloading_weights "
        "cpu_offloading_double_buffering cpu_offloading_retain_pinned_cpu_buffers "
        "fine_grained_activation_offloading offload_modules min_offloaded_tensor_size "
        "delay_offload_until_cuda_graph delta_offload_bytes_across_pp_ranks "
        "activation_offload_fraction fine_grained_offloading_max_inflight_offloads",
    ),
    (
        SERVING,
        "flash_decode nccl_all_reduce_for_prefill use_inference_optimized_layers "
        "inference_fuse_tp_communication inference_disable_triton_nvls_kernels "
        "inference_grouped_gemm_backend inference_moe_disable_fused_quant_kernels "
        "inference_moe_token_dispatcher_type mlp_chunks_for_prefill",
    ),
    (refused("our MLP takes all tokens at once"), "mlp_chunks_for_training"),
    (refused("replaces the all-reduces of Transformer Engine's layers"), "symmetric_ar_type"),
    (refused("replaces the kernels of Megatron's own layers"), "batch_invariant_mode"),
    (
        refused("kernels of Transformer Engine that fuse parts of Megatron's own layers"),
        "fused_residual_rmsnorm use_transformer_engine_op_fuser fused_single_qkv_rope "
        "memory_efficient_layer_norm",
    ),
    (
        refused(
            "our layers stand for both; inference_optimized builds others",
            "transformer_engine",
            "local",
            instead="local",
        ),
        "transformer_impl",
    ),
    # What does not touch the layer.
    (
        KERNELS,
        "bias_activation_fusion bias_dropout_fusion masked_softmax_fusion persist_layer_norm "
        "apply_rope_fusion gradient_accumulation_fusion",
    ),
    (
        apart("the embedding, the head and the loss stay Megatron's"),
        "embedding_init_method clone_scatter_output_in_embedding cross_entropy_loss_fusion "
        "cross_entropy_fusion_impl defer_embedding_wgrad_compute wgrad_deferral_limit "
        "calculate_per_token_loss",
    ),
    (
        apart("the pipeline's schedule and what it sends"),
        "pipeline_model_parallel_comm_backend pipeline_dtype variable_seq_lengths overlap_p2p_comm "
        "batch_p2p_comm batch_p2p_sync use_ring_exchange_p2p deallocate_pipeline_outputs "
        "overlap_p2p_comm_warmup_flush microbatch_group_size_per_vp_stage "
        "num_microbatches_with_partial_activation_checkpoints",
    ),
    (
        apart("the training loop's hooks, timers and logs"),
        "timers finalize_model_grads_func grad_scale_func moe_grad_scale_func mtp_grad_scale_func "
        "no_sync_func grad_sync_func param_sync_func barrier_with_L1_time config_logger_dir "
        "test_mode autocast_dtype _cpu_offloading_context",
    ),
    (
        apart("random states of dropout and sampling, which the layers have no use for"),
        "use_te_rng_tracker inference_rng_tracker inference_sampling_seed",
    ),
    (
        apart("graphs of generation, off without --cuda-graph-impl"),
        "inference_cuda_graph_scope",
    ),
    (apart("how Megatron's block names layers in a checkpoint"), "hetereogenous_dist_checkpoint"),
)
"""Every field of `TransformerConfig` by name."""


@cache
def transformer_fields() -> dict[str, Field[Any]]:
    """The fields of the installed Megatron's `TransformerConfig` by name."""
    from megatron.core.transformer.transformer_config import TransformerConfig

    return {field.name: field for field in fields(TransformerConfig)}


def default_of(field: Field[Any]) -> Any:
    """A field's default value."""
    if field.default_factory is not MISSING:
        return field.default_factory()
    return field.default


# Where Megatron's flag has another name than the field, and the field does not say so itself.
_FLAGS = {
    "num_moe_experts": "--num-experts",
    "add_bias_linear": "--disable-bias-linear",
    "gated_linear_unit": "--swiglu",
    "fp8_param": "--fp8-param-gather",
    "fp4_param": "--fp4-param-gather",
    "cpu_offloading": "--cpu-offloading-num-layers",
    "heterogeneous_block_specs": "--heterogeneous-layers-config-path",
    "is_hybrid_model": "--hybrid-layer-pattern",
    "quant_recipe": "--te-precision-config-file",
}


def flag_of_field(field: Field[Any]) -> str:
    """What a message calls a field: its flag in Megatron's parser, or `--` and its name where it
    has none."""
    if field.name in _FLAGS:
        return _FLAGS[field.name]
    names: Iterable[str] = field.metadata.get("argparse_meta", {}).get("arg_names", ())
    return next(iter(names), "--" + field.name.replace("_", "-"))
