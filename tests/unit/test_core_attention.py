"""What core attention cannot honour is refused, and the scale that is asked for is used."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from megatron.core.transformer.enums import AttnMaskType

from boost_layers.attention import SdpaCoreAttention
from boost_layers.config import CoreAttention, LowRankConfig
from tests.support.single_layer import llama_config, single_layer

LENGTH, BATCH, HEADS, WIDTH = 5, 2, 4, 4
COLA = LowRankConfig(arch="cola", rank=4)


def attention(**changes: Any) -> SdpaCoreAttention:
    return SdpaCoreAttention(llama_config(**changes), 1, AttnMaskType.causal, "self")


def queries_keys_values(length: int = LENGTH) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(2)
    shape = (length, BATCH, HEADS, WIDTH)
    return [torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(3)]


def causal_mask(length: int = LENGTH) -> torch.Tensor:
    """As Megatron's data sets make it: True where a key is hidden."""
    return (torch.tril(torch.ones(length, length)) < 0.5).expand(BATCH, 1, length, length)


def reference(scale: float) -> torch.Tensor:
    """Causal attention, token by token."""
    q, k, v = queries_keys_values()
    out = torch.empty(LENGTH, BATCH, HEADS, WIDTH, dtype=torch.float64)
    for token in range(LENGTH):
        scores = torch.einsum("bhe,sbhe->sbh", q[token], k[: token + 1]) * scale
        out[token] = torch.einsum("sbh,sbhe->bhe", scores.softmax(dim=0), v[: token + 1])
    return out.flatten(2)


@pytest.mark.parametrize("mask", [None, causal_mask(), causal_mask()[:1]])
def test_the_causal_mask_is_built_in(mask: torch.Tensor | None) -> None:
    torch.testing.assert_close(
        attention()(*queries_keys_values(), mask), reference(WIDTH**-0.5), rtol=1e-12, atol=1e-12
    )


@pytest.mark.parametrize("scale", [1.0, 0.25])
def test_the_scale_of_the_configuration_is_used(scale: float) -> None:
    torch.testing.assert_close(
        attention(softmax_scale=scale)(*queries_keys_values(), None),
        reference(scale),
        rtol=1e-12,
        atol=1e-12,
    )


@pytest.mark.parametrize("core", ["sdpa", "local"])
@pytest.mark.parametrize("scale", [None, 0.25])
def test_a_layer_hands_the_scale_on(core: CoreAttention, scale: float | None) -> None:
    layer = single_layer(replace(COLA, core_attention=core), llama_config(softmax_scale=scale))
    used = layer.self_attention.core_attention.softmax_scale
    assert used == scale or (scale is None and used in (None, WIDTH**-0.5))


def hidden_first_key() -> torch.Tensor:
    mask = causal_mask().clone()
    mask[1, 0, 3, 0] = True
    return mask


@pytest.mark.parametrize(
    "mask",
    [
        hidden_first_key(),
        torch.zeros(BATCH, 1, LENGTH, LENGTH, dtype=torch.bool),
        torch.zeros(BATCH, 1, 1, LENGTH, dtype=torch.bool),
        ~causal_mask(),
    ],
    ids=["padding", "none hidden", "one row", "inverted"],
)
def test_another_mask_is_refused(mask: torch.Tensor) -> None:
    core = attention()
    with pytest.raises(ValueError, match="^attention_mask: .*nearest legal value: None$"):
        core(*queries_keys_values(), mask)


def test_a_mask_is_looked_at_again_when_its_shape_changes() -> None:
    core = attention()
    core(*queries_keys_values(), causal_mask())
    core(*queries_keys_values(), causal_mask())
    with pytest.raises(ValueError, match="attention_mask"):
        core(*queries_keys_values(3), causal_mask(3).logical_not())
    core(*queries_keys_values(3), causal_mask(3))


@pytest.mark.parametrize(
    "given",
    [
        {"attention_bias": torch.zeros(1)},
        {"packed_seq_params": object()},
        {"attn_mask_type": AttnMaskType.padding},
    ],
)
def test_other_inputs_are_refused(given: dict[str, Any]) -> None:
    with pytest.raises(ValueError):
        attention()(*queries_keys_values(), None, **given)


@pytest.mark.parametrize("name", ["attention_bias", "padding_mask", "rotary_pos_cos", "whatever"])
def test_a_layer_refuses_what_it_would_ignore(name: str) -> None:
    layer = single_layer(COLA, llama_config())
    x = torch.randn(LENGTH, BATCH, 16)
    layer(x, None, **{name: None})
    with pytest.raises(ValueError, match=f"do not take {name}$"):
        layer(x, None, **{name: torch.zeros(1)})
