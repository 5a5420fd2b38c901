"""Truncated SVD of one dense weight: W `[out, in]` ≈ B·A with B `[out, r]` and A `[r, in]`.

The best B·A of rank r is U·Uᵀ·W with the r leading left singular vectors U of W. With calibration
(SVD-LLM) it is what changes the outputs on the calibration data least: with H = S·Sᵀ the mean of
x·xᵀ over the inputs x, SVD-LLM takes the SVD of the whitened W·S and multiplies S⁻¹ back. That is
again U·Uᵀ·W, now with the left singular vectors of W·S, which are the eigenvectors of W·H·Wᵀ. So
neither a Cholesky factor nor an inverse is needed, and a singular H (fewer tokens than inputs, a
channel that is always zero) is no special case.

Everything is in fp64. The eigenvectors are orthonormal to the last digits, so B·A at full rank is W
itself, and the energies are what the projection really keeps.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import sqrt

import torch
from torch import Tensor

RIDGE = 1e-8
"""What is added to H's diagonal, as a share of its mean. It only decides where the data decide
nothing: among directions that no calibration token reaches, those are kept first that carry the
most of W."""


@dataclass(frozen=True)
class Factors:
    """A low-rank projection: W ≈ B·A."""

    A: Tensor
    """`[r, in]`."""
    B: Tensor
    """`[out, r]`."""


@dataclass(frozen=True)
class Fit:
    """How near factors are to the weight that they replace, each measured on the factors as they
    are stored, after their rounding."""

    weight_error: float
    """‖W − B·A‖/‖W‖, Frobenius."""
    output_error: float | None
    """‖(W − B·A)·X‖/‖W·X‖ over the inputs X of the calibration data; None without calibration."""

    @property
    def error(self) -> float:
        """That of the outputs with calibration, else that of the weight."""
        return self.weight_error if self.output_error is None else self.output_error

    @property
    def energy(self) -> float:
        """The share of ‖W‖² (with calibration: of ‖W·X‖²) that is kept: 1 − error²."""
        return 1.0 - self.error**2


@dataclass(frozen=True)
class Decomposition:
    """W = U·M with orthonormal columns of U, in the order of what they keep; fp64."""

    U: Tensor
    """`[out, k]`, k = min(out, in)."""
    M: Tensor
    """Uᵀ·W, `[k, in]`."""
    energies: Tensor
    """‖M_i‖², with calibration the mean of (M_i·x)², `[k]`. Their sum is ‖W‖², or the mean of
    ‖W·x‖²."""

    def factors(self, rank: int, dtype: torch.dtype) -> Factors:
        """The best factors of a rank, rounded to `dtype`.

        A column of B and the row of A that belongs to it get the same norm, √‖M_i‖. Without
        calibration that is B = U·√Σ and A = √Σ·Vᵀ. With calibration SVD-LLM's own split would grow
        with the number of tokens; the product is the same.

        Raises:
            ValueError: for a rank that is not between 1 and min(out, in).
        """
        largest = self.U.shape[1]
        if not 1 <= rank <= largest:
            raise ValueError(
                f"rank {rank}: a matrix of {self.U.shape[0]} by {self.M.shape[1]} has ranks from 1 "
                f"to {largest}; nearest legal value: {min(max(rank, 1), largest)}"
            )
        rows = self.M[:rank]
        root = rows.norm(dim=1, keepdim=True).sqrt()
        # A row of zeros (a weight of lower rank) stays one.
        scale = torch.where(root > 0, root, 1.0)
        a = (rows / scale).to(dtype).contiguous()
        b = (self.U[:, :rank] * root.t()).to(dtype).contiguous()
        return Factors(a, b)


def decompose(weight: Tensor, moment: Tensor | None = None) -> Decomposition:
    """The decomposition of W whose first r parts are its best approximation of rank r.

    Args:
        weight: W `[out, in]`, of any dtype, on the device where it is computed.
        moment: H `[in, in]`, the mean of x·xᵀ over the calibration data's inputs; None: the plain
            truncated SVD.

    Raises:
        ValueError: for a weight or a moment that is not finite.
    """
    core, basis = _core(weight)
    vectors = torch.linalg.eigh(_gram(core, moment)).eigenvectors.flip(1)
    rows = vectors.t() @ core
    columns = vectors if basis is None else basis @ vectors
    return Decomposition(columns, rows, _energies(rows, moment))


def energies(weight: Tensor, moment: Tensor | None = None) -> Tensor:
    """`decompose(weight, moment).energies`, to rounding, for less work: `[k]`, descending, fp64.

    Args:
        weight: as for `decompose`.
        moment: as for `decompose`.

    Raises:
        ValueError: for a weight or a moment that is not finite.
    """
    core, _ = _core(weight)
    return torch.linalg.eigvalsh(_gram(core, moment)).flip(0).clamp_min(0.0)


def fit(weight: Tensor, factors: Factors, moment: Tensor | None = None) -> Fit:
    """The errors of factors.

    Args:
        weight: W `[out, in]`.
        factors: of W, of any dtype.
        moment: H `[in, in]` of the calibration data, or None.
    """
    whole = weight.double()
    missing = whole - factors.B.double() @ factors.A.double()
    output_error = None
    if moment is not None:
        h = moment.double()
        output_error = _ratio(
            ((missing @ h) * missing).sum().clamp_min(0.0), ((whole @ h) * whole).sum()
        )
    return Fit(_ratio(missing.square().sum(), whole.square().sum()), output_error)


def _core(weight: Tensor) -> tuple[Tensor, Tensor | None]:
    """C `[k, in]` and Q `[out, k]` with W = Q·C and orthonormal columns of Q (None: Q = 1), so that
    the eigenvalue problem is of the smaller side's size."""
    whole = weight.double()
    if not whole.isfinite().all():
        raise ValueError("a weight that is not finite has no truncated SVD")
    if whole.shape[0] <= whole.shape[1]:
        return whole, None
    basis, core = torch.linalg.qr(whole)
    return core, basis


def _gram(core: Tensor, moment: Tensor | None) -> Tensor:
    """C·Cᵀ, or C·H·Cᵀ with the ridge in H: `[k, k]`."""
    if moment is None:
        return core @ core.t()
    h = moment.to(core)
    if not h.isfinite().all():
        raise ValueError("the inputs of the calibration data are not finite")
    ridge = RIDGE * h.diagonal().mean()
    if ridge == 0:
        # No token gives this projection any input: nothing distinguishes the directions but W.
        return core @ core.t()
    gram = core @ h @ core.t() + ridge * (core @ core.t())
    return (gram + gram.t()) / 2


def _energies(rows: Tensor, moment: Tensor | None) -> Tensor:
    weighted = rows if moment is None else rows @ moment.to(rows)
    return (weighted * rows).sum(dim=1).clamp_min(0.0)


def _ratio(missing: Tensor, whole: Tensor) -> float:
    """√(missing/whole); 0 where there is nothing to miss."""
    return sqrt(float(missing / whole)) if whole > 0 else sqrt(float(missing))
