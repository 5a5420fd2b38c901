"""The time of what a layer does between its products: norms, residuals, φ, rotary embedding, gate.

All of it is bound by memory: bytes read and written / (bandwidth · efficiency). A `Sweep` is one
such operation with its bytes in both directions and the kernels that it takes. Listed are the
kernels of `csrc`, each of which reads its operands once and writes its results once. Legend: n
tokens, d hidden, f FFN width, q and kv widths of query and key, r rank, T tensor-parallel size.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from megatron.boost.accounting.flops import layer_gate_flops_per_token
from megatron.boost.accounting.sizes import Layout, Model

_STATISTIC_BYTES = 4


@dataclass(frozen=True)
class Sweep:
    """One operation over a layer's tensors, of one micro-batch on one rank."""

    name: str
    forward_bytes: float
    backward_bytes: float
    forward_kernels: int = 1
    backward_kernels: int = 1
    again: bool = False
    """Whether checkpointing at the latents computes it again."""


def layer_sweeps(model: Model, layout: Layout, layer: int) -> tuple[Sweep, ...]:
    """Everything between the products of one layer."""
    parts = _btp if model.strategy(layer) == "btp" else _with_norms
    return tuple(parts(model, layout, layer))


def _btp(model: Model, layout: Layout, layer: int) -> Iterator[Sweep]:
    """Residual and statistics on `[n, d/T]`, latents on `[n, r]`, heads and FFN on shards."""
    n, number, tp = layout.tokens, layout.dtype.itemsize, layout.tensor_parallel
    shard = n * model.hidden_size / tp * number
    # x += Δ with Σx²: x and Δ read, x written. Backward dx = dresidual + c∘x.
    yield Sweep("residual and statistics", 2 * 3 * shard, 2 * 3 * shard, 2, 2)
    yield _latents(model, layer, n * number)
    yield from _crossing(model, layout, layer)
    opening = (*model.groups(layer)[0], *model.groups(layer)[2])
    folded = sum(p.rank or 0 for p in opening) * model.hidden_size / tp * number
    # γ∘A, and backward M∘γ and Σ_r M∘A.
    yield Sweep("norm weights", 2 * folded, 4 * folded, 2, 2)
    yield from _between(model, layout, layer, tp, tp)


def _with_norms(model: Model, layout: Layout, layer: int) -> Iterator[Sweep]:
    """Full-rank and vanilla: residual and RMSNorm on whole tokens, or the share of them that
    sequence parallelism leaves."""
    n, number, tp = layout.tokens, layout.dtype.itemsize, layout.tensor_parallel
    settings, vanilla = model.settings(layer), model.strategy(layer) == "vanilla"
    stream = n * model.hidden_size // layout.split_tokens(model) * number
    yield Sweep("residual", 2 * 3 * stream, 0, 2, 0)
    # Backward: dy and x read, the residual's gradient read and written.
    yield Sweep("norm", 2 * 2 * stream, 2 * 4 * stream, 2, 2)
    if vanilla:
        yield _latents(model, layer, n * number / tp)
        yield from _crossing(model, layout, layer)
    replicated = vanilla and settings.vanilla_attention == "replicated"
    if vanilla and not replicated and tp > 1:
        heads = (2 * model.query_width + 2 * model.key_width) * n * number
        # Whole q, k, v to this rank's heads, and the heads' outputs side by side.
        yield Sweep("heads sliced and gathered", heads * (1 + 1 / tp), heads * (1 + 1 / tp), 4, 4)
    yield from _between(model, layout, layer, 1 if replicated else tp, 1 if vanilla else tp)


def _latents(model: Model, layer: int, bytes_of_one: float) -> Sweep:
    """H read, z written. Backward dz and H read, dH written, and z once more for dB."""
    wide = model.latent_width(layer) * bytes_of_one
    z = sum(p.rank or 0 for p in model.projections(layer)) * bytes_of_one
    return Sweep("latents", wide + z, (z + 2 * wide) + (wide + z), 4, 8, again=True)


def _crossing(model: Model, layout: Layout, layer: int) -> Iterator[Sweep]:
    """LaX: the gate's reads and writes, the sum and the norm over r."""
    if not model.place(layer).crosses:
        return
    settings = model.settings(layer)
    latents = layout.tokens * model.latent_width(layer) * layout.dtype.itemsize
    gated = layer_gate_flops_per_token(model, layer) > 0
    # z₋₁ read and G(z₋₁) written by the gate (twice for a tensor gate's two products); H, G read
    # and w written; w read and v written by the norm.
    gate = 2 * (2 if settings.lax_gate == "tensor" else 1) if gated else 0
    norm = 2 if settings.lax_norm != "none" else 0
    number = (gate + 3 + norm) * latents
    kernels = 7 * (gate // 2) + 4 + (4 if norm else 0)
    yield Sweep("latent crossing", number, 2 * number, kernels, 2 * kernels, again=True)


def _between(
    model: Model, layout: Layout, layer: int, heads_share: int, ffn_share: int
) -> Iterator[Sweep]:
    """Rotary embedding of q and k with the change of q, k and v's layout, and what joins gate and
    up: g and v read, m written; backward dm, g and v read, dg and dv written."""
    n, number = layout.tokens, layout.dtype.itemsize
    heads = (model.query_width + 2 * model.key_width) / heads_share * n * number
    yield Sweep("rotary embedding", 2 * heads, 2 * heads, again=True)
    ffn = n * model.ffn_hidden_size / ffn_share * number
    yield Sweep("gate", 3 * ffn, 5 * ffn, again=True)
