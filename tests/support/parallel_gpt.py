"""A `GPTModel` with our layers on this rank, filled with whole canonical tensors, and back.

Runs on a rank that `run_ranks` started. Everything is in one dtype, fp64 unless said otherwise:
Megatron's cross-entropy and RoPE's frequencies, which are in fp32 elsewhere, are in fp64 then.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
from torch import Tensor, distributed, nn

from boost_layers.config import LowRankConfig
from megatron.boost.cpu import megatron_on_cpu
from megatron.boost.recipes.meta_rank import canonical_name
from tests.support.plain_llama import PlainConfig


@dataclass(frozen=True, kw_only=True)
class Case:
    """One model and its layout."""

    plain: PlainConfig
    low_rank: LowRankConfig
    tp: int = 1
    sequence_parallel: bool | None = None
    """None: what the strategy needs."""
    dtype: torch.dtype = torch.float64
    padded_vocab: int | None = None
    fused_embedding: bool = False
    """Whether the embedding gives BTP layers their share of hidden at once."""
    device: str = "cpu"
    """"cuda": this rank's current CUDA device, with the world made over NCCL."""
    transformer: Mapping[str, Any] = field(default_factory=dict)
    """More fields of `TransformerConfig`."""
    gpt: Mapping[str, Any] = field(default_factory=dict)
    """More arguments of `GPTModel`."""
    activation_amount: float | None = None
    """How much of φ is applied; None: what the layers begin with."""


@contextmanager
def tensor_parallel_state(tp: int, device: str = "cpu") -> Iterator[None]:
    """Megatron with process groups of `tp` ranks. Inside another one it does nothing, so that
    several models can share the groups, whose making takes longer than a tiny model's step.
    """
    from megatron.core import parallel_state

    with megatron_on_cpu() if device == "cpu" else nullcontext():
        if parallel_state.model_parallel_is_initialized():
            assert parallel_state.get_tensor_model_parallel_world_size() == tp
            yield
            return
        parallel_state.initialize_model_parallel(tensor_model_parallel_size=tp)
        try:
            yield
        finally:
            parallel_state.destroy_model_parallel()


@contextmanager
def parallel_gpt(case: Case, tensors: Mapping[str, Tensor] | None = None) -> Iterator[nn.Module]:
    """The model of `case` on this rank, with Megatron's parallel state around it."""
    from megatron.core import tensor_parallel

    with tensor_parallel_state(case.tp, case.device), _cross_entropy_in(case.dtype):
        tensor_parallel.model_parallel_cuda_manual_seed(123)
        model = _build(case)
        if tensors is not None:
            load_canonical(model, tensors)
        yield model


def _cross_entropy_in(dtype: torch.dtype) -> AbstractContextManager[Any]:
    """Megatron's cross-entropy, which casts any logits to fp32, left as it is but for fp64."""
    from megatron.core.tensor_parallel.cross_entropy import VocabParallelCrossEntropy

    if dtype != torch.float64:
        return nullcontext()
    return mock.patch.object(
        VocabParallelCrossEntropy,
        "calculate_logits_max",
        staticmethod(lambda logits: (logits.clone(), logits.max(dim=-1)[0])),
    )


def transformer_config(case: Case) -> Any:
    """Megatron's configuration of the case's model."""
    from megatron.core.transformer.transformer_config import TransformerConfig

    plain, low_rank = case.plain, case.low_rank
    sequence_parallel = case.sequence_parallel
    if sequence_parallel is None:
        sequence_parallel = case.tp > 1 and low_rank.low_rank and low_rank.tp == "btp"
    return TransformerConfig(
        num_layers=plain.layers,
        hidden_size=plain.hidden,
        ffn_hidden_size=plain.ffn,
        num_attention_heads=plain.heads,
        num_query_groups=plain.kv_heads,
        kv_channels=plain.head_dim,
        layernorm_epsilon=plain.norm_eps,
        normalization="RMSNorm",
        add_bias_linear=False,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        tensor_model_parallel_size=case.tp,
        sequence_parallel=sequence_parallel,
        gradient_accumulation_fusion=False,
        bf16=case.dtype == torch.bfloat16,
        params_dtype=case.dtype,
        pipeline_dtype=case.dtype,
        **case.transformer,
    )


def _build(case: Case) -> nn.Module:
    from megatron.core.models.gpt import GPTModel
    from megatron.core.process_groups_config import ProcessGroupCollection

    from boost_layers.annealing import set_activation_amount
    from boost_layers.embedding import fuse_embedding_border
    from boost_layers.specs import low_rank_spec
    from boost_layers.vocabulary import mask_padded_vocabulary

    plain = case.plain
    config = transformer_config(case)
    model = GPTModel(
        config,
        low_rank_spec(config, case.low_rank),
        vocab_size=case.padded_vocab or plain.vocab_size,
        max_sequence_length=4096,
        share_embeddings_and_output_weights=plain.tied,
        position_embedding_type="rope",
        rotary_base=plain.rope_base,
        rope_scaling=plain.rope_scaling is not None,
        rope_scaling_factor=plain.rope_scaling.factor if plain.rope_scaling else 1.0,
        **case.gpt,
    ).to(case.device, case.dtype)
    rope = model.rotary_pos_emb
    if case.dtype == torch.float64 and plain.rope_scaling is None:
        exponent = torch.arange(0, plain.head_dim, 2, dtype=case.dtype) / plain.head_dim
        rope.inv_freq = 1.0 / plain.rope_base**exponent
    group = ProcessGroupCollection.use_mpu_process_groups(["tp"]).tp
    mask_padded_vocabulary(model, plain.vocab_size, group)
    if case.fused_embedding:
        fuse_embedding_border(model)
    if case.activation_amount is not None:
        set_activation_amount([model], case.activation_amount)
    return model


@torch.no_grad()
def load_canonical(model: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Copy each parameter's shard of the whole tensors in; vocabulary rows beyond them are junk,
    so that a loss that read them would show.
    """
    for name, parameter in model.named_parameters():
        whole = tensors[canonical_name(model, name)].to(parameter.dtype)
        parameter.copy_(_shard(parameter, whole))


def _shard(parameter: Tensor, whole: Tensor) -> Tensor:
    if not getattr(parameter, "tensor_model_parallel", False):
        return whole
    size, rank = _tp()
    axis = parameter.partition_dim
    missing = parameter.shape[axis] * size - whole.shape[axis]
    if missing:
        assert axis == 0
        whole = torch.cat([whole, torch.full_like(whole[:1], 3.0).expand(missing, -1)])
    return whole.chunk(size, dim=axis)[rank]


def gather_canonical(
    model: nn.Module, values: Mapping[str, Tensor], vocab_size: int
) -> dict[str, Tensor]:
    """Whole tensors by canonical name from this rank's shards `values`, by parameter name (of the
    parameters themselves, or of their gradients). Padded vocabulary rows are cut off.
    """
    parameters = dict(model.named_parameters())
    whole = {}
    for name, value in values.items():
        parameter = parameters[name]
        if getattr(parameter, "tensor_model_parallel", False):
            size, _ = _tp()
            parts = [torch.empty_like(value) for _ in range(size)]
            distributed.all_gather(parts, value.contiguous(), group=_group())
            value = torch.cat(parts, dim=parameter.partition_dim)
        elif getattr(parameter, "sequence_parallel", False):
            value = value.clone()
        canonical = canonical_name(model, name)
        if canonical.endswith(("word_embeddings.weight", "output_layer.weight")):
            value = value[:vocab_size]
        whole[canonical] = value.detach().clone()
    return whole


def _group() -> Any:
    from megatron.core import parallel_state

    return parallel_state.get_tensor_model_parallel_group()


def _tp() -> tuple[int, int]:
    group = _group()
    return group.size(), group.rank()


def loss_and_gradients(
    case: Case, tensors: Mapping[str, Tensor], tokens: Tensor, labels: Tensor
) -> dict[str, Any]:
    """One forward and backward on this rank: `loss` `[b, s]`, whole `logits` `[b, s, V]` and whole
    `gradients` by canonical name, of the mean loss.
    """
    from megatron.core.tensor_parallel import gather_from_tensor_model_parallel_region

    with parallel_gpt(case, tensors) as model:
        tokens, labels = tokens.to(case.device), labels.to(case.device)
        positions = torch.arange(tokens.shape[1], device=case.device).expand_as(tokens)
        with torch.no_grad():
            logits = gather_from_tensor_model_parallel_region(model(tokens, positions, None))
        loss = model(tokens, positions, None, labels=labels)
        loss.mean().backward()
        gradients = {}
        for name, parameter in model.named_parameters():
            gradient = parameter.grad
            if getattr(parameter, "sequence_parallel", False):
                distributed.all_reduce(gradient, group=_group())
            gradients[name] = gradient
        return {
            "loss": loss.detach().cpu(),
            "logits": logits[..., : case.plain.vocab_size].cpu(),
            "gradients": {
                name: gradient.cpu()
                for name, gradient in gather_canonical(
                    model, gradients, case.plain.vocab_size
                ).items()
            },
        }
