"""Weight gradients that go straight into Megatron's main gradients."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from boost_layers.config import LowRankConfig
from tests.support.single_layer import llama_config, single_layer

S, B, D = 6, 2, 32
BTP = LowRankConfig(arch="cola", rank=8)
CASES = {
    "grouped": BTP,
    "ungrouped": replace(BTP, grouping=False),
    "sync": replace(BTP, norm="sync"),
    "checkpointed": replace(BTP, recompute=True),
    "residual made again": replace(BTP, recompute=True, recompute_residual=True),
}


def layer(low_rank: LowRankConfig, dtype: torch.dtype = torch.float32) -> nn.Module:
    config = llama_config(
        hidden_size=D, ffn_hidden_size=48, num_attention_heads=4, num_query_groups=2, kv_channels=8
    )
    torch.manual_seed(0)
    return single_layer(low_rank, config).to(dtype)


def backward(module: nn.Module) -> None:
    dtype = next(module.parameters()).dtype
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(S, B, D, generator=generator).to(dtype).requires_grad_()
    out, _ = module(x, rotary_pos_emb=torch.randn(S, 1, 1, 8, generator=generator))
    out.backward(torch.randn(out.shape, generator=generator).to(dtype))


def with_main_grads(module: nn.Module) -> dict[str, Tensor]:
    """Give every parameter what Megatron's DDP gives it, with a past of ones."""
    found = {}
    for name, parameter in module.named_parameters():
        of_megatron: Any = parameter
        of_megatron.main_grad = torch.ones(parameter.shape)
        of_megatron.grad_added_to_main_grad = False
        found[name] = of_megatron.main_grad
    return found


@pytest.mark.parametrize("name", CASES)
def test_main_gradients_are_added_to_and_not_twice(name: str) -> None:
    plain, fused = layer(CASES[name]), layer(CASES[name])
    backward(plain)
    main = with_main_grads(fused)
    backward(fused)
    for (parameter, expected), (_, found) in zip(
        plain.named_parameters(), fused.named_parameters(), strict=True
    ):
        # As Megatron's hook does it.
        of_megatron: Any = found
        factor = parameter.endswith((".A", ".B"))
        assert of_megatron.grad_added_to_main_grad == factor, parameter
        assert found.grad is not None and found.grad.shape == found.shape
        if not factor:
            main[parameter].add_(found.grad)
        assert expected.grad is not None
        torch.testing.assert_close(main[parameter] - 1, expected.grad, rtol=1e-4, atol=1e-5)


def test_narrow_gradients_are_not_rounded_on_the_way() -> None:
    """Sixteen equal micro-batches give sixteen times the gradient of one, to fp32's rounding."""
    module = layer(BTP, torch.bfloat16)
    main = with_main_grads(module)
    for gradient in main.values():
        gradient.zero_()
    backward(module)
    first = {name: gradient.clone() for name, gradient in main.items()}
    for _ in range(15):
        backward(module)
    for name, gradient in main.items():
        if name.endswith((".A", ".B")):
            torch.testing.assert_close(gradient, 16 * first[name], rtol=1e-5, atol=1e-7)


def test_a_parameter_without_main_gradient_gets_an_ordinary_one() -> None:
    """Also beside others that have one: whoever shares a GEMM with it goes the same way."""
    plain, mixed = layer(BTP), layer(BTP)
    backward(plain)
    with_main_grads(mixed)
    q: Any = mixed.get_parameter("self_attention.q_proj.B")
    del q.main_grad
    backward(mixed)
    k: Any = mixed.get_parameter("self_attention.k_proj.B")
    assert not k.grad_added_to_main_grad
    for name in ("self_attention.q_proj.B", "self_attention.k_proj.B"):
        torch.testing.assert_close(mixed.get_parameter(name).grad, plain.get_parameter(name).grad)
