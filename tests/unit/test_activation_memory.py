"""What a BTP layer keeps for its backward, to the byte: on one rank, in fp32."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from boost_layers.config import LowRankConfig
from tests.support.single_layer import llama_config, single_layer

S, B, D, F, HEADS, HEAD, R = 10, 3, 64, 96, 8, 8, 16
BTP = LowRankConfig(arch="cola", rank=R)


def layer(low_rank: LowRankConfig, kv_heads: int) -> nn.Module:
    config = llama_config(
        hidden_size=D,
        ffn_hidden_size=F,
        num_attention_heads=HEADS,
        num_query_groups=kv_heads,
        kv_channels=HEAD,
    )
    return single_layer(low_rank, config)


def kept(module: nn.Module, x: Tensor, rope: Tensor) -> list[Tensor]:
    """The tensors that the graph of `module(x)` holds, one for each piece of memory; parameters,
    which live anyway, are left out."""
    own = {p.untyped_storage().data_ptr() for p in module.parameters()}
    found: dict[int, Tensor] = {}

    def pack(tensor: Tensor) -> Tensor:
        address = tensor.untyped_storage().data_ptr()
        if address not in own:
            found.setdefault(address, tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        module(x, rotary_pos_emb=rope)
    return list(found.values())


def inputs() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(S, B, D, generator=generator).requires_grad_()
    return x, torch.randn(S, 1, 1, HEAD, generator=generator)


@pytest.mark.parametrize("kv_heads", [8, 2])
@pytest.mark.parametrize(
    "low_rank",
    [
        BTP,
        replace(BTP, grouping=False),
        replace(BTP, norm="sync"),
        replace(BTP, act="identity"),
        replace(BTP, mlp="swiglu"),
    ],
    ids=["grouped", "ungrouped", "sync", "identity", "swiglu"],
)
def test_a_btp_layer_keeps_exactly_this(low_rank: LowRankConfig, kv_heads: int) -> None:
    """No φ(u), no normalised input, no folded γ∘A, and no more of a batched result than is read
    again."""
    tensors = kept(layer(low_rank, kv_heads), *inputs())
    n, q, kv = S * B, HEADS * HEAD, kv_heads * HEAD
    numbers = {
        "residual inputs": 2 * n * D,
        "latents": 7 * n * R,
        "rho": 2 * n,
        "q, k, v": n * (q + 2 * kv),
        "attention": n * q,
        "log-sum-exp": n * HEADS,
        "cosine and sine": 2 * S * HEAD,
        "gate, up, product": 3 * n * F,
    }
    assert sum(t.untyped_storage().nbytes() for t in tensors) == 4 * sum(numbers.values())


@pytest.mark.parametrize("kv_heads", [8, 2])
@pytest.mark.parametrize("residual", [False, True], ids=["kept", "made again"])
def test_latent_checkpointing_keeps_latents_residual_inputs_and_rho(
    residual: bool, kv_heads: int
) -> None:
    low_rank = replace(BTP, recompute=True, recompute_residual=residual)
    tensors = kept(layer(low_rank, kv_heads), *inputs())
    n = S * B
    numbers = (1 if residual else 2) * n * D + 7 * n * R + 2 * n
    assert sum(t.untyped_storage().nbytes() for t in tensors) == 4 * numbers


def test_the_activated_latent_is_not_kept() -> None:
    tensors = kept(layer(BTP, 8), *inputs())
    latents = [t for t in tensors if t.shape[-1] in (R, 2 * R, 3 * R)]
    assert sum(t.shape[-1] for t in latents) == 7 * R
    for latent in latents:
        activated = torch.nn.functional.silu(latent)
        for tensor in tensors:
            same_size = tensor.numel() == activated.numel()
            assert not (same_size and torch.equal(tensor.reshape(-1), activated.reshape(-1)))


def test_the_test_would_see_a_kept_activation() -> None:
    """The count includes what an ordinary low-rank pair keeps on top: φ(u), or z in place of u."""
    a, b = nn.Linear(D, R, bias=False), nn.Linear(R, D, bias=False)

    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = a, b

        def forward(self, x: Tensor, **_: Any) -> Tensor:
            return self.b(nn.functional.silu(self.a(x)))

    tensors = kept(Pair(), *inputs())
    assert sum(t.numel() for t in tensors) == S * B * (D + 2 * R)
