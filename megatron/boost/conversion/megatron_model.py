"""A converted checkpoint in Megatron's own `GPTModel`, loaded by Megatron's own loader.

For comparing logits: one rank, fp32, on the CPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, distributed

from megatron.boost.cpu import megatron_on_cpu
from megatron.boost.patches import apply_always

if TYPE_CHECKING:
    from megatron.core.models.gpt import GPTModel

    from megatron.boost.conversion.checkpoint_reader import CheckpointReader
    from megatron.boost.conversion.description import ModelDescription


def megatron_logits(
    reader: CheckpointReader, tokens: Tensor, rounded: torch.dtype | None = None
) -> Tensor:
    """Logits `[b, s, vocabulary]` in fp32 of tokens `[b, s]`, by Megatron, of the checkpoint that
    `reader` has found.

    Args:
        reader: the checkpoint.
        tokens: what the model reads.
        rounded: a dtype that the weights are rounded to before they are computed with in fp32.
    """
    with _single_rank(), torch.no_grad():
        from megatron.core import dist_checkpointing

        model = _build(reader.description, own=reader.megatrons_own)
        for parameter in model.parameters():
            # What the checkpoint lacks must show.
            parameter.fill_(torch.nan)
        # Without the optimizer's process groups Megatron cannot tell what is replicated.
        state = model.sharded_state_dict(metadata={"dp_cp_group": _world()})
        loaded = dist_checkpointing.load(state, str(reader.folder))
        model.load_state_dict(
            {name: loaded[name] for name in model.state_dict() if name in loaded}, strict=False
        )
        for parameter in model.parameters() if rounded else ():
            parameter.copy_(parameter.to(rounded))
        model.eval()
        positions = torch.arange(tokens.shape[1]).expand_as(tokens)
        length = tokens.shape[1]
        mask = torch.ones(length, length, dtype=torch.bool).triu(1)[None, None]
        logits: Tensor = model(tokens, positions, mask)
        return logits.float()


@contextmanager
def _single_rank() -> Iterator[None]:
    """Megatron on the CPU with a world of this process alone."""
    with ExitStack() as stack:
        stack.enter_context(megatron_on_cpu())
        stack.enter_context(apply_always())
        from megatron.core import parallel_state, tensor_parallel

        if not distributed.is_initialized():
            store = distributed.HashStore()
            distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
            stack.callback(distributed.destroy_process_group)
        parallel_state.initialize_model_parallel()
        stack.callback(parallel_state.destroy_model_parallel)
        tensor_parallel.model_parallel_cuda_manual_seed(1)
        yield


def _world() -> Any:
    from megatron.core import parallel_state

    return parallel_state.get_data_parallel_group(with_context_parallel=True)


def _build(description: ModelDescription, *, own: bool) -> GPTModel:
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer.transformer_config import TransformerConfig

    from boost_layers.annealing import set_activation_amount
    from boost_layers.specs import low_rank_spec

    rope = description.rope
    config = TransformerConfig(
        num_layers=description.num_layers,
        hidden_size=description.hidden_size,
        ffn_hidden_size=description.ffn_hidden_size,
        num_attention_heads=description.num_heads,
        num_query_groups=description.num_kv_heads,
        kv_channels=description.head_dim,
        layernorm_epsilon=description.norm_eps,
        normalization="RMSNorm",
        add_bias_linear=False,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        gradient_accumulation_fusion=False,
        persist_layer_norm=False,
        masked_softmax_fusion=False,
        bias_activation_fusion=False,
        perform_initialization=False,
    )
    spec = (
        get_gpt_layer_local_spec(normalization="RMSNorm")
        if own
        else low_rank_spec(config, description.low_rank)
    )
    model = GPTModel(
        config,
        spec,
        vocab_size=description.vocab_size,
        max_sequence_length=description.max_positions,
        share_embeddings_and_output_weights=description.tied,
        position_embedding_type="rope",
        rotary_base=int(rope.theta),
        rope_scaling=rope.kind == "llama3",
        rope_scaling_factor=rope.factor,
        seq_len_interpolation_factor=rope.factor if rope.kind == "linear" else None,
    )
    set_activation_amount([model], description.activation_amount)
    return model
