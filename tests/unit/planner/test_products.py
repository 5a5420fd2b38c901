"""The products one by one are the operations that the accounting counts as a sum."""

from dataclasses import replace

import pytest

from megatron.boost.accounting.flops import (
    Work,
    head_forward_flops,
    layer_gate_flops_per_token,
    rank_attention_flops,
    rank_layer_forward_flops,
    rank_layer_recompute_flops,
)
from megatron.boost.accounting.products import (
    head_product,
    layer_products,
    recomputed_products,
)
from tests.support.planned import STRATEGIES, layout, model, some_models


def _gates(whole, here, layer):
    return layer_gate_flops_per_token(whole, layer) * here.tokens


@pytest.mark.parametrize("name", STRATEGIES)
@pytest.mark.parametrize("tp", [1, 2, 4])
def test_the_forwards_products_are_its_flops(name, tp):
    whole, here = model(STRATEGIES[name]), layout(tp)
    work = Work.of_sequences(here.micro_batch_size, here.sequence_length)
    for layer in (0, 1, 5):
        expected = rank_layer_forward_flops(whole, here, layer, work)
        expected -= rank_attention_flops(whole, here, layer, work) + _gates(whole, here, layer)
        assert sum(p.flops for p in layer_products(whole, here, layer)) == expected


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_so_are_those_of_models_with_grouped_queries(tp):
    for whole in some_models(20):
        here = layout(tp)
        work = Work.of_sequences(here.micro_batch_size, here.sequence_length)
        expected = rank_layer_forward_flops(whole, here, 0, work)
        expected -= rank_attention_flops(whole, here, 0, work)
        assert sum(p.flops for p in layer_products(whole, here, 0)) == expected


@pytest.mark.parametrize("residual", [False, True])
def test_the_products_that_latent_checkpointing_repeats_are_the_accountings(residual):
    settings = replace(STRATEGIES["btp latents"], recompute_residual=residual)
    whole, here = model(settings), layout(2)
    work = Work.of_sequences(here.micro_batch_size, here.sequence_length)
    expected = rank_layer_recompute_flops(whole, here, 0, work, checkpointed=False)
    expected -= rank_attention_flops(whole, here, 0, work)
    assert sum(p.flops for p in recomputed_products(whole, here, 0)) == expected
    assert recomputed_products(model(STRATEGIES["btp"]), here, 0) == ()


def test_a_backward_is_twice_its_forward_and_the_heads_is_the_accountings():
    whole, here = model(STRATEGIES["btp"]), layout(4)
    head = head_product(whole, here)
    assert 4 * head.flops == head_forward_flops(whole, here.tokens)
    for product in (*layer_products(whole, here, 0), head):
        assert product.input_gradient.flops == product.flops == product.weight_gradient.flops


def test_grouping_makes_one_product_of_each_group_and_unequal_widths_part_a_batch():
    grouped = layer_products(model(STRATEGIES["btp"]), layout(2), 0)
    assert [p.name for p in grouped] == [
        "q, k, v down",
        "q, k, v up",
        "o down",
        "o up",
        "gate, up down",
        "gate, up up",
        "down down",
        "down up",
    ]
    assert [p.number for p in grouped] == [1, 3, 1, 1, 1, 2, 1, 1]
    few_kv_heads = model(STRATEGIES["btp"], num_query_groups=8)
    names = [p.name for p in layer_products(few_kv_heads, layout(2), 0)]
    assert names[:3] == ["q, k, v down", "q up", "k, v up"]
    assert len(layer_products(model(STRATEGIES["btp ungrouped"]), layout(2), 0)) == 14
    assert len(layer_products(model(STRATEGIES["full-rank"]), layout(2), 0)) == 7
