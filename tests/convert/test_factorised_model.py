"""A dense model as a low-rank one, tensor by tensor: ranks, budgets, calibration, LaX."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from boost_layers.config import PROJECTIONS, LowRankConfig
from megatron.boost.command_line import ToolParser
from megatron.boost.conversion.calibration import refuse_few_tokens, refuse_short_text
from megatron.boost.conversion.description import ModelDescription, module_of
from megatron.boost.conversion.factorisation_settings import (
    FactorisationSettings,
    add_factorisation_flags,
    factorisation_settings,
    given_factorisation_flags,
)
from megatron.boost.conversion.low_rank_import import FactorisedModel
from tests.support.small_tokenizer import TEXT, VOCABULARY_SIZE, save_small_tokenizer

LAYERS = 3
SOURCE = ModelDescription(
    vocab_size=VOCABULARY_SIZE,
    hidden_size=16,
    ffn_hidden_size=24,
    num_layers=LAYERS,
    num_heads=4,
    num_kv_heads=1,
    head_dim=6,
    max_positions=32,
    norm_eps=1e-5,
    tied=False,
    dtype=torch.float32,
)


def dense_tensors(seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, shape in SOURCE.tensors().items():
        value = torch.randn(shape, generator=generator) / shape[-1] ** 0.5
        tensors[name] = value if len(shape) > 1 else 1 + 0.3 * value
    return tensors


DENSE = dense_tensors()


def settings(line: str, arch: str = "svd") -> FactorisationSettings:
    parser = ToolParser("")
    parser.add_argument("--low-rank-arch")
    add_factorisation_flags(parser)
    return factorisation_settings(parser.parse_args(["--low-rank-arch", arch, *line.split()]))


def reading(asked: list[str] | None = None) -> Callable[[str], Tensor]:
    def read(name: str) -> Tensor:
        if asked is not None:
            asked.append(name)
        return DENSE[name]

    return read


def factorised(line: str, arch: str = "svd", **more: Any) -> FactorisedModel:
    return FactorisedModel(SOURCE, reading(), settings(line, arch), **more)


def least_energy_kept(model: FactorisedModel) -> float:
    least = model.report.values()["least_energy_kept"]
    assert isinstance(least, float)
    return least


def made(model: FactorisedModel) -> dict[str, Tensor]:
    """All tensors in order, each as its description says."""
    tensors = {}
    for name, shape in model.description.tensors().items():
        tensors[name] = model.tensor(name)
        assert tensors[name].shape == shape, name
        assert tensors[name].dtype == torch.float32
    return tensors


def whole(layer: int, projection: str) -> str:
    return f"decoder.layers.{layer}.{module_of(projection)}.{projection}"


def product(tensors: dict[str, Tensor], layer: int, projection: str) -> Tensor:
    name = whole(layer, projection)
    return tensors[f"{name}.B"].double() @ tensors[f"{name}.A"].double()


def energies_of(weight: Tensor) -> Tensor:
    squares = torch.linalg.svdvals(weight.double()).square()
    return squares / squares.sum()


def test_the_full_ratio_gives_the_dense_weights_back_and_the_rest_untouched() -> None:
    model = factorised("--low-rank-ratio 1.0")
    tensors = made(model)
    for layer in range(LAYERS):
        for projection in PROJECTIONS:
            weight = DENSE[f"{whole(layer, projection)}.weight"].double()
            torch.testing.assert_close(
                product(tensors, layer, projection), weight, rtol=0, atol=1e-6
            )
    others = {name: t for name, t in tensors.items() if not name.endswith((".A", ".B"))}
    assert all(torch.equal(tensor, DENSE[name]) for name, tensor in others.items())
    assert len(others) == 2 * LAYERS + 3
    # k and v have one head of 6: no rank above that exists.
    assert model.description.rank_of("k_proj") == model.description.rank_of("v_proj") == 6
    assert model.report.notes[0] == "full rank, since the weight has no more: k 6, v 6"
    assert model.report.values()["least_energy_kept"] == pytest.approx(1.0, abs=1e-12)


@pytest.mark.parametrize(
    ("line", "ranks"),
    [
        ("--low-rank-rank 5", {}),
        ("--low-rank-ratio 0.31", {}),
        ("--low-rank-attn-rank 5 --low-rank-mlp-rank 7", {"gate_proj": 7, "down_proj": 7}),
        ("--low-rank-rank 5 --low-rank-ranks k=2,down=9", {"k_proj": 2, "down_proj": 9}),
    ],
)
def test_every_projection_is_the_best_of_its_rank(line: str, ranks: dict[str, int]) -> None:
    model = factorised(line)
    tensors = made(model)
    values = model.report.values()
    for projection in PROJECTIONS:
        rank = ranks.get(projection, 7 if "mlp" in line and projection == "up_proj" else 5)
        assert values[f"rank_{projection}"] == rank
        for layer in range(LAYERS):
            weight = DENSE[f"{whole(layer, projection)}.weight"].double()
            u, s, vt = torch.linalg.svd(weight, full_matrices=False)
            best = u[:, :rank] * s[:rank] @ vt[:rank]
            assert (product(tensors, layer, projection) - best).norm() <= 1e-5
            kept = values[f"layer_{layer}_{projection}_energy_kept"]
            assert kept == pytest.approx(float(energies_of(weight)[:rank].sum()), abs=1e-6)


def test_a_layers_numbers_are_those_of_its_projections_together() -> None:
    model = factorised("--low-rank-rank 4")
    tensors = made(model)
    values = model.report.values()
    for layer in range(LAYERS):
        lost = total = 0.0
        for projection in PROJECTIONS:
            weight = DENSE[f"{whole(layer, projection)}.weight"].double()
            lost += float((weight - product(tensors, layer, projection)).square().sum())
            total += float(weight.square().sum())
        assert values[f"layer_{layer}_energy_kept"] == pytest.approx(1 - lost / total)
        assert values[f"layer_{layer}_error"] == pytest.approx((lost / total) ** 0.5)
    assert values["parameters_before"] == sum(tensor.numel() for tensor in DENSE.values())
    assert values["parameters_after"] == sum(tensor.numel() for tensor in tensors.values())
    table = model.report.table()
    assert table.row_count == LAYERS
    assert f"{values['parameters_after']:,} after" in str(table.caption)


@pytest.mark.parametrize("energy", [0.6, 0.9])
def test_energy_is_kept_in_every_layer_by_no_larger_a_rank_than_needed(energy: float) -> None:
    model = factorised(f"--energy {energy}")
    made(model)
    values = model.report.values()
    for projection in PROJECTIONS:
        rank = values[f"rank_{projection}"]
        assert isinstance(rank, int)
        kept = [
            energies_of(DENSE[f"{whole(layer, projection)}.weight"]).cumsum(0)
            for layer in range(LAYERS)
        ]
        assert min(float(each[rank - 1]) for each in kept) >= energy
        assert rank == 1 or min(float(each[rank - 2]) for each in kept) < energy
    assert least_energy_kept(model) >= energy


@pytest.mark.parametrize("budget", ["0.8", "14K", "12_000"])
def test_a_budget_is_the_models_and_is_kept(budget: str) -> None:
    before = SOURCE.parameter_count()
    most = {"0.8": int(0.8 * before), "14K": 14000, "12_000": 12000}[budget]
    model = factorised(f"--parameter-budget {budget.replace('_', '')}")
    count = sum(tensor.numel() for tensor in made(model).values())
    # Not a step of any projection more would fit.
    smallest_step = LAYERS * min(sum(SOURCE.width_of(name)) for name in PROJECTIONS)
    assert most - smallest_step < count <= most
    assert count == model.description.parameter_count()


def test_a_budget_that_ends_the_search_for_an_energy_is_said() -> None:
    model = factorised("--energy 0.99 --parameter-budget 0.7")
    assert any(
        "--parameter-budget was reached before --energy 0.99" in n for n in model.report.notes
    )
    assert model.description.parameter_count() <= 0.7 * SOURCE.parameter_count()
    with pytest.raises(ValueError, match=r"--parameter-budget \d+: .*smallest ranks.*legal value"):
        factorised("--parameter-budget 0.3")


def test_layers_that_stay_dense() -> None:
    for line in ("--low-rank-rank 3", "--energy 0.5"):
        model = factorised(f"{line} --low-rank-layers 1-1")
        tensors = made(model)
        for layer in (0, 2):
            name = f"{whole(layer, 'o_proj')}.weight"
            assert torch.equal(tensors[name], DENSE[name])
        assert f"{whole(1, 'o_proj')}.A" in tensors
        assert {row.layer for row in model.report.rows} == {1}


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tokenizer and a calibration text."""
    folder = tmp_path_factory.mktemp("source")
    save_small_tokenizer(folder)
    (folder / "text.txt").write_text(TEXT * 20)
    return folder


def outputs(tensors: dict[str, Tensor], low_rank: LowRankConfig, tokens: Tensor) -> Tensor:
    """The hidden states before the head, of the plain reference model in fp64."""
    from tests.support.plain_llama import PlainConfig, PlainLlama

    plain = PlainConfig(
        vocab_size=SOURCE.vocab_size,
        hidden=16,
        ffn=24,
        heads=4,
        kv_heads=1,
        head_dim=6,
        layers=LAYERS,
        arch="cola" if low_rank.low_rank else "dense",
        ranks={name: low_rank.rank_of(name, 16) for name in PROJECTIONS},
        rank=1,
        act="identity",
    )
    logits, _ = PlainLlama(plain).load_canonical(tensors)(tokens)
    return logits.detach()


def test_calibration_keeps_the_models_outputs_better_on_that_text(text: Path) -> None:
    from transformers import AutoTokenizer

    line = "--low-rank-rank 6"
    calibrated_line = f"{line} --calibration {text / 'text.txt'} --calibration-tokens 600"
    calibrated, plain = factorised(calibrated_line, tokenizer=text), factorised(line)
    ids = AutoTokenizer.from_pretrained(text)(TEXT * 20)["input_ids"][: 18 * 32]
    tokens = torch.tensor(ids).view(18, 32)
    exact = outputs(DENSE, LowRankConfig(arch="dense"), tokens)
    errors = []
    for model in (plain, calibrated):
        tensors = made(model)
        found = outputs(tensors, model.description.low_rank, tokens)
        errors.append(float((found - exact).norm() / exact.norm()))
    assert errors[1] < 0.8 * errors[0]
    values = calibrated.report.values()
    assert values["calibration_tokens"] == 18 * 32
    assert "of the outputs" in str(calibrated.report.table().title)
    for row in calibrated.report.rows:
        assert (
            row.fit.output_error is not None and row.fit.output_error < row.fit.weight_error + 1e-6
        )


@pytest.mark.parametrize("known", ["the dog " * 5, TEXT * 20])
def test_text_that_leaves_moments_singular_is_refused(tmp_path: Path, known: str) -> None:
    tokenizer = save_small_tokenizer(tmp_path)
    (tmp_path / "text.txt").write_text(known)
    few = len(tokenizer(known)["input_ids"])
    flags = f"--energy 0.9 --calibration {tmp_path / 'text.txt'}"
    for limit in (1, 23):
        with pytest.raises(ValueError, match=rf"--calibration-tokens {limit}: .*24 .*value: 24$"):
            factorised(f"{flags} --calibration-tokens {limit}", tokenizer=tmp_path)
    if few >= 24:
        factorised(f"{flags} --calibration-tokens 24", tokenizer=tmp_path)
        return
    with pytest.raises(ValueError, match=f"text.txt: {few} tokens .*24 inputs.* of 24 tokens$"):
        factorised(flags, tokenizer=tmp_path)


def test_calibration_tokens_below_whole_sequences_of_the_inputs_are_refused() -> None:
    refuse_few_tokens(24, 10, limit=30)
    refuse_short_text(Path("x"), 24, 10, tokens=30)
    # Two sequences of 10 would be read.
    with pytest.raises(ValueError, match="--calibration-tokens 29: .*nearest legal value: 30"):
        refuse_few_tokens(24, 10, limit=29)
    with pytest.raises(ValueError, match="--calibration x: 20 tokens .* a text of 30 tokens"):
        refuse_short_text(Path("x"), 24, 10, tokens=20)


def test_a_broken_tokenizer_is_named(text: Path, tmp_path: Path) -> None:
    for damage in ("{", '{"model": {"type": "none"}}'):
        (tmp_path / "tokenizer.json").write_text(damage)
        with pytest.raises(ValueError, match=f"{tmp_path}/tokenizer.json: no tokenizer can be"):
            factorised(f"--energy 0.9 --calibration {text / 'text.txt'}", tokenizer=tmp_path)


def test_transformers_has_nothing_to_say_of_the_layer_that_calibrates(
    text: Path, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    from transformers.utils import logging

    logging.enable_propagation()
    source = replace(SOURCE, bos_token_id=5, eos_token_id=(6, 7), pad_token_id=8)
    line = f"--low-rank-rank 6 --calibration {text / 'text.txt'} --calibration-tokens 600"
    made(FactorisedModel(source, reading([]), settings(line), tokenizer=text))
    logging.disable_propagation()
    assert caplog.text == "" and "".join(capfd.readouterr()) == ""


@pytest.mark.parametrize("line", ["--energy 1", "--parameter-budget 5M", "--low-rank-ratio 1.0"])
def test_a_low_rank_model_that_is_larger_than_the_dense_one_is_told_of(line: str) -> None:
    report = factorised(line).report
    assert report.parameters_after > report.parameters_before
    (note,) = [note for note in report.notes if "larger than the dense one" in note]
    assert f"{report.parameters_after:,} parameters instead of {report.parameters_before:,}" in note


def test_calibrated_ranks_by_energy_read_every_layer_twice_and_one_at_a_time(text: Path) -> None:
    asked: list[str] = []
    line = f"--energy 0.9 --calibration {text / 'text.txt'} --calibration-tokens 600"
    model = FactorisedModel(SOURCE, reading(asked), settings(line), tokenizer=text)
    made(model)
    assert least_energy_kept(model) >= 0.9
    layers = [int(name.split(".")[2]) for name in asked if name.startswith("decoder.layers.")]
    runs = [layer for i, layer in enumerate(layers) if i == 0 or layers[i - 1] != layer]
    assert runs == [*range(LAYERS)] * 2
    assert len(layers) == 2 * 9 * LAYERS


def test_lax_starts_with_closed_gates_that_training_can_open() -> None:
    model = factorised("--low-rank-rank 6", arch="lax")
    tensors = made(model)
    low_rank = model.description.low_rank
    assert (low_rank.lax_base, low_rank.lax_gate, low_rank.lax_norm) == ("svd", "tensor", "none")
    for projection in PROJECTIONS:
        prefix = whole(2, projection)
        assert not tensors[f"{prefix}.gate_left"].any()
        assert tensors[f"{prefix}.gate_right"].abs().min() > 0
        assert f"{whole(0, projection)}.gate_left" not in tensors
    linear = made(factorised("--low-rank-rank 6 --lax-gate linear", arch="lax"))
    assert not linear[f"{whole(1, 'q_proj')}.gate_weight"].any()
    assert any("gates begin at 0" in note for note in model.report.notes)
    budget = factorised("--parameter-budget 0.9", arch="lax")
    count = sum(tensor.numel() for tensor in made(budget).values())
    assert count == budget.description.parameter_count() <= 0.9 * SOURCE.parameter_count()


def test_an_activation_is_annealed_unless_the_user_says_otherwise() -> None:
    model = factorised("--low-rank-rank 6", arch="cola")
    low_rank = model.description.low_rank
    assert (low_rank.activation, low_rank.mlp_kind, low_rank.act_anneal) == ("silu", "swiglu", 1000)
    assert model.description.activation_amount == 0.0
    assert any(
        "changes the function: the checkpoint begins without it" in n for n in model.report.notes
    )
    at_once = factorised("--low-rank-rank 6 --low-rank-act-anneal 0", arch="cola")
    assert at_once.description.activation_amount == 1.0
    assert any("quality is lost" in note for note in at_once.report.notes)
    linear = factorised("--low-rank-rank 6 --low-rank-act identity", arch="cola")
    assert linear.description.activation_amount == 1.0 and linear.report.notes == []
    assert factorised("--low-rank-rank 6").description.activation_amount == 1.0


@pytest.mark.parametrize(
    ("line", "arch", "message"),
    [
        ("--energy 1.5", "svd", "--energy 1.5: .*nearest legal value: 1.0"),
        ("--energy 0", "svd", "--energy 0.0: .*nearest legal value: 0.01"),
        ("--energy 0.9 --low-rank-rank 4", "svd", "--low-rank-rank: --energy decides the ranks"),
        ("--parameter-budget lots", "svd", "--parameter-budget lots: .*nearest legal value: 0.5"),
        ("--rank-multiple 8", "svd", "--rank-multiple: .*nearest legal value: --energy 0.9"),
        ("--calibration-tokens 8", "svd", "--calibration-tokens: .*--calibration FILE"),
        ("--lax-gate tensor", "svd", "--lax-gate: .*nearest legal value: --low-rank-arch lax"),
        ("--lax-norm layernorm", "lax", "--lax-norm layernorm: .*nearest legal value: none"),
        ("--lax-gate identity", "lax", "--lax-gate identity: .*nearest legal value: tensor"),
        ("", "dense", "--low-rank-arch dense: .*nearest legal value: svd"),
        ("--low-rank-act-anneal 5", "svd", "--low-rank-act-anneal 5: .*is the identity"),
        ("--low-rank-rank 99", "svd", "--low-rank-rank 99: larger than .*nearest legal value: 16"),
        ("--low-rank-ranks k=7", "svd", "--low-rank-ranks k=7: .*6 by 16; nearest .*: k=6"),
        ("--calibration none.txt", "svd", "--calibration none.txt: the source has no tokenizer"),
    ],
)
def test_refusals_name_flag_value_and_nearest(line: str, arch: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        factorised(line, arch)


def test_a_low_rank_source_and_broken_weights_are_refused() -> None:
    low_rank = factorised("--low-rank-rank 4").description
    with pytest.raises(ValueError, match="--low-rank-arch svd: the source is low-rank already"):
        FactorisedModel(low_rank, reading(), settings("--low-rank-rank 4"))
    broken = {name: tensor * float("nan") for name, tensor in DENSE.items()}
    model = FactorisedModel(SOURCE, broken.__getitem__, settings("--low-rank-rank 4"))
    with pytest.raises(ValueError, match="layer 0, q_proj: a weight that is not finite"):
        made(model)


def test_flags_that_were_given_are_known() -> None:
    parser = ToolParser("")
    add_factorisation_flags(parser)
    assert given_factorisation_flags(parser.parse_args([])) == []
    line = ["--low-rank-act-anneal", "0", "--energy", "0.5", "--calibration", "x"]
    given = given_factorisation_flags(parser.parse_args(line))
    assert given == ["--low-rank-act-anneal", "--energy", "--calibration"]
    assert given_factorisation_flags(Namespace()) == []
