"""The model's two ends, which stay Megatron's: their initial weights and the padded vocabulary.

Megatron pads the vocabulary so that TP divides it. The padded rows must neither change a loss nor
receive a gradient, and the weights of the true rows must not depend on the padding.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from megatron.core.transformer.transformer_config import TransformerConfig

from boost_layers.initialization import draw_normal, shard_of

if TYPE_CHECKING:
    import torch.distributed as dist
    from megatron.core.models.gpt import GPTModel
    from torch import Tensor


def mask_padded_vocabulary(model: GPTModel, vocab_size: int, tp_group: dist.ProcessGroup) -> None:
    """Make the head of `model`, if this stage has one, give the padded tokens no probability.

    The logits `[s, b, V/T]` (or gathered, `[s, b, V]`) of tokens from `vocab_size` on become the
    lowest finite number, so that the softmax gives them exactly zero.
    """
    if not model.post_process or model.vocab_size == vocab_size:
        return
    if vocab_size > model.vocab_size:
        raise ValueError(f"vocabulary of {vocab_size} tokens in a model of {model.vocab_size} rows")
    width = model.vocab_size // tp_group.size()
    local_rows = min(max(vocab_size - tp_group.rank() * width, 0), width)
    padded_size = model.vocab_size

    def mask(_: Any, __: Any, output: tuple[Tensor, Any]) -> tuple[Tensor, Any]:
        logits, bias = output
        true_rows = vocab_size if logits.shape[-1] == padded_size else local_rows
        if true_rows < logits.shape[-1]:
            logits[..., true_rows:] = torch.finfo(logits.dtype).min
        return logits, bias

    model.output_layer.register_forward_hook(mask)


@torch.no_grad()
def initialize_vocabulary(
    model: GPTModel,
    config: TransformerConfig,
    vocab_size: int,
    seed: int,
    tp_group: dist.ProcessGroup,
) -> None:
    """Draw the embedding and the head, where this stage has them, as N(0, std²) by canonical name,
    with std = embedding_init_method_std (by default init_method_std) and init_method_std; padded
    rows are zero. A tied head on a later stage gets the embedding's rows."""
    weights = []
    embedding, head = "embedding.word_embeddings.weight", "output_layer.weight"
    if model.pre_process:
        weights.append((embedding, model.embedding.word_embeddings.weight))
    if model.post_process and not model.share_embeddings_and_output_weights:
        weights.append((head, model.output_layer.weight))
    elif model.post_process and not model.pre_process:
        weights.append((embedding, model.output_layer.weight))
    for name, weight in weights:
        std = config.init_method_std if name == head else config.embedding_init_method_std
        rows = draw_normal((vocab_size, config.hidden_size), std, seed, name, weight.device)
        whole = rows.new_zeros(weight.shape[0] * tp_group.size(), config.hidden_size)
        whole[:vocab_size] = rows
        weight.copy_(shard_of(whole, 0, tp_group.rank(), tp_group.size()))
