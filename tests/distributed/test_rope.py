"""RoPE's settings, as Megatron has them, reach our layers: base, Llama 3's scaling, interpolation,
partial and interleaved rotation.

In fp32, with sequences that are long enough for the slow frequencies to show.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from unittest import mock

import torch
from torch import Tensor

from tests.distributed.test_parity import BTP, DENSE, VANILLA
from tests.support import plain_llama
from tests.support.distributed import run_ranks
from tests.support.parallel_gpt import Case
from tests.support.parity import Reference, beyond, compare, errors, reference
from tests.support.plain_llama import Llama3RopeScaling, PlainConfig

SEQUENCE = 64
PLAIN = PlainConfig(
    vocab_size=52,
    hidden=32,
    ffn=48,
    heads=4,
    kv_heads=2,
    head_dim=16,
    layers=2,
    arch="cola",
    rank=12,
    mlp_rank=16,
    mlp="product",
)
DENSE_PLAIN = replace(PLAIN, arch="dense", mlp="swiglu")
# Of the eight frequencies at base 10000 one is blended and one divided.
LLAMA3 = Llama3RopeScaling(factor=2.0)
MEGATRONS_DEFAULT_FACTOR = 8.0
# Turning less than once in the original context, every frequency is divided.
INTERPOLATION = Llama3RopeScaling(factor=4.0, original_max_position=1)


@cache
def exact(plain: PlainConfig) -> Reference:
    return reference(plain, weights=torch.float32, seq_length=SEQUENCE)


def test_every_setting_agrees_with_the_plain_model() -> None:
    settings = {
        "base": {"rope_base": 500.0},
        "llama3": {"rope_scaling": LLAMA3},
        "llama3 and base": {"rope_scaling": LLAMA3, "rope_base": 5e5},
    }
    cases = {
        f"{strategy}, {setting}": (
            Case(plain=replace(plain, **changes), low_rank=low_rank, tp=2, dtype=torch.float32),
            exact(replace(plain, **changes)),
        )
        for strategy, low_rank, plain in (
            ("btp", BTP, PLAIN),
            ("vanilla", VANILLA, PLAIN),
            ("dense", DENSE, DENSE_PLAIN),
        )
        for setting, changes in settings.items()
    }
    # The plain model's name for it differs from Megatron's.
    cases["btp, interpolation"] = (
        Case(
            plain=PLAIN,
            low_rank=BTP,
            tp=2,
            dtype=torch.float32,
            gpt={"seq_len_interpolation_factor": INTERPOLATION.factor},
        ),
        exact(replace(PLAIN, rope_scaling=INTERPOLATION)),
    )
    for found in run_ranks(compare, 2, cases):
        assert beyond(found, 1e-5) == {}


def test_each_setting_matters() -> None:
    """A setting that was ignored would not pass for rounding."""
    default_factor = replace(LLAMA3, factor=MEGATRONS_DEFAULT_FACTOR)
    for changed, ignored in (
        ({"rope_base": 500.0}, {}),
        ({"rope_scaling": LLAMA3}, {}),
        ({"rope_scaling": LLAMA3}, {"rope_scaling": default_factor}),
        ({"rope_scaling": INTERPOLATION}, {}),
    ):
        found = errors(exact(replace(PLAIN, **ignored)), exact(replace(PLAIN, **changed)))
        assert found["logits"] > 1e-4


def test_partial_rotation_turns_the_first_part_of_each_head() -> None:
    rotated = 8

    def partly(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        return torch.cat((whole(x[..., :rotated], cos, sin), x[..., rotated:]), dim=-1)

    def tables(config: PlainConfig, length: int) -> tuple[Tensor, Tensor]:
        return all_tables(replace(config, head_dim=rotated), length)

    whole, all_tables = plain_llama.rotate, plain_llama.rope_tables
    with (
        mock.patch.object(plain_llama, "rotate", partly),
        mock.patch.object(plain_llama, "rope_tables", tables),
    ):
        expected = reference(PLAIN, weights=torch.float32, seq_length=SEQUENCE)
    case = Case(plain=PLAIN, low_rank=BTP, tp=2, dtype=torch.float32, gpt={"rotary_percent": 0.5})
    assert errors(exact(PLAIN), expected)["logits"] > 1e-4
    assert beyond(run_ranks(compare, 2, {"partial": (case, expected)})[0], 1e-5) == {}


def interleaved(rows: Tensor) -> Tensor:
    """The rows of q's or k's B, by head, so that what was paired as (i, i + e/2) is at
    (2i, 2i + 1)."""
    by_head = rows.view(-1, 2, PLAIN.head_dim // 2, rows.shape[1])
    return by_head.transpose(1, 2).reshape(rows.shape)


def test_interleaved_rotation_pairs_neighbours() -> None:
    halves = exact(PLAIN)

    def permuted(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        return {
            name: interleaved(t) if name.endswith(("q_proj.B", "k_proj.B")) else t
            for name, t in tensors.items()
        }

    expected = replace(
        halves,
        tensors=permuted(dict(halves.tensors)),
        gradients=permuted(dict(halves.gradients)),
    )
    case = Case(
        plain=PLAIN,
        low_rank=BTP,
        tp=2,
        dtype=torch.float32,
        transformer={"rotary_interleaved": True},
    )
    found = run_ranks(compare, 2, {"interleaved": (case, expected)})[0]
    assert beyond(found, 1e-5) == {}
    ignored = replace(case, transformer={})
    found = run_ranks(compare, 2, {"ignored": (ignored, expected)})[0]
    assert found["ignored"]["logits"] > 1e-2
