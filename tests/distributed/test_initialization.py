"""The initial model is the same in every layout, and its loss does not see the padding."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from boost_layers.initialization import draw_normal
from tests.distributed.test_parity import BTP, DENSE, PLAIN, REPLICATED, VANILLA
from tests.support.distributed import run_ranks
from tests.support.parallel_gpt import Case, gather_canonical, parallel_gpt, tensor_parallel_state
from tests.support.parity import batch
from tests.support.plain_llama import PlainLlama

VOCAB = 50
COLA_PLAIN = replace(PLAIN, vocab_size=VOCAB, heads=8, kv_heads=4, head_dim=6)
DENSE_PLAIN = replace(COLA_PLAIN, arch="dense", mlp="swiglu")

LAYOUTS = {
    "btp": replace(BTP, seed=7),
    "btp-ungrouped": replace(BTP, seed=7, grouping=False),
    "btp-sync": replace(BTP, seed=7, norm="sync"),
    "vanilla": replace(VANILLA, seed=7),
    "vanilla-replicated": replace(REPLICATED, seed=7),
    "dense": replace(DENSE, seed=7),
}


def cases(tp: int, padded: Mapping[int, int]) -> dict[str, Case]:
    return {
        name: Case(
            plain=COLA_PLAIN if low_rank.low_rank else DENSE_PLAIN,
            low_rank=low_rank,
            tp=tp,
            dtype=torch.float32,
            padded_vocab=padded[tp],
            transformer={"init_method_std": 0.03},
        )
        for name, low_rank in LAYOUTS.items()
        if tp < 4 or name in ("btp", "vanilla", "dense")
    }


def initial(given: Mapping[str, Case]) -> dict[str, tuple[dict[str, Tensor], Tensor]]:
    """On a rank: the whole weights that each case starts from, and the losses of a batch."""
    from megatron.core.process_groups_config import ProcessGroupCollection

    from boost_layers.vocabulary import initialize_vocabulary

    tokens, labels = batch(VOCAB)
    positions = torch.arange(tokens.shape[1]).expand_as(tokens)
    found = {}
    with tensor_parallel_state(next(iter(given.values())).tp):
        group = ProcessGroupCollection.use_mpu_process_groups(["tp"]).tp
        for name, case in given.items():
            with parallel_gpt(case) as model:
                initialize_vocabulary(model, model.config, VOCAB, case.low_rank.seed, group)
                weights = gather_canonical(model, dict(model.named_parameters()), VOCAB)
                with torch.no_grad():
                    loss = model(tokens, positions, None, labels=labels)
            found[name] = weights, loss
    return found


@pytest.fixture(scope="module")
def by_tp() -> dict[int, dict[str, tuple[dict[str, Tensor], Tensor]]]:
    padded = {1: 50, 2: 52, 4: 64}
    return {tp: run_ranks(initial, tp, cases(tp, padded))[-1] for tp in padded}


def test_every_layout_starts_from_the_same_weights(
    by_tp: dict[int, dict[str, tuple[dict[str, Tensor], Tensor]]],
) -> None:
    expected = by_tp[1]["btp"][0]
    expected_dense = by_tp[1]["dense"][0]
    assert set(expected) == set(PlainLlama(COLA_PLAIN).state_dict())
    assert set(expected_dense) == set(PlainLlama(DENSE_PLAIN).state_dict())
    for of_layout in by_tp.values():
        for name, (weights, _) in of_layout.items():
            same = expected_dense if name == "dense" else expected
            assert weights.keys() == same.keys()
            assert all(torch.equal(weights[key], same[key]) for key in same)


def test_the_loss_does_not_depend_on_padding_or_layout(
    by_tp: dict[int, dict[str, tuple[dict[str, Tensor], Tensor]]],
) -> None:
    for of_layout in by_tp.values():
        for name, (_, loss) in of_layout.items():
            expected = by_tp[1]["dense" if name == "dense" else "btp"][1]
            torch.testing.assert_close(loss, expected, rtol=2e-6, atol=0)


def test_each_weight_is_one_draw_by_its_name_with_the_whole_layers_deviation(
    by_tp: dict[int, dict[str, tuple[dict[str, Tensor], Tensor]]],
) -> None:
    """Sizes in and out are those of the whole layer; at TP 4 a shard's would be off by √2 and 2."""
    heads, kv, d, f = 8 * 6, 4 * 6, 32, 48
    sizes = {
        "self_attention.q_proj": (d, heads, 12),
        "self_attention.k_proj": (d, kv, 12),
        "self_attention.v_proj": (d, kv, 12),
        "self_attention.o_proj": (heads, d, 12),
        "mlp.gate_proj": (d, f, 16),
        "mlp.up_proj": (d, f, 16),
        "mlp.down_proj": (f, d, 16),
    }
    cola, dense = by_tp[4]["btp"][0], by_tp[4]["dense"][0]
    for layer in range(2):
        for projection, (size_in, size_out, rank) in sizes.items():
            name = f"decoder.layers.{layer}.{projection}"
            std = rank**-0.25 * (size_in + size_out) ** -0.25
            for factor, shape in (("A", (rank, size_in)), ("B", (size_out, rank))):
                drawn = draw_normal(shape, std, 7, f"{name}.{factor}", "cpu")
                assert torch.equal(cola[f"{name}.{factor}"], drawn)
            # Megatron's: 0.03, and over sqrt(2·layers) where a residual is closed.
            std = 0.03 / math.sqrt(2 * 2) if projection.endswith(("o_proj", "down_proj")) else 0.03
            drawn = draw_normal((size_out, size_in), std, 7, f"{name}.weight", "cpu")
            assert torch.equal(dense[f"{name}.weight"], drawn)
    for weights in (cola, dense):
        for name in ("embedding.word_embeddings.weight", "output_layer.weight"):
            assert torch.equal(weights[name], draw_normal((VOCAB, d), 0.03, 7, name, "cpu"))
        norms = [value for name, value in weights.items() if "layernorm" in name]
        assert len(norms) == 5 and all((value == 1).all() for value in norms)
