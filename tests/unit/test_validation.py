"""Sizes and features that the layers cannot run are refused by name, with a value that they can."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from megatron.core.transformer.enums import AttnBackend
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.utils import init_method_normal

from boost_layers.config import LowRankConfig
from boost_layers.specs import core_attention_class
from boost_layers.validation import (
    ModelSizes,
    nearest_multiple,
    validate_features,
    validate_model,
    validate_sizes,
)
from tests.support.single_layer import llama_config, single_layer

BTP = LowRankConfig(arch="cola", rank=16)
VANILLA = replace(BTP, tp="vanilla")
DENSE = LowRankConfig(arch="dense")
SIZES = ModelSizes(
    hidden_size=48,
    ffn_hidden_size=96,
    num_attention_heads=12,
    num_query_groups=4,
    tensor_parallel=4,
    num_layers=4,
    seq_length=32,
)
FIELD_OF_FLAG = {
    "--hidden-size": "hidden_size",
    "--ffn-hidden-size": "ffn_hidden_size",
    "--num-attention-heads": "num_attention_heads",
    "--num-query-groups": "num_query_groups",
    "--seq-length": "seq_length",
    "--low-rank-rank": "rank",
    "--low-rank-attn-rank": "attn_rank",
    "--low-rank-mlp-rank": "mlp_rank",
}


HEADS = {"num_attention_heads", "num_query_groups"}


def refusal(low_rank: LowRankConfig, sizes: ModelSizes) -> str | None:
    try:
        validate_sizes(low_rank, sizes)
    except ValueError as error:
        return str(error)
    return None


def named(message: str) -> tuple[str, str, int]:
    """The flag that a message names, its value, and the nearest legal value with its field."""
    found = re.fullmatch(
        r"(--[a-z-]+) (\S+)(?: \(rank \d+\))?: .*; nearest legal value: (?:(--[a-z-]+) )?(\d+)",
        message,
    )
    assert found, message
    return FIELD_OF_FLAG[found[3] or found[1]], found[2], int(found[4])


def with_field(
    low_rank: LowRankConfig, sizes: ModelSizes, name: str, value: int
) -> tuple[LowRankConfig, ModelSizes]:
    if name in LowRankConfig.__dataclass_fields__:
        return replace(low_rank, **{name: value}), sizes
    if name == "num_attention_heads" and sizes.num_query_groups == sizes.num_attention_heads:
        # Without grouped queries there are as many KV heads as heads.
        return low_rank, replace(sizes, num_attention_heads=value, num_query_groups=value)
    return low_rank, replace(sizes, **{name: value})


def test_nearest_multiple() -> None:
    for of in range(1, 9):
        multiples = range(of, 20 * of, of)
        for value in range(0, 10 * of):
            nearest = nearest_multiple(value, of)
            assert nearest in multiples
            assert abs(nearest - value) == min(abs(m - value) for m in multiples)


def one_wrong() -> Iterator[tuple[LowRankConfig, ModelSizes, str]]:
    """Legal models, with one number changed to each of a range of values."""
    plain_attention = replace(SIZES, num_query_groups=12)
    for low_rank in (BTP, VANILLA, DENSE):
        for sizes in (SIZES, plain_attention, replace(SIZES, tensor_parallel=2)):
            for field, values in (
                ("hidden_size", range(16, 70)),
                ("ffn_hidden_size", range(16, 70)),
                ("num_attention_heads", range(1, 30)),
                ("num_query_groups", range(0, 14)),
                ("seq_length", range(1, 20)),
                ("rank", range(1, 60)),
                ("attn_rank", range(1, 60)),
                ("mlp_rank", range(1, 60)),
            ):
                for value in values:
                    yield *with_field(low_rank, sizes, field, value), field


def test_the_nearest_legal_value_is_accepted_and_nothing_legal_is_nearer() -> None:
    refused = 0
    for low_rank, sizes, field in one_wrong():
        message = refusal(low_rank, sizes)
        if message is None:
            continue
        refused += 1
        flagged, value, nearest = named(message)
        # Of heads and KV heads that are at odds either may be named.
        assert flagged == field or {flagged, field} == HEADS, message
        field = flagged
        settings = low_rank if hasattr(low_rank, field) else sizes
        assert value == str(getattr(settings, field))
        assert refusal(*with_field(low_rank, sizes, field, nearest)) is None, message
        distance = abs(nearest - int(value))
        for nearer in range(max(1, int(value) - distance + 1), int(value) + distance):
            assert refusal(*with_field(low_rank, sizes, field, nearer)) is not None, message
    assert refused > 300


def test_several_wrong_sizes_are_mended_one_by_one() -> None:
    """Whatever the sizes, following the messages ends in a model that is accepted."""
    for low_rank, tp, heads, groups, hidden in itertools.product(
        (BTP, replace(VANILLA, rank=9), replace(BTP, rank=None, ratio=0.9)),
        (1, 2, 3, 4),
        (3, 6, 10, 20),
        (1, 3, 4, 5, 20),
        (20, 33),
    ):
        sizes = ModelSizes(
            hidden_size=hidden,
            ffn_hidden_size=hidden - 3,
            num_attention_heads=heads,
            num_query_groups=groups,
            tensor_parallel=tp,
            num_layers=2,
            seq_length=17,
        )
        mended = set()
        settings = low_rank, sizes
        while (message := refusal(*settings)) is not None:
            field, _, nearest = named(message)
            assert field not in mended, message
            mended.add(field)
            settings = with_field(*settings, field, nearest)


@pytest.mark.parametrize(
    ("low_rank", "sizes", "message"),
    [
        (
            BTP,
            replace(SIZES, hidden_size=50),
            "--hidden-size 50: is split over --tensor-model-parallel-size 4; "
            "nearest legal value: 52",
        ),
        (
            BTP,
            replace(SIZES, num_query_groups=3),
            "--num-query-groups 3: must divide --num-attention-heads 12 and are split over "
            "--tensor-model-parallel-size 4; nearest legal value: 4",
        ),
        (
            replace(VANILLA, rank=None, ratio=0.3),
            SIZES,
            "--low-rank-ratio 0.3 (rank 14): vanilla tensor parallelism splits the rank over "
            "--tensor-model-parallel-size 4; nearest legal value: --low-rank-rank 16",
        ),
        (
            replace(BTP, rank=None, ratio=1.0),
            replace(SIZES, ffn_hidden_size=40),
            "--low-rank-ratio 1.0 (rank 48): larger than the gate_proj's smaller side; "
            "nearest legal value: --low-rank-rank 40",
        ),
    ],
)
def test_messages(low_rank: LowRankConfig, sizes: ModelSizes, message: str) -> None:
    assert refusal(low_rank, sizes) == message


def test_only_btp_splits_the_sequence_and_only_vanilla_the_rank() -> None:
    odd_sequence = replace(SIZES, seq_length=33)
    assert refusal(VANILLA, odd_sequence) is None and refusal(DENSE, odd_sequence) is None
    assert "--seq-length" in str(refusal(BTP, odd_sequence))
    assert refusal(BTP, replace(SIZES, seq_length=None)) is None
    odd_rank = {"rank": 15}
    assert refusal(replace(BTP, **odd_rank), SIZES) is None
    assert "--low-rank-rank" in str(refusal(replace(VANILLA, **odd_rank), SIZES))


def transformer(**changes: Any) -> TransformerConfig:
    """A LLaMA that the layers can run on two ranks. Changes are made after Megatron's own checks,
    some of which refuse what needs other software."""
    config = llama_config(tensor_model_parallel_size=2, sequence_parallel=True)
    for name, value in changes.items():
        assert hasattr(config, name)
        setattr(config, name, value)
    return config


FEATURES: list[tuple[dict[str, Any], str]] = [
    ({"add_bias_linear": True}, "--add-bias-linear"),
    ({"add_qkv_bias": True}, "--add-qkv-bias"),
    ({"normalization": "LayerNorm"}, "--normalization LayerNorm"),
    ({"gated_linear_unit": False}, "an MLP without a gate"),
    ({"activation_func": F.gelu}, "activation that is not SiLU"),
    ({"activation_func_clamp_value": 7.0}, "--activation-func-clamp-value"),
    ({"glu_linear_offset": 1.0}, "--glu-linear-offset 1.0"),
    ({"layernorm_zero_centered_gamma": True}, "--apply-layernorm-1p"),
    ({"qk_layernorm": True}, "--qk-layernorm"),
    ({"qk_l2_norm": True}, "--qk-l2-norm"),
    (
        {"apply_residual_connection_post_layernorm": True},
        "--apply-residual-connection-post-layernorm",
    ),
    ({"use_mup": True}, "--use-mup"),
    ({"heterogeneous_block_specs": True}, "--heterogeneous-layers-config-path"),
    ({"multi_latent_attention": True}, "--multi-latent-attention"),
    ({"num_moe_experts": 4}, "--num-experts"),
    ({"mtp_num_layers": 1}, "--mtp-num-layers"),
    ({"context_parallel_size": 2}, "--context-parallel-size"),
    ({"hidden_dropout": 0.1}, "--hidden-dropout 0.1"),
    ({"attention_dropout": 0.2}, "--attention-dropout 0.2"),
    ({"window_size": (4, 0)}, "--window-size"),
    ({"softmax_type": "learnable"}, "--softmax-type learnable"),
    ({"attention_output_gate": True}, "--attention-output-gate"),
    ({"no_rope_freq": 4}, "--no-rope-freq"),
    ({"experimental_attention_variant": "dsa"}, "--experimental-attention-variant"),
    ({"fp8": "e4m3"}, "--fp8-format"),
    ({"fp4": "e2m1"}, "--fp4-format"),
    ({"fp32_residual_connection": True}, "--fp32-residual-connection"),
    ({"cpu_offloading": True}, "--cpu-offloading-num-layers"),
    ({"cuda_graph_impl": "local"}, "--cuda-graph-impl local"),
    ({"apply_query_key_layer_scaling": True}, "--apply-query-key-layer-scaling"),
    (
        {"recompute_granularity": "selective", "recompute_modules": ["core_attn", "mlp"]},
        "--recompute-modules core_attn mlp",
    ),
    (
        {"recompute_granularity": "full", "distribute_saved_activations": True},
        "--distribute-saved-activations with --sequence-parallel",
    ),
    ({"attention_backend": AttnBackend.flash}, "--attention-backend flash with --core-attention"),
    ({"flash_attention_version": 3}, "--flash-attention-version 3"),
    ({"init_method": torch.nn.init.xavier_uniform_}, "an init_method other than N(0, "),
    ({"init_method_std": 0.5}, "an init_method other than N(0, init_method_std²)"),
    ({"output_layer_init_method": init_method_normal(0.02)}, "an init_method other than N(0, "),
    ({"delay_wgrad_compute": True}, "--delay-wgrad-compute"),
    ({"tp_comm_overlap": True}, "--tp-comm-overlap"),
    ({"gtp_weight_remat_size": 2}, "--gtp-weight-remat-size 2"),
    ({"fine_grained_activation_offloading": True}, "--fine-grained-activation-offloading"),
    ({"batch_invariant_mode": True}, "--batch-invariant-mode"),
    ({"qk_clip": True}, "--qk-clip"),
    ({"log_max_attention_logit": True}, "--log-max-attention-logit"),
    ({"fused_residual_rmsnorm": True}, "--fused-residual-rmsnorm"),
    ({"mlp_chunks_for_training": 2}, "--mlp-chunks-for-training 2"),
    ({"enable_autocast": True}, "--enable-autocast"),
    ({"use_kitchen": True}, "--use-kitchen"),
    ({"sequence_parallel": False}, "BTP without sequence-parallel borders"),
]


@pytest.mark.parametrize(("changes", "named_as"), FEATURES)
def test_a_feature_that_a_layer_has_not_is_refused_by_name(
    changes: dict[str, Any], named_as: str
) -> None:
    with pytest.raises(ValueError, match="nearest legal value: ") as caught:
        validate_features(BTP, transformer(**changes))
    assert named_as in str(caught.value)


def test_the_same_model_without_any_of_them_is_accepted() -> None:
    validate_model(BTP, transformer())
    validate_model(
        BTP, transformer(recompute_granularity="selective", recompute_modules=["core_attn"])
    )
    validate_model(BTP, transformer(recompute_granularity="full", recompute_modules=["mlp"]))
    validate_model(VANILLA, transformer(sequence_parallel=False))
    validate_model(DENSE, transformer())
    validate_model(DENSE, transformer(sequence_parallel=False))
    validate_model(BTP, transformer(sequence_parallel=False, tensor_model_parallel_size=1))


def test_latents_that_cross_over_are_not_distributed_over_ranks() -> None:
    lax = LowRankConfig(arch="lax", rank=16, tp="vanilla")
    distributed = {"recompute_granularity": "full", "distribute_saved_activations": True}
    validate_features(VANILLA, transformer(sequence_parallel=False, **distributed))
    with pytest.raises(ValueError, match="^--distribute-saved-activations: not supported by"):
        validate_features(lax, transformer(sequence_parallel=False, **distributed))


def test_vanilla_refuses_sequence_parallelism() -> None:
    with pytest.raises(ValueError, match="--sequence-parallel .*nearest legal value: leave it out"):
        validate_features(VANILLA, transformer())


def test_megatrons_own_architecture_has_no_spec() -> None:
    with pytest.raises(ValueError, match="--low-rank-arch none"):
        validate_model(LowRankConfig(), transformer())


def test_sizes_of_a_transformer_are_checked_too() -> None:
    with pytest.raises(ValueError, match="--ffn-hidden-size 25: .*nearest legal value: 26"):
        validate_model(BTP, transformer(ffn_hidden_size=25))


def test_core_attentions_that_cannot_run_are_refused() -> None:
    replicated = replace(VANILLA, vanilla_attention="replicated")
    for choice in ("te", "local"):
        config = replace(replicated, core_attention=choice)
        with pytest.raises(ValueError, match=f"--core-attention {choice}: .*legal value: sdpa"):
            core_attention_class(config)
    for settings in (replicated, replace(replicated, core_attention="sdpa")):
        core_attention_class(settings)


def combinations() -> Iterator[LowRankConfig]:
    for act, mlp, norm, grouping, core in itertools.product(
        ("auto", "silu", "gelu", "identity"),
        ("auto", "swiglu", "product"),
        ("online", "sync"),
        (True, False),
        ("auto", "sdpa", "local"),
    ):
        cola = replace(BTP, act=act, mlp=mlp, norm=norm, grouping=grouping, core_attention=core)
        yield cola
        yield replace(cola, tp="vanilla")
        if core != "local":
            yield replace(cola, tp="vanilla", vanilla_attention="replicated")
    for core in ("auto", "sdpa", "local"):
        yield replace(DENSE, core_attention=core)


def test_every_accepted_combination_builds_and_runs() -> None:
    config = llama_config()
    x = torch.randn(3, 2, 16, generator=torch.Generator().manual_seed(1))
    outputs: dict[tuple[str, str, str], torch.Tensor] = {}
    for low_rank in combinations():
        validate_model(low_rank, config)
        layer = single_layer(low_rank, config)
        if low_rank.core_attention == "local":
            continue  # Megatron's runs in its parallel state only: see the parity tests
        y, _ = layer(x.clone().requires_grad_())
        y.sum().backward()
        assert all(p.grad is not None and p.grad.isfinite().all() for p in layer.parameters())
        # What does not change the function must not change the output.
        function = (low_rank.arch, low_rank.activation, low_rank.mlp_kind)
        torch.testing.assert_close(y, outputs.setdefault(function, y), rtol=1e-5, atol=1e-6)
    assert len(outputs) == 3 * 2 + 1
    different = itertools.combinations(outputs.values(), 2)
    assert not any(torch.allclose(one, other, rtol=1e-3) for one, other in different)
