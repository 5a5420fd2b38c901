"""Registering an architecture, and what is refused of one."""

from __future__ import annotations

from argparse import ArgumentParser
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from boost_layers import Architecture, LowRankConfig, architecture, register_architecture
from boost_layers.architecture import Phi, architecture_names, architecture_of
from boost_layers.combined import CombinedKind
from boost_layers.specs import ENVIRONMENT_VARIABLE, settings_from_environment
from megatron.boost.arguments import add_boost_flags
from tests.support.checkpoints import description
from tests.support.single_layer import llama_config, single_layer


def gated(phi: Phi, u: Tensor, w: Tensor) -> Tensor:
    return phi(u) * torch.sigmoid(w)


GATED = Architecture(
    name="gated", activation="silu", mlp="product", downs=("A", "A_gate"), combine=gated
)


@pytest.fixture(autouse=True)
def registered() -> Iterator[None]:
    """Registered for these tests alone."""
    with mock.patch.dict(architecture._REGISTERED):
        register_architecture(GATED)
        yield


def test_the_projects_own_are_registered_alike() -> None:
    assert architecture_names() == ("none", "dense", "cola", "svd", "lax", "gated")
    assert architecture_of("none") is None and architecture_of("dense") is None
    for name in ("cola", "svd", "lax"):
        found = architecture_of(name)
        assert found is not None and found.downs == ("A",) and found.combine is None


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"name": "dense"}, "architecture 'dense': its name is no new word"),
        ({"name": "two words"}, "'two words': its name is no new word"),
        ({"downs": ()}, "'new': it has no down-projection"),
        ({"downs": ("A", "B")}, "'new': .* not distinct words: A, B, B"),
        ({"downs": ("A", "A"), "combine": gated}, "not distinct words: A, A, B"),
        ({"combine": 3}, "its combine 3 is no function"),
        ({"downs": ("A.x",), "combine": gated}, "not distinct words: A.x, B"),
        ({"downs": ("A", "A_gate")}, "'new': nothing says how z is made of several latents"),
        ({"combine": gated, "crossing": True}, "'new': a latent that crosses over"),
        ({"downs": ("gate_A",), "crossing": True}, "'new': LaX has weights named gate_A"),
        ({"activation": "relu"}, "'new': its activation 'relu' is none of silu, gelu, identity"),
        ({"mlp": None}, "'new': only one with a latent crossing leaves activation and mlp to"),
        ({"mlp": "geglu"}, "'new': its mlp 'geglu' is none of swiglu, product"),
    ],
)
def test_an_architecture_that_cannot_be_computed_is_refused(
    fields: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        Architecture(**{"name": "new", "activation": "silu", "mlp": "product", **fields})


def test_a_name_belongs_to_one_architecture() -> None:
    assert register_architecture(GATED) is GATED
    with pytest.raises(ValueError, match="architecture 'cola': another one has that name already"):
        register_architecture(Architecture(name="cola", activation="gelu", mlp="product"))
    assert LowRankConfig(arch="cola").activation == "silu"


def test_its_own_settings_hold_unless_others_are_given() -> None:
    own = LowRankConfig(arch="gated")
    assert (own.low_rank, own.crossing) == (True, False)
    assert (own.activation, own.mlp_kind) == ("silu", "product")
    other = LowRankConfig(arch="gated", act="gelu", mlp="swiglu")
    assert (other.activation, other.mlp_kind) == ("gelu", "swiglu")


def test_an_unregistered_name_is_refused_with_all_that_are() -> None:
    with pytest.raises(ValueError, match="--low-rank-arch gate: .*cola, svd, lax, gated$"):
        LowRankConfig(arch="gate")


def test_vanilla_needs_an_elementwise_architecture() -> None:
    message = "--low-rank-tp vanilla: .*--low-rank-arch gated is not element.*legal value: btp$"
    with pytest.raises(ValueError, match=message):
        LowRankConfig(arch="gated", tp="vanilla")
    LowRankConfig(arch="gated", tp="btp")


def test_latent_crossing_is_laxs() -> None:
    with pytest.raises(ValueError, match="--lax-gate linear: --low-rank-arch gated has no"):
        LowRankConfig(arch="gated", lax_gate="linear")


def test_the_command_line_and_the_environment_know_it(monkeypatch: pytest.MonkeyPatch) -> None:
    parser = add_boost_flags(ArgumentParser(allow_abbrev=False))
    assert parser.parse_args(["--low-rank-arch", "gated"]).low_rank_arch == "gated"
    monkeypatch.setenv(ENVIRONMENT_VARIABLE, "arch=gated,rank=8")
    assert settings_from_environment() == LowRankConfig(arch="gated", rank=8)
    monkeypatch.setenv(ENVIRONMENT_VARIABLE, "arch=gate")
    with pytest.raises(ValueError, match="arch=gate; legal values: none, .*, gated$"):
        settings_from_environment()


def test_it_is_no_model_of_another_format() -> None:
    with pytest.raises(ValueError, match="--low-rank-arch gated: is no model of another format"):
        description(LowRankConfig(arch="gated"))


def test_the_entry_on_the_documentations_page_is_accepted() -> None:
    page = Path(__file__).parents[2] / "docs" / "new-architecture.md"
    source = page.read_text(encoding="utf-8").split("```python\n")[1].partition("layers =")[0]
    with mock.patch.dict(architecture._REGISTERED):
        del architecture._REGISTERED["gated"]
        exec(source, {})
        assert architecture_of("gated").elementwise


def test_a_combine_of_another_shape_is_refused_by_name() -> None:
    register_architecture(
        Architecture(
            name="halved",
            activation="silu",
            mlp="product",
            combine=lambda phi, u: phi(u)[:, : u.shape[1] // 2],
        )
    )
    layer = single_layer(LowRankConfig(arch="halved", rank=6), llama_config())
    message = r"'halved': its combine made \[10, 3\] of latents \[10, 6\]"
    with pytest.raises(ValueError, match=message):
        layer(torch.zeros(5, 2, 16))


RANKS = (5, 3)
N = 7


def kind(combine: Any = gated, **settings: Any) -> CombinedKind:
    given = Architecture(
        name="given", activation="silu", mlp="product", downs=("A", "A_gate"), combine=combine
    )
    return CombinedKind(RANKS, "silu", hidden_size=4, eps=1e-5, architecture=given, **settings)


def latents(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    """v, S and dz."""
    generator = torch.Generator().manual_seed(3)
    v, s, dz = (
        torch.randn(shape, generator=generator, dtype=torch.float64)
        for shape in ((N, 2 * sum(RANKS)), (N, 1), (N * sum(RANKS),))
    )
    wide = torch.promote_types(dtype, torch.float32)
    return v.to(dtype), s.square().to(wide), dz.to(dtype)


@pytest.mark.parametrize("amount", [0.0, 0.3, 1.0])
def test_latents_are_divided_combined_and_split(amount: float) -> None:
    v, s, dz = latents()
    found = kind(amount=amount)
    z = found.open(v, s, None, None)
    dv, ds, *_ = found.open_backward(dz, v, s, None, None)

    v.requires_grad_(), s.requires_grad_()
    u1, w1, u2, w2 = (v / torch.sqrt(s / 4 + 1e-5)).split([5, 5, 3, 3], dim=1)
    expected = torch.cat(
        [
            (((1 - amount) * u + amount * F.silu(u)) * torch.sigmoid(w)).flatten()
            for u, w in ((u1, w1), (u2, w2))
        ]
    )
    expected.backward(dz)
    torch.testing.assert_close(z, expected.detach(), rtol=1e-12, atol=1e-13)
    torch.testing.assert_close(dv, v.grad, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(ds, s.grad, rtol=1e-11, atol=1e-12)


def test_the_arithmetic_is_in_fp32() -> None:
    """(u + 256·w) − 256·w loses u in bf16, and nothing of it in fp32."""
    v, _, dz = latents(torch.bfloat16)
    found = kind(lambda phi, u, w: (u + 256 * w) - 256 * w)
    z = found.open(v, None, None, None)
    u = torch.cat([v[:, :5].flatten(), v[:, 10:13].flatten()])
    assert z.dtype == torch.bfloat16
    torch.testing.assert_close(z, u, rtol=8e-3, atol=1e-4)
    dv, ds, *_ = found.open_backward(dz, v, None, None, None)
    assert dv.dtype == torch.bfloat16 and ds is None


class Halved(torch.autograd.Function):
    """With a backward of its own, which is not its gradient."""

    @staticmethod
    def forward(ctx: Any, u: Tensor) -> Tensor:
        return u / 2

    @staticmethod
    def backward(ctx: Any, dz: Tensor) -> Tensor:
        return dz * 5


def test_a_backward_of_its_own_is_used_and_an_unused_latent_has_no_gradient() -> None:
    v, _, dz = latents()
    dv, *_ = kind(lambda phi, u, w: Halved.apply(u)).open_backward(dz, v, None, None, None)
    du1, dw1, du2, dw2 = dv.split([5, 5, 3, 3], dim=1)
    torch.testing.assert_close(torch.cat([du1.flatten(), du2.flatten()]), 5 * dz)
    assert not dw1.any() and not dw2.any()
