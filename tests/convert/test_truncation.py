"""Truncated SVD against torch's SVD of the whole matrix, and with calibration against SVD-LLM's own
formula and against the outputs themselves."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from megatron.boost.conversion.truncation import decompose, energies, fit

SHAPES = [(24, 24), (12, 40), (40, 12)]


def weight_of(shape: tuple[int, int], seed: int = 0) -> Tensor:
    """A matrix whose singular values fall over six orders of magnitude."""
    generator = torch.Generator().manual_seed(seed)
    left, right = (torch.randn(n, n, generator=generator, dtype=torch.float64) for n in shape)
    k = min(shape)
    values = torch.logspace(0, -6, k, dtype=torch.float64)
    return torch.linalg.qr(left)[0][:, :k] * values @ torch.linalg.qr(right)[0][:k]


def inputs_of(width: int, tokens: int) -> Tensor:
    """Inputs `[width, tokens]` whose channels are of different sizes and correlated."""
    generator = torch.Generator().manual_seed(width + tokens)
    mixing = torch.randn(width, width, generator=generator, dtype=torch.float64)
    mixing *= torch.logspace(1, -1, width, dtype=torch.float64)
    return mixing @ torch.randn(width, tokens, generator=generator, dtype=torch.float64)


def moment_of(inputs: Tensor) -> Tensor:
    return inputs @ inputs.t() / inputs.shape[1]


def product(weight: Tensor, rank: int, moment: Tensor | None = None) -> Tensor:
    factors = decompose(weight, moment).factors(rank, torch.float64)
    assert factors.A.shape == (rank, weight.shape[1])
    assert factors.B.shape == (weight.shape[0], rank)
    return factors.B @ factors.A


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("rank", [1, 5, 12])
def test_is_the_truncated_svd(shape: tuple[int, int], rank: int) -> None:
    weight = weight_of(shape)
    u, s, vt = torch.linalg.svd(weight, full_matrices=False)
    factors = decompose(weight).factors(rank, torch.float64)
    best = u[:, :rank] * s[:rank] @ vt[:rank]
    assert (factors.B @ factors.A - best).norm() <= 1e-12
    # Eckart and Young: no matrix of this rank is nearer than the values that are left out.
    assert (factors.B @ factors.A - weight).norm() <= s[rank:].norm() + 1e-12
    # The split: both factors' Gram matrices are the singular values.
    for gram in (factors.A @ factors.A.t(), factors.B.t() @ factors.B):
        assert (gram - s[:rank].diag()).norm() <= 1e-9
    measured = fit(weight, factors)
    assert measured.output_error is None
    assert measured.energy == pytest.approx(float(s[:rank].square().sum() / s.square().sum()))
    assert measured.weight_error == pytest.approx(float(s[rank:].norm() / s.norm()), abs=1e-12)


@pytest.mark.parametrize("shape", SHAPES)
def test_the_full_rank_is_the_weight_itself_with_and_without_calibration(
    shape: tuple[int, int],
) -> None:
    weight = weight_of(shape)
    few_tokens = moment_of(inputs_of(shape[1], 3))
    for moment in (None, moment_of(inputs_of(shape[1], 200)), few_tokens):
        assert (product(weight, min(shape), moment) - weight).norm() <= 1e-14 * weight.norm() * 40


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("rank", [1, 4, 9])
def test_calibrated_factors_are_those_of_svd_llm(shape: tuple[int, int], rank: int) -> None:
    weight = weight_of(shape)
    inputs = inputs_of(shape[1], 500)
    root = torch.linalg.cholesky(inputs @ inputs.t())
    u, s, vt = torch.linalg.svd(weight @ root, full_matrices=False)
    as_published = u[:, :rank] * s[:rank] @ torch.linalg.solve(root.t(), vt[:rank].t()).t()

    factors = decompose(weight, moment_of(inputs)).factors(rank, torch.float64)
    outputs = weight @ inputs
    assert ((factors.B @ factors.A - as_published) @ inputs).norm() <= 1e-7 * outputs.norm()
    # The whitened error is the error of the outputs on the calibration data.
    lost = float((outputs - factors.B @ (factors.A @ inputs)).norm() / outputs.norm())
    assert lost == pytest.approx(float(s[rank:].norm() / s.norm()), rel=1e-6, abs=1e-9)
    measured = fit(weight, factors, moment_of(inputs))
    assert measured.output_error == pytest.approx(lost, rel=1e-9)
    assert measured.error == measured.output_error
    assert measured.energy == pytest.approx(1 - lost**2, rel=1e-9)


def test_calibration_loses_less_of_the_outputs_and_more_of_the_weight() -> None:
    weight, inputs = weight_of((30, 20)), inputs_of(20, 400)
    moment = moment_of(inputs)
    for rank in (2, 6, 12):
        plain, calibrated = product(weight, rank), product(weight, rank, moment)
        losses = [((weight - each) @ inputs).norm() for each in (plain, calibrated)]
        assert losses[1] < 0.9 * losses[0]
        assert (weight - calibrated).norm() > (weight - plain).norm()


def test_directions_that_no_token_reaches_are_kept_by_their_weight() -> None:
    """Three tokens say nothing of 17 of 20 directions; beyond rank 3 the weight decides."""
    weight, inputs = weight_of((20, 20)), inputs_of(20, 3)
    kept = product(weight, 8, moment_of(inputs))
    assert ((weight - kept) @ inputs).norm() <= 1e-6 * (weight @ inputs).norm()
    values = torch.linalg.svdvals(weight)
    assert (weight - kept).norm() <= values[5:].norm()


def test_inputs_that_are_all_zero_leave_the_plain_svd() -> None:
    weight = weight_of((12, 12))
    moment = torch.zeros(12, 12, dtype=torch.float64)
    assert (product(weight, 4, moment) - product(weight, 4)).norm() <= 1e-14
    assert fit(weight, decompose(weight).factors(4, torch.float64), moment).output_error == 0.0


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("calibrated", [False, True])
def test_energies_are_what_each_rank_keeps(shape: tuple[int, int], calibrated: bool) -> None:
    weight = weight_of(shape)
    moment = moment_of(inputs_of(shape[1], 300)) if calibrated else None
    found, of_decomposition = energies(weight, moment), decompose(weight, moment).energies
    assert found.shape == (min(shape),)
    total = weight.square().sum() if moment is None else ((weight @ moment) * weight).sum()
    torch.testing.assert_close(found.sum(), total, rtol=1e-7, atol=0)
    torch.testing.assert_close(found, of_decomposition, rtol=1e-6, atol=1e-7 * float(total))
    for rank in (1, 7):
        kept = fit(weight, decompose(weight, moment).factors(rank, torch.float64), moment).energy
        assert kept == pytest.approx(float(found[:rank].sum() / found.sum()), abs=1e-7)


def test_factors_have_the_models_dtype_and_errors_are_those_of_the_rounded_ones() -> None:
    weight = weight_of((16, 16)).bfloat16()
    factors = decompose(weight).factors(16, torch.bfloat16)
    assert factors.A.dtype == factors.B.dtype == torch.bfloat16
    assert factors.A.is_contiguous() and factors.B.is_contiguous()
    error = fit(weight, factors).weight_error
    exact = factors.B.double() @ factors.A.double() - weight.double()
    assert error == pytest.approx(float(exact.norm() / weight.double().norm()), rel=1e-9)
    assert 1e-4 < error < 1e-2


def test_a_weight_of_lower_rank_leaves_no_infinities() -> None:
    weight = torch.outer(torch.arange(8.0), torch.arange(6.0))
    factors = decompose(weight).factors(6, torch.float32)
    assert factors.A.isfinite().all() and factors.B.isfinite().all()
    torch.testing.assert_close(factors.B @ factors.A, weight, rtol=1e-6, atol=1e-5)
    zero = torch.zeros(4, 3)
    assert fit(zero, decompose(zero).factors(2, torch.float32)).energy == 1.0


def test_refuses_by_name() -> None:
    weight = weight_of((12, 40))
    for rank, nearest in ((0, 1), (13, 12)):
        with pytest.raises(ValueError, match=f"rank {rank}: .*nearest legal value: {nearest}$"):
            decompose(weight).factors(rank, torch.float32)
    with pytest.raises(ValueError, match="not finite"):
        decompose(torch.full((3, 3), float("nan")))
    with pytest.raises(ValueError, match="calibration data are not finite"):
        energies(weight, torch.full((40, 40), float("inf")))
