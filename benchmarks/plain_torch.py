"""A LLaMA in plain PyTorch, full-rank or low-rank: what our layers may not be slower than.

Written as one writes it for speed without a framework: `F.linear`, `torch.nn.RMSNorm`,
`F.scaled_dot_product_attention`, `F.cross_entropy`, autograd for all of it, batch first. Parameters
have the canonical names of our models, so that both can hold the same weights.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.variants import Sizes

_ROPE_BASE = 10000.0


class _Linear(nn.Module):
    """y = x·Wᵀ."""

    def __init__(self, width_in: int, width_out: int):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width_out, width_in))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight)


class _LowRank(nn.Module):
    """y = B·SiLU(A·x)."""

    def __init__(self, width_in: int, width_out: int, rank: int):
        super().__init__()
        self.A = nn.Parameter(torch.empty(rank, width_in))
        self.B = nn.Parameter(torch.empty(width_out, rank))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(F.silu(F.linear(x, self.A)), self.B)


def _projection(sizes: Sizes, width_in: int, width_out: int, low_rank: bool) -> nn.Module:
    if low_rank:
        return _LowRank(width_in, width_out, sizes.rank)
    return _Linear(width_in, width_out)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of `[b, h, s, e]`, pairs (i, i + e/2); cos and sin `[s, e/2]`."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


class _Attention(nn.Module):
    def __init__(self, sizes: Sizes, low_rank: bool):
        super().__init__()
        self.heads = sizes.heads
        self.q_proj = _projection(sizes, sizes.hidden, sizes.hidden, low_rank)
        self.k_proj = _projection(sizes, sizes.hidden, sizes.hidden, low_rank)
        self.v_proj = _projection(sizes, sizes.hidden, sizes.hidden, low_rank)
        self.o_proj = _projection(sizes, sizes.hidden, sizes.hidden, low_rank)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        q, k, v = (
            project(x).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for project in (self.q_proj, self.k_proj, self.v_proj)
        )
        q, k = _rotate(q, cos, sin), _rotate(k, cos, sin)
        heads = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        out: Tensor = self.o_proj(heads.transpose(1, 2).flatten(2))
        return out


class _MLP(nn.Module):
    """SiLU(gate)·up where full-rank, gate·up where low-rank."""

    def __init__(self, sizes: Sizes, low_rank: bool):
        super().__init__()
        self.low_rank = low_rank
        self.gate_proj = _projection(sizes, sizes.hidden, sizes.ffn, low_rank)
        self.up_proj = _projection(sizes, sizes.hidden, sizes.ffn, low_rank)
        self.down_proj = _projection(sizes, sizes.ffn, sizes.hidden, low_rank)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_proj(x), self.up_proj(x)
        out: Tensor = self.down_proj((gate if self.low_rank else F.silu(gate)) * up)
        return out


class _Layer(nn.Module):
    def __init__(self, sizes: Sizes, eps: float, low_rank: bool):
        super().__init__()
        self.input_layernorm = nn.RMSNorm(sizes.hidden, eps)
        self.self_attention = _Attention(sizes, low_rank)
        self.pre_mlp_layernorm = nn.RMSNorm(sizes.hidden, eps)
        self.mlp = _MLP(sizes, low_rank)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.self_attention(self.input_layernorm(x), cos, sin)
        return x + self.mlp(self.pre_mlp_layernorm(x))


class _Embedding(nn.Module):
    def __init__(self, sizes: Sizes):
        super().__init__()
        self.word_embeddings = nn.Embedding(sizes.vocabulary, sizes.hidden)


class _Decoder(nn.Module):
    def __init__(self, sizes: Sizes, eps: float, low_rank: bool):
        super().__init__()
        self.layers = nn.ModuleList(_Layer(sizes, eps, low_rank) for _ in range(sizes.layers))
        self.final_layernorm = nn.RMSNorm(sizes.hidden, eps)


class PlainLlama(nn.Module):
    """The model of `sizes` in one process; `low_rank` factorises its projections as CoLA does."""

    cos: Tensor
    sin: Tensor

    def __init__(self, sizes: Sizes, eps: float, *, low_rank: bool):
        super().__init__()
        self.embedding = _Embedding(sizes)
        self.decoder = _Decoder(sizes, eps, low_rank)
        self.output_layer = _Linear(sizes.hidden, sizes.vocabulary)
        head = sizes.hidden // sizes.heads
        frequencies = _ROPE_BASE ** -(torch.arange(0, head, 2) / head)
        angles = torch.outer(torch.arange(sizes.sequence), frequencies)
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        """The mean loss of tokens and labels `[b, s]`."""
        x = self.embedding.word_embeddings(tokens)
        for layer in self.decoder.layers:
            x = layer(x, self.cos, self.sin)
        logits = self.output_layer(self.decoder.final_layernorm(x))
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())
