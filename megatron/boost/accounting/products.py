"""The matrix products of a layer and of the head on one rank, by shape.

They are the operations that `flops.py` counts as a sum, one by one, with the shapes that decide how
fast a GEMM is. Core attention and LaX's gates are not among them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Literal

from megatron.boost.accounting.sizes import Layout, Model, Projection

Role = Literal["down", "up", "full", "head"]
"""A of a pair, B of a pair, a full-rank weight, the language-model head."""


@dataclass(frozen=True)
class Product:
    """`number` products `[m, k]·[k, n]` of one shape, computed by one call."""

    members: tuple[str, ...]
    """The projections that it computes, e.g. ("q_proj", "k_proj", "v_proj")."""
    role: Role
    m: int
    n: int
    k: int
    number: int = 1

    @property
    def name(self) -> str:
        """For people: `q, k, v down`."""
        names = ", ".join(member.removesuffix("_proj") for member in self.members)
        return names if self.role in ("full", "head") else f"{names} {self.role}"

    @property
    def flops(self) -> int:
        """2·m·n·k of each."""
        return 2 * self.number * self.m * self.n * self.k

    def bytes(self, itemsize: int) -> int:
        """Both operands and the result, each once."""
        m, n, k = self.m, self.n, self.k
        return self.number * itemsize * (m * k + k * n + m * n)

    @property
    def input_gradient(self) -> Product:
        """dX `[m, k]` = dY·W."""
        return Product(self.members, self.role, self.m, self.k, self.n, self.number)

    @property
    def weight_gradient(self) -> Product:
        """dW `[n, k]` = dYᵀ·X, summed over the m tokens."""
        return Product(self.members, self.role, self.n, self.k, self.m, self.number)


def layer_products(model: Model, layout: Layout, layer: int) -> tuple[Product, ...]:
    """The forward's products of one layer on one rank, in order.

    BTP and vanilla compute a group's down-projections as one product and those of its
    up-projections that have one shape as a batch, unless grouping is off; full-rank projections
    are computed one by one.
    """
    low_rank = model.settings(layer).low_rank
    pairs = _btp_products if model.strategy(layer) == "btp" else _vanilla_products
    count = pairs if low_rank else _full_rank_products
    return tuple(
        product
        for position, group in enumerate(model.groups(layer))
        for product in count(model, layout, layer, position, group)
    )


def recomputed_products(model: Model, layout: Layout, layer: int) -> tuple[Product, ...]:
    """What checkpointing at the latents computes again: the up-projections of q, k, v, gate and up,
    and with the second residual input rebuilt that of o."""
    settings = model.settings(layer)
    if not settings.recompute:
        return ()
    closing = {"down_proj"} if settings.recompute_residual else {"o_proj", "down_proj"}
    products = layer_products(model, layout, layer)
    return tuple(p for p in products if p.role == "up" and not closing & set(p.members))


def head_product(model: Model, layout: Layout) -> Product:
    """The logits of this rank's rows of the vocabulary."""
    rows = model.padded_vocab_size // layout.tensor_parallel
    return Product(("head",), "head", layout.tokens, rows, model.hidden_size)


def _btp_products(
    model: Model, layout: Layout, layer: int, position: int, group: Sequence[Projection]
) -> Iterator[Product]:
    """A `[Σr, in/T]`, B `[out/T, r]`."""
    n, tp = layout.tokens, layout.tensor_parallel
    for run in _runs(model, layer, group):
        width = sum(projection.latent_width for projection in run)
        yield Product(_names(run), "down", n, width, run[0].in_features // tp)
        for shape in _of_one_shape(run):
            out = shape[0].out_features // tp
            yield Product(_names(shape), "up", n, out, _rank(shape[0]), len(shape))


def _vanilla_products(
    model: Model, layout: Layout, layer: int, position: int, group: Sequence[Projection]
) -> Iterator[Product]:
    """A `[Σr/T, in]`, B `[out, r/T]`."""
    n, tp = layout.tokens, layout.tensor_parallel
    for run in _runs(model, layer, group):
        width = sum(projection.latent_width for projection in run) // tp
        yield Product(_names(run), "down", n, width, run[0].in_features)
        for shape in _of_one_shape(run):
            rank = _rank(shape[0]) // tp
            yield Product(_names(shape), "up", n, shape[0].out_features, rank, len(shape))


def _full_rank_products(
    model: Model, layout: Layout, layer: int, position: int, group: Sequence[Projection]
) -> Iterator[Product]:
    """q, k, v, gate and up `[out/T, in]`, o and down `[out, in/T]`."""
    n, tp = layout.tokens, layout.tensor_parallel
    for projection in group:
        opens = position in (0, 2)
        out, size_in = projection.out_features, projection.in_features
        yield Product(
            _names([projection]),
            "full",
            n,
            out // tp if opens else out,
            size_in if opens else size_in // tp,
        )


def _runs(model: Model, layer: int, group: Sequence[Projection]) -> list[Sequence[Projection]]:
    return [group] if model.settings(layer).grouping else [[projection] for projection in group]


def _of_one_shape(run: Sequence[Projection]) -> list[list[Projection]]:
    """Neighbours whose up-projections have one shape."""
    return [list(found) for _, found in groupby(run, key=lambda p: (p.out_features, p.rank))]


def _rank(projection: Projection) -> int:
    assert projection.rank is not None
    return projection.rank


def _names(projections: Sequence[Projection]) -> tuple[str, ...]:
    return tuple(projection.short_name for projection in projections)
