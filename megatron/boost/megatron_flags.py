"""What becomes of every flag of Megatron's beside a low-rank (or dense) architecture.

Flags that set a field of `TransformerConfig` have that field's rule, in
`boost_layers.transformer_features`; the others have theirs here, by argument group where one rule
holds for all of a group, else one by one. A test walks Megatron's parser: a new flag fails it until
it is classified, unless its whole group is.
"""

from __future__ import annotations

from argparse import Action, ArgumentParser, Namespace
from collections.abc import Sequence
from functools import partial
from typing import Any

from boost_layers.rules import UNKNOWN, Rule, apart, conditional, honoured, refused, rules
from boost_layers.transformer_features import (
    ATTENTION_VARIANTS,
    CUDA_GRAPHS,
    KERNELS,
    LOW_PRECISION,
    MOE,
    RECURRENT,
    TP_OVERLAP,
    TRANSFORMER_FIELDS,
)
from megatron.boost.flags import is_given

_OTHER_PROGRAM = "read by other programs than GPT pre-training, whose parser is the same"

GROUPS: dict[str, Rule] = {
    "options": apart("the parser's own"),
    "learning rate and weight decay": apart("the optimiser's schedule"),
    "profiling": apart("profiles any model"),
    "validation": apart("evaluation of any model"),
    "tokenizer": apart("tokens and the size of the vocabulary"),
    "autoresume": apart("restarts on a cluster"),
    "biencoder": apart(_OTHER_PROGRAM),
    "vision": apart(_OTHER_PROGRAM),
    "workload inspector": apart("a server beside the training"),
    "one logger": apart("a log"),
    "In-process restart": apart("restarts within the process"),
    "ft_package": apart("fault tolerance of a cluster"),
    "rerun engine": apart("validates the loss of any model"),
    "msc": apart("storage"),
    "fault injector": apart("breaks ranks on purpose"),
    "rl": refused("reinforcement learning; pretrain_gpt.py pre-trains with any architecture"),
    "sft": refused("fine-tuning; pretrain_gpt.py pre-trains with any architecture"),
    "moe": MOE,
    "heterogeneous architecture": refused("all layers are alike, but for --low-rank-layers"),
    "kitchen": LOW_PRECISION,
}
"""Argument groups all of whose flags have one rule, by title: none touches the layer, or all are
refused, and so would be a new one."""

_SCHEDULE = apart("batch sizes, iterations and when to stop")
_OPTIMIZER = apart("the optimiser, which sees parameters only")
_DATA = apart("the data; the layers see token embeddings only")
_DATA_PARALLEL = apart("gradients and parameters between data-parallel ranks")
_FSDP = refused(
    "fully sharded data parallelism gathers the parameters of Megatron's own layers, not of ours",
    instead="--use-distributed-optimizer",
)
_ROPE = honoured("RoPE's frequencies, which Megatron computes and the layers apply")
_OWN_FLOPS = honoured("counts the model's own FLOPs, and shows the dense-equivalent ones beside")

FLAGS: dict[str, Rule] = rules(
    # network size
    (refused("--num-layers by an older name", instead="--num-layers"), "encoder_num_layers"),
    (refused("--seq-length by an older name", instead="--seq-length"), "encoder_seq_length"),
    (refused("there is no second stack of layers"), "decoder_num_layers decoder_seq_length"),
    (
        honoured("with --num-query-groups, a multiple of the tensor-parallel size"),
        "group_query_attention",
    ),
    (
        refused(
            "the initial weights of a learned embedding would depend on the layout, and the layers "
            "take no bias of relative positions",
            "rope",
            "yarn",
            "none",
        ),
        "position_embedding_type",
    ),
    (honoured("the same as --position-embedding-type rope"), "use_rotary_position_embeddings"),
    (
        refused("Megatron 0.19 ignores it", instead="--position-embedding-type none"),
        "add_position_embedding",
    ),
    (
        _ROPE,
        "rotary_base rotary_percent rotary_seq_len_interpolation_factor use_rope_scaling "
        "rope_scaling_factor yarn_original_max_position_embeddings yarn_beta_fast yarn_beta_slow "
        "yarn_correction_range_round_to_int rotary_scaling_factor mscale mscale_all_dim",
    ),
    (refused("Megatron's own attention takes no other", None, "rope"), "rope_type"),
    (
        refused("of --position-embedding-type relative"),
        "relative_attention_num_buckets relative_attention_max_distance",
    ),
    (
        refused(
            "the MLP is gated, and its activation SiLU; accepted with the product, which has no "
            "activation, too",
            True,
            shown="an MLP without a gate",
            instead="pass --swiglu",
        ),
        "swiglu",
    ),
    (
        refused("the gate's activation is SiLU", instead="--swiglu"),
        "squared_relu quick_geglu openai_gelu",
    ),
    (
        honoured("the head gives the padded rows of the vocabulary no probability"),
        "make_vocab_size_divisible_by",
    ),
    (
        apart("the embedding and the head, which stay Megatron's"),
        "max_position_embeddings untie_embeddings_and_output_weights",
    ),
    (apart(_OTHER_PROGRAM), "onnx_safe bert_binary_head"),
    # regularization
    (
        _OPTIMIZER,
        "weight_decay clip_grad adam_beta1 adam_beta2 adam_eps sgd_momentum muon_momentum "
        "muon_split_qkv muon_nesterov muon_scale_mode muon_fp32_matmul_prec muon_coefficient_type "
        "muon_num_ns_steps muon_tp_mode muon_extra_scale_factor muon_scalar_optimizer lion_beta1 "
        "lion_beta2",
    ),
    (refused("of --qk-layernorm"), "apply_wd_to_qk_layernorm no_weight_decay_cond_type"),
    # training
    (
        refused(
            "Megatron 0.19 reads it and trains with the full batch from the first iteration",
            instead="--step-batch-size-schedule",
        ),
        "rampup_batch_size",
    ),
    (
        _SCHEDULE,
        "micro_batch_size global_batch_size step_batch_size_schedule "
        "decrease_batch_size_if_needed empty_unused_memory_level "
        "check_weight_hash_across_dp_replicas_interval gpu_sniff_test_interval train_sync_interval "
        "train_iters train_samples exit_interval exit_duration_in_mins exit_signal_handler "
        "exit_signal exit_signal_handler_for_dataloader exit_signal_handler_for_training manual_gc "
        "manual_gc_interval manual_gc_eval iterations_to_skip "
        "batch_size deprecated_use_mcore_models",
    ),
    (honoured("core attention is recomputed"), "recompute_activations"),
    (
        refused(
            "Megatron ends the run at once, with exit code 0", instead="--recompute-activations"
        ),
        "checkpoint_activations",
    ),
    (
        apart("checks and batches of any model"),
        "check_for_nan_in_loss_and_grad check_for_large_grads result_rejected_tracker_filename "
        "dataloader_type",
    ),
    (refused(TP_OVERLAP.note), "tp_comm_overlap_cfg"),
    (KERNELS, "bias_gelu_fusion bias_swiglu_fusion no_persist_layer_norm"),
    (apart("read by nothing in Megatron 0.19; see --core-attention"), "use_flash_attn"),
    (
        _OPTIMIZER,
        "optimizer optimizer_cpu_offload optimizer_cuda_graph optimizer_offload_fraction "
        "use_torch_optimizer_for_cpu_offload overlap_cpu_optimizer_d2h_h2d "
        "dump_param_to_param_group_map pin_cpu_grads pin_cpu_params use_precision_aware_optimizer "
        "main_grads_dtype main_params_dtype exp_avg_dtype exp_avg_sq_dtype",
    ),
    # RNG and initialization
    (honoured("seeds the initial weights, by name"), "seed"),
    (apart("random states of dropout, which the layers have no use for"), "te_rng_tracker"),
    (
        apart("the weights are drawn from the seed and a name, alike on all data-parallel ranks"),
        "data_parallel_random_init",
    ),
    (
        refused(
            "low-rank factors have their own initialisation, and full-rank layers a normal one",
            instead="--init-method-std 0.02",
        ),
        "init_method_xavier_uniform",
    ),
    (refused("weights are drawn where they stay"), "init_model_with_meta_device"),
    # checkpointing
    (
        apart("checkpoints, which know the layers by canonical names"),
        "save save_interval save_params_interval save_wgrads_interval save_retain_interval load "
        "load_main_params_from_ckpt non_persistent_save_interval non_persistent_ckpt_type "
        "non_persistent_global_ckpt_dir non_persistent_local_ckpt_dir "
        "non_persistent_local_ckpt_algo finetune pretrained_checkpoint ckpt_step "
        "use_checkpoint_args use_mp_args_from_checkpoint_args "
        "use_tokenizer_model_from_checkpoint_args exit_on_missing_checkpoint ckpt_format "
        "auto_detect_ckpt_format ckpt_convert_format ckpt_convert_save "
        "ckpt_convert_update_legacy_dist_opt_format ckpt_fully_parallel_save async_save "
        "async_strategy use_persistent_ckpt_worker async_ckpt_cpu_priority async_ckpt_io_priority "
        "async_ckpt_use_cpu_shm ckpt_fully_parallel_load ckpt_fully_parallel_load_exchange_algo "
        "ckpt_fully_parallel_save_process_group ckpt_fully_parallel_load_process_group "
        "ckpt_assume_constant_structure ckpt_load_validate_sharding_integrity "
        "strict_fsdp_dtensor_load dist_ckpt_strictness dist_ckpt_save_pre_mcore_014 "
        "dist_ckpt_optim_fully_reshardable distrib_optim_fully_reshardable_mem_efficient "
        "replication replication_jump replication_factor verify_integrity stream_ckpt_dequant "
        "no_save_optim no_save_rng no_load_optim no_load_rng override_ckpt_iteration "
        "use_dist_ckpt_deprecated dist_ckpt_format_deprecated dist_ckpt_workers "
        "ckpt_fully_parallel_save_deprecated",
    ),
    (
        refused("saves inputs and outputs of Megatron's own linear layers"),
        "save_activations_interval save_dgrads_interval",
    ),
    (MOE, "save_tokens_per_expert_interval"),
    # mixed precision
    (
        apart("the loss's and the gradients' precision and scale"),
        "grad_reduce_in_bf16 loss_scale initial_loss_scale min_loss_scale loss_scale_window "
        "hysteresis accumulate_allreduce_grads_in_fp32 fp16_lm_cross_entropy",
    ),
    (
        LOW_PRECISION,
        "reuse_grad_buf_for_mxfp8_param_ag fp8_param_gather fp4_param_gather "
        "te_precision_config_file",
    ),
    # distributed init
    (
        apart("how process groups are made"),
        "distributed_backend distributed_timeout_minutes align_grad_reduce local_rank "
        "lazy_mpu_init nccl_communicator_config_path use_tp_pp_dp_mapping use_gloo_process_groups "
        "use_sharp sharp_enabled_group high_priority_stream_groups "
        "distributed_timeout_seconds_after_init flight_recorder_dump_path "
        "flight_recorder_trace_buffer_size flight_recorder_dump_on_timeout "
        "flight_recorder_include_stack_trace flight_recorder_include_only_active "
        "flight_recorder_extra_dump_on_exec disable_jit_fuser model_parallel_size "
        "fake_process_group",
    ),
    (
        honoured("the layers are counted and placed accordingly"),
        "decoder_first_pipeline_num_layers decoder_last_pipeline_num_layers "
        "num_layers_per_virtual_pipeline_stage num_virtual_stages_per_pipeline_rank",
    ),
    (
        _DATA_PARALLEL,
        "overlap_grad_reduce ddp_num_buckets ddp_bucket_size ddp_pad_buckets_for_high_nccl_busbw "
        "ddp_reduce_scatter_with_fp32_accumulation "
        "ddp_param_name_patterns_for_fp32_local_accumulation ddp_average_in_collective "
        "overlap_param_gather overlap_param_gather_with_optimizer_step align_param_gather "
        "use_distributed_optimizer use_layer_wise_param_layout nccl_ub "
        "disable_symmetric_registration create_all_gather_group gradient_reduce_div_fusion "
        "num_distributed_optimizer_instances",
    ),
    (
        _FSDP,
        "use_megatron_fsdp use_torch_fsdp2 fsdp_manual_registration "
        "data_parallel_sharding_strategy outer_dp_sharding_strategy fsdp_double_buffer "
        "suggested_communication_unit_size keep_fp8_transpose_cache enable_full_sharding_in_hsdp "
        "torch_fsdp2_reshard_after_forward "
        "megatron_fsdp_main_params_dtype megatron_fsdp_main_grads_dtype "
        "megatron_fsdp_grad_comm_dtype megatron_fsdp_enable_fine_grained_param_gather "
        "megatron_fsdp_max_pool_double_buffer fsdp_db_use_persist_buf_on_alloc_fail",
    ),
    # data and dataloader
    (honoured("with BTP a multiple of the tensor-parallel size"), "seq_length"),
    (
        _DATA,
        "data_path phase_transition_iterations split train_data_path valid_data_path "
        "test_data_path data_args_path per_split_data_args_path per_dataset_sequences_path "
        "dataloader_fast_cache_load dataloader_defer_npy_index_mmap data_cache_path mmap_bin_files "
        "mock_data num_workers eod_mask_loss num_dataset_builder_threads object_storage_cache_path "
        "mid_level_dataset_surplus allow_ambiguous_pad_tokens fim_data fim_rate fim_spm_rate "
        "fim_split_sample fim_fragment_rate fim_no_prefix fim_prefix_token fim_middle_token "
        "fim_suffix_token fim_pad_token fim_eod_token",
    ),
    (apart(_OTHER_PROGRAM), "sample_rate mask_prob short_seq_prob"),
    (apart("as in Megatron, positions are read by learned embeddings only"), "reset_position_ids"),
    (
        apart("the mask is the causal one, which core attention has built in"),
        "create_attention_mask_in_dataloader",
    ),
    (
        refused("attention is causal over the whole sequence"),
        "reset_attention_mask dataloader_inter_document_masking",
    ),
    # moe, mla
    (refused(MOE.note, None, 0), "num_experts"),
    (
        refused(MOE.note, None, same_as="tensor_model_parallel_size"),
        "expert_tensor_parallel_size expert_tensor_parallel_num_weight_shards",
    ),
    (
        ATTENTION_VARIANTS,
        "q_lora_rank kv_lora_rank qk_head_dim qk_pos_emb_head_dim v_head_dim cache_mla_latents "
        "mla_down_proj_fusion",
    ),
    # logging, straggler
    (
        apart("logs of any model"),
        "log_interval log_params_norm timing_log_level timing_log_option tensorboard_dir "
        "tensorboard_log_interval tensorboard_queue_size log_timers_to_tensorboard "
        "log_loss_scale_to_tensorboard log_validation_ppl_to_tensorboard log_memory_to_tensorboard "
        "log_memory_interval log_device_memory_used log_num_zeros_in_grad "
        "log_world_size_to_tensorboard wandb_project wandb_exp_name wandb_save_dir wandb_entity "
        "logging_level log_energy "
        "straggler_ctrlr_port straggler_minmax_count disable_straggler_on_startup",
    ),
    (_OWN_FLOPS, "log_throughput log_progress log_straggler"),
    (
        MOE,
        "moe_routing_trace_path moe_routing_trace_max_training_iters "
        "moe_routing_trace_capture_logits moe_routing_trace_capture_hidden_states "
        "moe_routing_trace_dump_weights",
    ),
    # Logits Distillation
    (
        apart("saves what the head gives"),
        "logits_save_top_k logits_save_top_p logits_save_top_p_min_k logits_save_dir "
        "logits_save_dtype",
    ),
    (
        refused("pretrain_gpt.py has no such term in its loss, with any architecture"),
        "logits_load_dir logits_load_decode_threads logits_load_prefetch_factor "
        "logits_load_msc_prefetch_depth logits_load_kd_loss_alpha logits_load_ignore_errors",
    ),
    # inference
    (
        apart("of generation, which pre-training does not do"),
        "inference_batch_times_seqlen_threshold max_tokens_to_oom output_bert_embeddings "
        "bert_embedder_type use_legacy_static_engine inference_max_requests "
        "inference_max_seq_length inference_dynamic_batching "
        "inference_dynamic_batching_buffer_size_gb "
        "inference_dynamic_batching_paused_buffer_size_gb "
        "inference_dynamic_batching_mamba_memory_ratio inference_dynamic_batching_block_size "
        "inference_dynamic_batching_max_requests inference_dynamic_batching_max_tokens "
        "inference_dynamic_batching_num_cuda_graphs "
        "inference_dynamic_batching_track_paused_request_events "
        "inference_dynamic_batching_track_generated_token_events decode_only_cuda_graphs "
        "inference_cuda_graph_all_prefills inference_cuda_graph_max_tokens "
        "inference_dynamic_batching_unified_memory_level enable_chunked_prefill "
        "num_speculative_tokens inference_dynamic_batching_enable_prefix_caching "
        "inference_dynamic_batching_prefix_caching_eviction_policy "
        "inference_dynamic_batching_prefix_caching_coordinator_policy "
        "inference_dynamic_batching_prefix_caching_routing_alpha "
        "inference_dynamic_batching_prefix_caching_mamba_gb "
        "inference_dynamic_batching_cuda_graph_mixed_prefill_count "
        "inference_dynamic_batching_cuda_graph_sizing_distribution "
        "inference_dynamic_batching_sampling_backend offset_sampling_seed_by_dp_rank "
        "inference_dynamic_batching_async_sched_mode inference_dynamic_batching_logprobs_mode "
        "inference_logging_step_interval inference_text_gen_server_logging inference_wandb_logging "
        "inference_coordinator_port mamba_inference_conv_states_dtype "
        "mamba_inference_ssm_states_dtype inference_use_synchronous_zmq_collectives "
        "inference_disable_ep_consensus inference_shards",
    ),
    (CUDA_GRAPHS, "cuda_graph_scope_deprecated"),
    # experimental
    (apart("lifts a lock from experimental features"), "enable_experimental"),
    (conditional("refused: an architecture of BOOST's brings its own spec"), "spec"),
    (RECURRENT, "hybrid_layer_pattern hybrid_override_pattern"),
    (refused("Megatron ignores all other flags beside it"), "yaml_cfg"),
)
"""The other flags by destination, but for those that set a field of `TransformerConfig`."""


def megatron_parser() -> ArgumentParser:
    """Megatron's parser as its training programs have it, without our flags."""
    from megatron.training.arguments import add_megatron_arguments

    return add_megatron_arguments(ArgumentParser(allow_abbrev=False))


def megatron_actions(parser: ArgumentParser) -> dict[str, list[Action]]:
    """A parser's flags by the title of their argument group, in its order."""
    groups = ((group.title, group._group_actions) for group in parser._action_groups)
    return {str(title): list(actions) for title, actions in groups if actions}


def rule_of(destination: str, group: str) -> Rule:
    """The rule of a flag, by its destination and the title of its argument group; `UNKNOWN` for one
    that is not classified."""
    for table, name in ((FLAGS, destination), (TRANSFORMER_FIELDS, destination), (GROUPS, group)):
        if name in table:
            return table[name]
    return UNKNOWN


def refuse_unsupported(
    parser: ArgumentParser, arguments: Namespace, argv: Sequence[str], arch: str
) -> None:
    """Raise ValueError for the first flag that our layers would not honour.

    Flags that are refused in some combination are left to `boost_layers.validation`.

    Args:
        parser: Megatron's, with our flags.
        arguments: what it made of `argv`, before Megatron's validation.
        argv: the command line as typed.
        arch: the architecture, for the message.
    """
    for group, actions in megatron_actions(parser).items():
        for action in actions:
            rule = rule_of(action.dest, group)
            typed = [option for option in action.option_strings if is_given(argv, option)]
            value = _value(action.dest, arguments, argv)
            if group.endswith("(BOOST)") or rule.outcome != "refused":
                continue
            if arguments.use_checkpoint_args and not typed:
                continue  # The checkpoint says what it is.
            default = parser.get_default(action.dest)
            if not rule.accepts(value, default, partial(getattr, arguments)):
                flag = next(iter(typed or action.option_strings))
                raise ValueError(rule.refusal(flag, value, arch))


def _value(destination: str, arguments: Namespace, argv: Sequence[str]) -> Any:
    """A flag's value as Megatron will have it, where that is not what its parser makes of it."""
    if destination in ("hidden_dropout", "attention_dropout"):
        if not is_given(argv, "--" + destination.replace("_", "-")):
            return 0.0
    if destination == "position_embedding_type" and arguments.use_rotary_position_embeddings:
        return "rope"
    return getattr(arguments, destination, None)
