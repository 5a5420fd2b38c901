"""Weights are drawn by name, whole: nothing of the layout can enter them."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from boost_layers.initialization import cola_std, draw_normal, shard_of
from boost_layers.vocabulary import initialize_vocabulary, mask_padded_vocabulary

NAME = "decoder.layers.0.self_attention.q_proj.A"


def draw(shape: tuple[int, ...] = (40, 30), seed: int = 1, name: str = NAME) -> Tensor:
    return draw_normal(shape, 0.5, seed, name, "cpu")


def test_a_name_and_a_seed_give_one_tensor() -> None:
    first = draw()
    torch.manual_seed(99)
    torch.randn(7)
    assert torch.equal(draw(), first)


def test_drawing_leaves_the_default_generator_alone() -> None:
    before = torch.get_rng_state()
    draw()
    assert torch.equal(torch.get_rng_state(), before)


def test_every_other_name_or_seed_gives_another_tensor() -> None:
    layers = range(3)
    projections = ("self_attention.q_proj", "self_attention.k_proj", "mlp.gate_proj", "mlp.up_proj")
    names = [
        f"decoder.layers.{layer}.{projection}.{factor}"
        for layer, projection, factor in itertools.product(layers, projections, "AB")
    ]
    tensors = [draw(name=name) for name in names]
    tensors += [draw(seed=seed) for seed in (2, 3, -1)]
    for one, other in itertools.combinations(tensors, 2):
        correlation = torch.corrcoef(torch.stack((one.flatten(), other.flatten())))[0, 1]
        # Five standard errors of 1200 independent numbers.
        assert abs(correlation) < 5 / 1200**0.5


def test_the_drawn_numbers_are_normal_in_fp32() -> None:
    x = draw((500, 400))
    assert x.dtype == torch.float32
    assert abs(x.mean()) < 5 * 0.5 / x.numel() ** 0.5
    assert x.std() == pytest.approx(0.5, rel=5 / (2 * x.numel()) ** 0.5)
    assert ((x / 0.5) ** 4).mean() == pytest.approx(3.0, rel=0.05)


def test_the_default_dtype_does_not_change_the_numbers() -> None:
    first = draw()
    torch.set_default_dtype(torch.float64)
    try:
        second = draw()
    finally:
        torch.set_default_dtype(torch.float32)
    assert second.dtype == torch.float32
    assert torch.equal(second, first)


def test_on_the_meta_device_only_the_shape_is_drawn() -> None:
    x = draw_normal((3, 4), 1.0, 0, NAME, torch.device("meta"))
    assert x.is_meta and x.shape == (3, 4)


@pytest.mark.parametrize("axis", [0, 1, -1])
def test_shards_tile_the_whole(axis: int) -> None:
    whole = draw((12, 8))
    shards = [shard_of(whole, axis, rank, 4) for rank in range(4)]
    assert torch.equal(torch.cat(shards, dim=axis), whole)
    assert shards[0].shape[axis] == whole.shape[axis] // 4


@pytest.mark.parametrize(("size_in", "size_out", "rank"), [(512, 1376, 128), (4096, 4096, 1024)])
def test_the_product_of_the_factors_has_the_stated_deviation(
    size_in: int, size_out: int, rank: int
) -> None:
    """std((B·A)_ij) = (in + out)^(-1/2), the reason for the formula."""
    std = cola_std(size_in, size_out, rank)
    assert std == pytest.approx((rank * (size_in + size_out)) ** -0.25)
    # Of a sum of `rank` products of independent factors.
    assert rank**0.5 * std**2 == pytest.approx((size_in + size_out) ** -0.5)


class Stage(nn.Module):
    """The ends of a GPTModel's pipeline stage: a tenth of Megatron, for its two vocabularies."""

    def __init__(
        self, rows: int, tp_size: int, *, pre: bool = True, post: bool = True, tied: bool = False
    ) -> None:
        super().__init__()
        self.pre_process, self.post_process = pre, post
        self.share_embeddings_and_output_weights = tied
        self.vocab_size = rows
        local = nn.Parameter(torch.full((rows // tp_size, 6), torch.nan))
        if pre:
            weight = SimpleNamespace(weight=local)
            self.embedding = SimpleNamespace(word_embeddings=weight)
        if post:
            self.output_layer = Head(local if tied and pre else nn.Parameter(local.detach() + 0))


class Head(nn.Module):
    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight = weight

    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        return x @ self.weight.t(), None


def group(rank: int, size: int) -> Any:
    return SimpleNamespace(rank=lambda: rank, size=lambda: size)


CONFIG: Any = SimpleNamespace(hidden_size=6, init_method_std=0.02, embedding_init_method_std=0.05)


def vocabulary(
    rows: int, vocab_size: int, tp_size: int, seed: int = 1, **ends: Any
) -> tuple[Tensor | None, Tensor | None]:
    """The whole embedding and head that the ranks put together."""
    stages = []
    for rank in range(tp_size):
        stage: Any = Stage(rows, tp_size, **ends)
        initialize_vocabulary(stage, CONFIG, vocab_size, seed, group(rank, tp_size))
        stages.append(stage)
    embedding = head = None
    if stages[0].pre_process:
        embedding = torch.cat([stage.embedding.word_embeddings.weight for stage in stages]).detach()
    if stages[0].post_process:
        head = torch.cat([stage.output_layer.weight for stage in stages]).detach()
    return embedding, head


def test_embedding_and_head_do_not_depend_on_padding_or_ranks() -> None:
    embedding, head = vocabulary(50, 50, 1)
    assert embedding is not None and head is not None
    assert embedding.std() == pytest.approx(0.05, rel=0.2)
    assert head.std() == pytest.approx(0.02, rel=0.2)
    assert abs(torch.corrcoef(torch.stack((embedding.flatten(), head.flatten())))[0, 1]) < 0.3
    for rows, tp_size in ((64, 1), (64, 4), (52, 2), (80, 4)):
        padded = vocabulary(rows, 50, tp_size)
        for weight, unpadded in zip(padded, (embedding, head), strict=True):
            assert weight is not None
            assert torch.equal(weight[:50], unpadded)
            assert torch.equal(weight[50:], torch.zeros(rows - 50, 6))
    other, _ = vocabulary(50, 50, 1, seed=2)
    assert other is not None and not torch.equal(other, embedding)


def test_pipeline_stages_draw_what_the_whole_model_does() -> None:
    embedding, head = vocabulary(52, 50, 2)
    assert embedding is not None and head is not None
    first, no_head = vocabulary(52, 50, 2, post=False)
    no_embedding, last = vocabulary(52, 50, 2, pre=False)
    assert no_head is None and no_embedding is None
    assert first is not None and torch.equal(first, embedding)
    assert last is not None and torch.equal(last, head)


def test_a_tied_head_is_the_embedding_on_every_stage() -> None:
    embedding, _ = vocabulary(52, 50, 2)
    assert embedding is not None
    both = vocabulary(52, 50, 2, tied=True)
    _, on_the_last_stage = vocabulary(52, 50, 2, tied=True, pre=False)
    for weight in (*both, on_the_last_stage):
        assert weight is not None and torch.equal(weight, embedding)


@pytest.mark.parametrize("gathered", [False, True])
def test_padded_tokens_get_no_probability_and_no_gradient(gathered: bool) -> None:
    """Ranks 2 and 3 of 4, whose rows are partly and wholly padding."""
    vocab_size, rows, tp_size = 13, 20, 4
    x = torch.randn(3, 2, 6, generator=torch.Generator().manual_seed(1))
    for rank, true_rows in ((0, 5), (2, 3), (3, 0)):
        stage: Any = Stage(rows, 1 if gathered else tp_size)
        stage.vocab_size = rows
        nn.init.ones_(stage.output_layer.weight)
        mask_padded_vocabulary(stage, vocab_size, group(rank, tp_size))
        logits, _ = stage.output_layer(x)
        expected = x.sum(dim=-1, keepdim=True).expand_as(logits)
        true = vocab_size if gathered else true_rows
        torch.testing.assert_close(logits[..., :true], expected[..., :true])
        if 0 < true < logits.shape[-1]:
            assert (logits.softmax(dim=-1)[..., true:] == 0).all()
        logits.float().exp().sum().backward()
        assert (stage.output_layer.weight.grad[true:] == 0).all()
        assert (stage.output_layer.weight.grad[:true] != 0).all()


def test_an_unpadded_head_and_a_stage_without_one_are_left_alone() -> None:
    for stage in (Stage(52, 1), Stage(64, 1, post=False)):
        model: Any = stage
        mask_padded_vocabulary(model, 52, group(0, 1))
        assert not stage.post_process or not stage.output_layer._forward_hooks


def test_more_tokens_than_rows_are_refused() -> None:
    model: Any = Stage(52, 1)
    with pytest.raises(ValueError, match="vocabulary of 60 tokens in a model of 52 rows"):
        mask_padded_vocabulary(model, 60, group(0, 1))
