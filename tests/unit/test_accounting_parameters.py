"""Numbers of parameters: against published ones and against formulas typed here from the design."""

from __future__ import annotations

from dataclasses import replace

import pytest

from boost_layers.config import LowRankConfig
from boost_layers.initialization import balanced_factors
from megatron.boost.accounting.parameters import (
    layer_parameters,
    layer_tensors,
    model_parameters,
    rank_parameters,
)
from megatron.boost.accounting.sizes import Layout, Model, validate_layout

DENSE = LowRankConfig(arch="dense")
# d, f, heads, layers, r, and millions of parameters of the dense and of the CoLA model
# (arXiv 2502.10940 and its code's configurations; vocabulary 32000, untied).
PUBLISHED = {
    "60M": (512, 1376, 8, 8, 128, 58.1, 42.8),
    "130M": (768, 2048, 12, 12, 256, 134.1, 94.0),
    "350M": (1024, 2736, 16, 24, 256, 368.0, 185.2),
    "1B": (2048, 5461, 32, 24, 512, 1339.1, 609.3),
    "7B": (4096, 11008, 32, 32, 1024, 6738.4, 2820.9),
}


def model(low_rank: LowRankConfig, **changes: object) -> Model:
    sizes = {
        "hidden_size": 24,
        "ffn_hidden_size": 40,
        "num_attention_heads": 6,
        "num_query_groups": 2,
        "kv_channels": 8,
        "num_layers": 4,
        "vocab_size": 50,
        "padded_vocab_size": 56,
        "tied": False,
    }
    return Model(low_rank=low_rank, **{**sizes, **changes})


@pytest.mark.parametrize("size", PUBLISHED)
def test_published_models_have_their_published_numbers(size: str) -> None:
    d, f, heads, layers, rank, dense_millions, cola_millions = PUBLISHED[size]
    built = model(
        LowRankConfig(arch="cola", rank=rank),
        hidden_size=d,
        ffn_hidden_size=f,
        num_attention_heads=heads,
        num_query_groups=heads,
        kv_channels=d // heads,
        num_layers=layers,
        vocab_size=32000,
        padded_vocab_size=32768,
    )
    assert round(model_parameters(built) / 1e6, 1) == cola_millions
    assert round(model_parameters(built.dense_equivalent()) / 1e6, 1) == dense_millions


def test_grouped_queries_heads_of_any_size_and_a_rank_for_each_projection() -> None:
    d, f, q, kv = 24, 40, 48, 16
    ranks = "q=3,k=4,v=5,o=6,gate=7,up=8,down=9"
    table = model(LowRankConfig(arch="svd", ranks=ranks))
    weights = 3 * (d + q) + (4 + 5) * (d + kv) + 6 * (q + d) + (7 + 8 + 9) * (d + f)
    assert layer_parameters(table, 0) == weights + 2 * d
    assert layer_parameters(model(DENSE), 0) == 2 * d * q + 2 * d * kv + 3 * d * f + 2 * d


def test_low_rank_layers_among_dense_ones() -> None:
    mixed = model(LowRankConfig(arch="cola", rank=5, layers="1-2"))
    whole = model(LowRankConfig(arch="cola", rank=5))
    dense = layer_parameters(model(DENSE), 0)
    found = [layer_parameters(mixed, layer) for layer in range(4)]
    assert found == [dense, *[layer_parameters(whole, 0)] * 2, dense]


@pytest.mark.parametrize(
    "gate, norm, more",
    [
        ("identity", "none", lambda r, p, q: 0),
        ("identity", "layernorm", lambda r, p, q: 2 * r),
        ("linear", "rmsnorm", lambda r, p, q: r * r + r + r),
        ("tensor", "none", lambda r, p, q: p * p + q * q),
        ("tensor", "layernorm", lambda r, p, q: p * p + q * q + 2 * r),
    ],
)
def test_gates_and_norms_of_crossed_latents(gate: str, norm: str, more: object) -> None:
    """7 ranks of which two differ; the first low-rank layer has neither gate nor norm."""
    settings = LowRankConfig(
        arch="lax", attn_rank=12, mlp_rank=18, lax_gate=gate, lax_norm=norm, layers="1-3"
    )
    lax = model(settings)
    plain = model(LowRankConfig(arch="cola", attn_rank=12, mlp_rank=18, layers="1-3"))
    extra = 4 * more(12, 3, 4) + 3 * more(18, 3, 6)
    found = [layer_parameters(lax, i) - layer_parameters(plain, i) for i in range(4)]
    assert found == [0, 0, extra, extra]


@pytest.mark.parametrize(
    "rank, factors",
    [(1, (1, 1)), (12, (3, 4)), (16, (4, 4)), (1024, (32, 32)), (1280, (32, 40)), (13, (1, 13))],
)
def test_the_most_balanced_factors(rank: int, factors: tuple[int, int]) -> None:
    assert balanced_factors(rank) == factors


def test_padding_and_tied_vocabularies() -> None:
    untied = model(DENSE)
    tied = replace(untied, tied=True)
    assert model_parameters(untied) - model_parameters(tied) == 50 * 24
    one = Layout(sequence_length=8, micro_batch_size=1)
    padded = 2 * 6 * 24
    assert rank_parameters(untied, one, 0) == model_parameters(untied) + padded
    # A tied head on a stage of its own is a copy of the embedding.
    two = replace(one, pipeline_parallel=2)
    on_stages = [rank_parameters(tied, two, pp_rank) for pp_rank in (0, 1)]
    assert sum(on_stages) == rank_parameters(tied, one, 0) + 56 * 24
    assert sum(rank_parameters(untied, two, p) for p in (0, 1)) == rank_parameters(untied, one, 0)


def test_what_tensor_parallelism_replicates() -> None:
    one = Layout(sequence_length=8, micro_batch_size=1)
    two = replace(one, tensor_parallel=2)
    btp = model(LowRankConfig(arch="cola", rank=6))
    vanilla = model(LowRankConfig(arch="cola", rank=6, tp="vanilla"))
    lax = model(LowRankConfig(arch="lax", rank=6))
    # Twice what a rank holds, less the whole: what is there twice. The final norm always is.
    for of, replicated in (
        (btp, 24),
        (vanilla, 24 + 4 * 48),
        (model(DENSE), 24 + 4 * 48),
        (lax, 24 + 3 * 7 * (4 + 9 + 12)),
    ):
        assert 2 * rank_parameters(of, two, 0) - rank_parameters(of, one, 0) == replicated


def test_interleaved_stages_hold_their_layers() -> None:
    layout = Layout(sequence_length=8, micro_batch_size=1, pipeline_parallel=2, virtual_stages=2)
    assert layout.chunks(model(DENSE), 0) == ((0,), (2,))
    assert layout.chunks(model(DENSE), 1) == ((1,), (3,))
    with pytest.raises(ValueError, match="--num-layers 6: is split over 4 .* value: 8"):
        layout.chunks(model(DENSE, num_layers=6), 0)


def test_models_that_do_not_divide_are_refused_by_flag() -> None:
    two = Layout(sequence_length=8, micro_batch_size=1, tensor_parallel=2)
    validate_layout(model(LowRankConfig(arch="cola", rank=5)), two)
    with pytest.raises(ValueError, match="--low-rank-rank 5: vanilla .* nearest legal value: 6"):
        validate_layout(model(LowRankConfig(arch="cola", rank=5, tp="vanilla")), two)
    with pytest.raises(ValueError, match="--low-rank-arch none: .* nearest legal value: dense"):
        model(LowRankConfig())


def test_a_layers_tensors_are_named_as_in_a_checkpoint() -> None:
    names = layer_tensors(model(LowRankConfig(arch="cola", rank=5)), 0)
    assert len(names) == 2 + 14
    assert names["self_attention.o_proj.A"].on_rank(2) == (5, 24)
    assert names["mlp.down_proj.B"].on_rank(2) == (12, 5)
    assert names["input_layernorm.weight"].on_rank(2) == (12,)
