"""The first border of BTP layers, fused: from the vocabulary-parallel embedding straight to hidden.

Megatron's embedding ends in a reduce-scatter along the sequence, and the first layer would turn the
result into a share of hidden by an all-to-all. One reduce-scatter along hidden gives the same.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch.nn.functional as F
from megatron.core.tensor_parallel.layers import VocabParallelEmbedding
from torch import Tensor

from boost_layers.mappings import reduce_scatter_hidden

if TYPE_CHECKING:
    from megatron.core.models.gpt import GPTModel


class HiddenShardedEmbedding(VocabParallelEmbedding):
    """A vocabulary-parallel embedding whose output is sharded along hidden."""

    @classmethod
    def adopting(cls, embedding: VocabParallelEmbedding) -> HiddenShardedEmbedding:
        """One with all that `embedding` has, its weight included."""
        adopted = cls.__new__(cls)
        adopted.__dict__ = embedding.__dict__
        return adopted

    def forward(self, input_: Tensor) -> Tensor:
        """Token ids `[b, s]` → `[s, b, d/T]` viewed as `[s/T, b, d]`.

        Forward: one reduce-scatter of `[s, b, d]` along hidden. Backward: one all-gather of
        `[s, b, d/T]`; the weight's gradient `[V/T, d]` is local.
        """
        outside = (input_ < self.vocab_start_index) | (input_ >= self.vocab_end_index)
        local = (input_ - self.vocab_start_index).masked_fill(outside, 0)
        partial = self.weight[local] if self.deterministic_mode else F.embedding(local, self.weight)
        partial = partial.masked_fill(outside.unsqueeze(-1), 0.0).transpose(0, 1)
        x = reduce_scatter_hidden(partial, self.tp_group)
        size = self.tp_group.size()
        return x.view(x.shape[0] // size, x.shape[1], x.shape[2] * size)


def fuse_embedding_border(model: GPTModel) -> None:
    """Fuse the border of a model with BTP layers, if this pipeline stage has the embedding and the
    first layer; call it after the model is built and before it is wrapped for data parallelism.

    A model without that border is left as it is.
    """
    layers = model.decoder.layers
    if not model.pre_process or not len(layers) or layers[0].layer_number != 1:
        return
    words = model.embedding.word_embeddings
    if words.tp_group.size() == 1 or not layers[0].enters_by_sequence:
        return
    assert words.reduce_scatter_embeddings, "BTP layers are built with sequence parallelism"
    model.embedding.word_embeddings = HiddenShardedEmbedding.adopting(words)
    layers[0].enters_by_sequence = False
