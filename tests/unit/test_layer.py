"""A layer by itself, on one rank: sizes at the edge, and what it refuses at run time."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from boost_layers.attention import SdpaCoreAttention
from boost_layers.config import LowRankConfig
from tests.support.plain_llama import PlainConfig, PlainLlama, random_canonical, rope_tables
from tests.support.single_layer import llama_config, single_layer

PLAIN = PlainConfig(
    vocab_size=8,
    hidden=16,
    ffn=24,
    heads=4,
    kv_heads=4,
    head_dim=4,
    layers=1,
    arch="cola",
    rank=1,
    mlp_rank=5,
    mlp="product",
)
STRATEGIES = {
    "btp": LowRankConfig(arch="cola", attn_rank=1, mlp_rank=5),
    "ungrouped": LowRankConfig(arch="cola", attn_rank=1, mlp_rank=5, grouping=False),
    "vanilla": LowRankConfig(arch="cola", attn_rank=1, mlp_rank=5, tp="vanilla"),
}


def pair(low_rank: LowRankConfig) -> tuple[nn.Module, nn.Module]:
    """Our layer and the plain one, in fp64 with the same weights; attention's rank is 1."""
    tensors = random_canonical(PLAIN, seed=2)
    plain = PlainLlama(PLAIN).load_canonical(tensors).decoder.layers[0]
    ours = single_layer(low_rank, llama_config()).double()
    ours.load_state_dict(plain.state_dict())
    return ours, plain


def angles(length: int) -> Tensor:
    cos, sin = rope_tables(PLAIN, length)
    half = torch.atan2(sin, cos)
    return torch.cat((half, half), dim=1)[:, None, None, :]


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize(("s", "b"), [(1, 1), (1, 3), (5, 1)])
def test_a_token_or_a_sample_alone(strategy: str, s: int, b: int) -> None:
    ours, plain = pair(STRATEGIES[strategy])
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(s, b, 16, generator=generator, dtype=torch.float64)
    # As a transposed view: whatever comes before the first layer need not be contiguous.
    given = x.transpose(0, 1).contiguous().transpose(0, 1).requires_grad_()
    y, context = ours(given, rotary_pos_emb=angles(s))
    assert context is None
    x.requires_grad_()
    expected = plain(x.transpose(0, 1)).transpose(0, 1)
    torch.testing.assert_close(y, expected, rtol=1e-12, atol=1e-13)
    dy = torch.randn(y.shape, generator=generator, dtype=torch.float64)
    y.backward(dy)
    expected.backward(dy)
    torch.testing.assert_close(given.grad, x.grad, rtol=1e-11, atol=1e-12)
    theirs = dict(plain.named_parameters())
    for name, parameter in ours.named_parameters():
        torch.testing.assert_close(parameter.grad, theirs[name].grad, rtol=1e-11, atol=1e-12)


def test_the_input_is_not_changed() -> None:
    for low_rank in STRATEGIES.values():
        ours, _ = pair(low_rank)
        x = torch.randn(4, 2, 16, dtype=torch.float64)
        before = x.clone()
        ours(x.requires_grad_(), rotary_pos_emb=angles(4))
        assert torch.equal(x, before)


@pytest.mark.parametrize(
    ("argument", "named"),
    [("inference_context", "a KV cache"), ("packed_seq_params", "packed sequences")],
)
def test_what_a_layer_cannot_do_is_refused(argument: str, named: str) -> None:
    ours, _ = pair(STRATEGIES["btp"])
    arguments: dict[str, Any] = {argument: object()}
    with pytest.raises(ValueError, match=f"do not support {named} yet"):
        ours(torch.zeros(4, 2, 16, dtype=torch.float64), **arguments)


def test_sdpa_refuses_what_is_not_causal_self_attention() -> None:
    from megatron.core.transformer.enums import AttnMaskType

    for mask, kind in ((AttnMaskType.padding, "self"), (AttnMaskType.causal, "cross")):
        with pytest.raises(ValueError, match="causal self-attention only"):
            SdpaCoreAttention(llama_config(), 1, mask, kind)


def test_the_softmax_scale_of_the_configuration_is_used() -> None:
    ours, _ = pair(STRATEGIES["btp"])
    x = torch.randn(6, 2, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    usual, _ = ours(x)
    for scale, same in ((0.5, True), (0.1, False)):
        config = llama_config(softmax_scale=scale)
        scaled = single_layer(STRATEGIES["btp"], config).double()
        scaled.load_state_dict(ours.state_dict())
        assert torch.allclose(scaled(x)[0], usual, rtol=1e-12) == same
