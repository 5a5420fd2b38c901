"""Every op at the sizes and in the layouts that the layers of one rank call it with, and the least
that it must do.

`moved_bytes` is the least traffic with memory: each tensor that the op is given is read once, each
that it gives or changes is written once, and nothing in between touches memory. With n tokens,
k = d/T, f = the rank's share of the FFN, w = Σ r of grouped latents, R = d rows of a whole token,
and e bytes a number (statistics and main gradients have 4):

| op | read | written |
|---|---|---|
| `rms_stats` | n·k·e | 4·n, slots |
| `residual_add_rms_stats` | 2·n·k·e | n·k·e, 4·n, slots |
| `read_statistics` | slots | 4·n |
| `residual_gradient` | 2·n·k·e, 4·n | n·k·e |
| `latent_epilogue` | n·w·e, 4·n; norm: γ, β; LaX's crossing: n·w·e | n·w·e; crossing: n·w·e |
| `latent_epilogue_backward` | 2·n·w·e, 4·n; norm: γ, β | n·w·e, 4·n; norm: dγ, dβ |
| `fold_gamma` | w·k·e, γ | w·k·e |
| `fold_gamma_backward` | M, w·k·e, γ | w·k·e, dγ |
| `fold_gamma_accumulate` | M, w·k·e, γ, 4·w·k | 4·w·k, dγ |
| `gated_product` | 2·n·f·e | n·f·e |
| `gated_product_backward` | 3·n·f·e | 2·n·f·e |
| `rotary_` | 2·n·k·e, cos, sin | 2·n·k·e |
| `rotary_backward` | 3·n·k·e, cos, sin | 3·n·k·e |
| `rms_norm` | n·k·e, γ | n·k·e, 4·n/T |
| `rms_norm_backward` | 3·n·k·e, γ, 4·n/T | n·k·e, dγ |

Slots are `statistics_columns` numbers a token. `rms_norm` has n/T whole tokens, as at the borders
of BTP and in full-rank layers with sequence parallelism. M = dHᵀ·x is as wide as
`down_projection_wgrad` leaves it: fp32 on CUDA, on CPU the weights' own.

The GEMMs (`flop` > 0) are judged by 2·n·(numbers in the weights) operations instead. A group's
weights lie evenly spaced, as Megatron's parameter and gradient buffers have them.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from benchmarks.variants import Sizes
from boost_layers.ops import message_dtype, split_members, statistics_columns
from boost_layers.ops.dispatch import cuda_architectures, problem_of_csrc

_EPS = 1e-6
_SEED = 1234
_MODULES = {"csrc": "csrc", "triton": "triton_kernels", "reference": "reference"}


def implementation(name: str, device_type: str) -> ModuleType:
    """The module that holds the ops as `csrc`, `triton` or `reference` has them.

    Raises:
        ValueError: if it is not there for that type of device.
    """
    if name == "csrc":
        problem = problem_of_csrc()
        if problem is None and device_type == "cuda" and not cuda_architectures():
            problem = "it is built without CUDA"
        if problem is not None:
            raise ValueError(f"csrc: {problem} (`make ext` builds it)")
    if name == "triton" and device_type != "cuda":
        raise ValueError(f"triton: not for {device_type}")
    if name == "triton" and importlib.util.find_spec("triton") is None:
        raise ValueError("triton: it is not installed")
    return importlib.import_module(f"boost_layers.ops.{_MODULES[name]}")


@dataclass(frozen=True, kw_only=True)
class RankSizes:
    """What one rank of a tensor-parallel group computes on."""

    tp: int
    sequence: int
    batch: int
    hidden: int
    """d of the whole model."""
    width: int
    """k = d/T, and the width of this rank's heads."""
    ffn: int
    """This rank's share, f."""
    heads: int
    """This rank's."""
    rank: int

    @classmethod
    def of(cls, sizes: Sizes, tp: int) -> RankSizes:
        """One rank's share of a model."""
        return cls(
            tp=tp,
            sequence=sizes.sequence,
            batch=sizes.micro_batch,
            hidden=sizes.hidden,
            width=sizes.hidden // tp,
            ffn=sizes.ffn // tp,
            heads=sizes.heads // tp,
            rank=sizes.rank,
        )

    @property
    def tokens(self) -> int:
        """n."""
        return self.sequence * self.batch

    @property
    def head(self) -> int:
        """Width of one head."""
        return self.width // self.heads


@dataclass
class Maker:
    """Makes the tensors of one call from a seed, the same whoever is called."""

    device: torch.device
    dtype: torch.dtype
    overwritten: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    """Tensors that the call changes, and what they hold before it."""
    given: list[Tensor] = field(default_factory=list)
    """What the call reads."""
    places: list[Tensor] = field(default_factory=list)
    """What it only writes."""

    def __post_init__(self) -> None:
        self._generator = torch.Generator(self.device).manual_seed(_SEED)

    def normal(self, *shape: int, dtype: torch.dtype | None = None, scale: float = 1.0) -> Tensor:
        """Normally distributed numbers."""
        # Of a dtype that every device's generator has.
        numbers = torch.randn(shape, generator=self._generator, device=self.device)
        made = numbers.mul_(scale).to(dtype or self.dtype)
        self.given.append(made)
        return made

    def changed(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """As `normal`, for a tensor that the call changes."""
        tensor = self.normal(*shape, dtype=dtype)
        self.overwritten.append((tensor, tensor.clone()))
        return tensor

    def weights(self, count: int, size_out: int, size_in: int) -> tuple[Tensor, ...]:
        """A group's weights `[size_out, size_in]`, by fan-in."""
        return self.normal(count, size_out, size_in, scale=size_in**-0.5).unbind(0)

    def statistics(self, tokens: int, hidden: int) -> Tensor:
        """S `[n, 1]` of tokens whose numbers are of size one."""
        made = torch.full((tokens, 1), float(hidden), device=self.device)
        self.given.append(made)
        return made

    def members(self, tokens: int, widths: Sequence[int]) -> list[Tensor]:
        """Matrices `[n, widths[i]]`, one after the other in memory."""
        return split_members(self.normal(tokens * sum(widths)), tokens, list(widths))

    def batch_first(self, sequence: int, batch: int, *rest: int) -> Tensor:
        """`[s, b, …]` in the memory order of `[b, s, …]`: what attention gives and takes."""
        return self.normal(batch, sequence, *rest).transpose(0, 1)

    def out(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """For a result that the call is given a place for."""
        place = torch.zeros(shape, dtype=dtype or self.dtype, device=self.device)
        self.places.append(place)
        return place


@dataclass(frozen=True)
class Prepared:
    """A call with its arguments."""

    run: Callable[[], object]
    overwritten: Sequence[tuple[Tensor, Tensor]] = ()

    def refresh(self) -> None:
        """Give the tensors that the call changes the contents they had."""
        for tensor, contents in self.overwritten:
            tensor.copy_(contents)


Build = Callable[[Maker, Any], Callable[[], object]]
"""From a maker and a module with the ops to a call."""


@dataclass(frozen=True, kw_only=True)
class OpCase:
    """One op as the layers call it."""

    key: str
    op: str
    """Its name in `boost_layers.ops`."""
    build: Build
    moved_bytes: int = 0
    flop: int = 0

    def prepare(self, device: torch.device, dtype: torch.dtype, ops: ModuleType) -> Prepared:
        """The call to `ops`, with arguments of its own."""
        maker = Maker(device, dtype)
        return Prepared(self.build(maker, ops), maker.overwritten)


def copy_case(moved_bytes: int) -> OpCase:
    """A copy that reads and writes as many bytes in all."""
    numbers = max(moved_bytes // 8, 1)

    def build(m: Maker, _: Any) -> Callable[[], object]:
        source = m.normal(numbers, dtype=torch.float32)
        return partial(torch.empty_like(source).copy_, source)

    return OpCase(key="copy", op="copy_", build=build, moved_bytes=8 * numbers)


def op_cases(sizes: RankSizes, dtype: torch.dtype, device_type: str) -> list[OpCase]:
    """Every op of `boost_layers.ops` that is dispatched, at those sizes."""
    wide_m = torch.float32 if device_type == "cuda" else dtype
    return [
        *_statistics(sizes, dtype),
        *_latents(sizes, dtype),
        *_folding(sizes, dtype, wide_m),
        *_product(sizes, dtype, "swiglu"),
        *_product(sizes, dtype, "product"),
        *_rotary(sizes, dtype),
        *_rms_norm(sizes, dtype),
        *_down_projections(sizes),
        *_up_projections(sizes, "qkv", 3, sizes.width),
        *_up_projections(sizes, "gate_up", 2, sizes.ffn),
    ]


def _statistics(s: RankSizes, dtype: torch.dtype) -> Iterator[OpCase]:
    n, k, e = s.tokens, s.width, dtype.itemsize
    message = message_dtype(dtype)
    columns = statistics_columns(message, s.tp)
    slots = n * columns * message.itemsize

    def rms_stats(m: Maker, ops: Any) -> Callable[[], object]:
        return partial(ops.rms_stats, m.normal(n, k), m.out(n, columns, dtype=message), 0)

    def residual_add(m: Maker, ops: Any) -> Callable[[], object]:
        x, delta, place = m.changed(n, k), m.normal(n, k), m.out(n, columns, dtype=message)
        return partial(ops.residual_add_rms_stats, x, delta, place, 0)

    def read_statistics(m: Maker, ops: Any) -> Callable[[], object]:
        return partial(ops.read_statistics, m.normal(n, columns, dtype=message))

    def residual_gradient(m: Maker, ops: Any) -> Callable[[], object]:
        ds = m.normal(n, 1, dtype=torch.float32)
        return partial(ops.residual_gradient, m.normal(n, k), m.normal(n, k), ds)

    for op, build, moved in (
        ("rms_stats", rms_stats, n * k * e + 4 * n + slots),
        ("residual_add_rms_stats", residual_add, 3 * n * k * e + 4 * n + slots),
        ("read_statistics", read_statistics, slots + 4 * n),
        ("residual_gradient", residual_gradient, 3 * n * k * e + 4 * n),
    ):
        yield OpCase(key=op, op=op, build=build, moved_bytes=moved)


def _latents(s: RankSizes, dtype: torch.dtype) -> Iterator[OpCase]:
    """CoLA's q, k, v and gate, up; LaX's q, k, v."""
    yield from _latents_of_cola(s, dtype, "qkv", 3)
    yield from _latents_of_cola(s, dtype, "gate_up", 2)
    yield from _latents_of_lax(s, dtype)


def _online(m: Maker, s: RankSizes) -> dict[str, Any]:
    return {"statistics": m.statistics(s.tokens, s.hidden), "hidden_size": s.hidden, "eps": _EPS}


def _latents_of_cola(
    s: RankSizes, dtype: torch.dtype, group: str, members: int
) -> Iterator[OpCase]:
    """From the reduced latents of the online norm to φ of them."""
    n, w, e = s.tokens, members * s.rank, dtype.itemsize
    ranks = (s.rank,) * members

    def forward(m: Maker, ops: Any) -> Callable[[], object]:
        return partial(ops.latent_epilogue, m.normal(n, w), ranks, "silu", **_online(m, s))

    def backward(m: Maker, ops: Any) -> Callable[[], object]:
        call = partial(ops.latent_epilogue_backward, m.normal(n * w), ranks, "silu")
        return partial(call, h=m.normal(n, w), **_online(m, s))

    moved = 2 * n * w * e + 4 * n, 3 * n * w * e + 8 * n
    yield from _pair("latent_epilogue", group, (forward, backward), moved)


def _latents_of_lax(s: RankSizes, dtype: torch.dtype) -> Iterator[OpCase]:
    """The latent that crosses over is added to h/ρ; and LaX's norm and φ of the sum."""
    n, w, e = s.tokens, 3 * s.rank, dtype.itemsize
    ranks = (s.rank,) * 3

    def crossing(m: Maker, ops: Any) -> Callable[[], object]:
        call = partial(ops.latent_epilogue, m.normal(n, w), ranks, "identity")
        return partial(call, gated=m.normal(n, w), dtype=m.dtype, **_online(m, s))

    def crossing_backward(m: Maker, ops: Any) -> Callable[[], object]:
        call = partial(ops.latent_epilogue_backward, m.normal(n * w), (w,), "identity")
        return partial(call, h=m.normal(n, w), **_online(m, s))

    def norm_of(m: Maker) -> dict[str, Any]:
        return {"norm": "layernorm", "weight": m.normal(w), "bias": m.normal(w)}

    def norm(m: Maker, ops: Any) -> Callable[[], object]:
        return partial(ops.latent_epilogue, m.normal(n, w), ranks, "silu", **norm_of(m))

    def norm_backward(m: Maker, ops: Any) -> Callable[[], object]:
        call = partial(ops.latent_epilogue_backward, m.normal(n * w), ranks, "silu")
        return partial(call, h=m.normal(n, w), **norm_of(m))

    moved = 4 * n * w * e + 4 * n, 3 * n * w * e + 8 * n
    yield from _pair("latent_epilogue", "lax_crossing", (crossing, crossing_backward), moved)
    moved = 2 * n * w * e + 2 * w * e, 3 * n * w * e + 4 * w * e
    yield from _pair("latent_epilogue", "lax_norm", (norm, norm_backward), moved)


def _pair(
    op: str, suffix: str, builds: tuple[Build, Build], moved_bytes: tuple[int, int]
) -> Iterator[OpCase]:
    """An op and its backward."""
    for name, build, moved in zip((op, f"{op}_backward"), builds, moved_bytes, strict=True):
        key = f"{name}_{suffix}" if suffix else name
        yield OpCase(key=key, op=name, build=build, moved_bytes=moved)


def _folding(s: RankSizes, dtype: torch.dtype, wide_m: torch.dtype) -> Iterator[OpCase]:
    """γ and the down-projections of q, k, v."""
    r, k, e = s.rank, s.width, dtype.itemsize
    weights = 3 * r * k

    def fold(m: Maker, ops: Any) -> Callable[[], object]:
        return partial(ops.fold_gamma, m.normal(k), m.weights(3, r, k))

    def backward(m: Maker, ops: Any) -> Callable[[], object]:
        of_gemm = m.normal(3 * r, k, dtype=wide_m)
        return partial(ops.fold_gamma_backward, of_gemm, m.normal(k), m.weights(3, r, k))

    def accumulate(m: Maker, ops: Any) -> Callable[[], object]:
        of_gemm, gamma, members = m.normal(3 * r, k, dtype=wide_m), m.normal(k), m.weights(3, r, k)
        main_grads = m.changed(3, r, k, dtype=torch.float32).unbind(0)
        return partial(ops.fold_gamma_accumulate, of_gemm, gamma, members, main_grads)

    gammas = 2 * k * e
    for op, build, moved in (
        ("fold_gamma", fold, 2 * weights * e + k * e),
        ("fold_gamma_backward", backward, weights * (wide_m.itemsize + 2 * e) + gammas),
        ("fold_gamma_accumulate", accumulate, weights * (wide_m.itemsize + e + 8) + gammas),
    ):
        yield OpCase(key=op, op=op, build=build, moved_bytes=moved)


def _product(s: RankSizes, dtype: torch.dtype, kind: str) -> Iterator[OpCase]:
    """Of gate and up, which their up-projection leaves one after the other."""
    n, f, e = s.tokens, s.ffn, dtype.itemsize

    def forward(m: Maker, ops: Any) -> Callable[[], object]:
        return partial(ops.gated_product, *m.members(n, [f, f]), kind)

    def backward(m: Maker, ops: Any) -> Callable[[], object]:
        return partial(ops.gated_product_backward, m.normal(n, f), *m.members(n, [f, f]), kind)

    moved = 3 * n * f * e, 5 * n * f * e
    yield from _pair("gated_product", kind, (forward, backward), moved)


def _rotary(s: RankSizes, dtype: torch.dtype) -> Iterator[OpCase]:
    """Of q and k; backward with v, from gradients in attention's layout."""
    shape = (s.sequence, s.batch, s.heads, s.head)
    numbers, angles = s.tokens * s.width, 2 * s.sequence * s.head

    def turn(m: Maker) -> tuple[Tensor, Tensor]:
        return m.normal(s.sequence, s.head), m.normal(s.sequence, s.head)

    def forward(m: Maker, ops: Any) -> Callable[[], object]:
        q_and_k = [m.changed(*shape), m.changed(*shape)]
        return partial(ops.rotary_, q_and_k, *turn(m), interleaved=False)

    def backward(m: Maker, ops: Any) -> Callable[[], object]:
        grads = [m.batch_first(*shape) for _ in range(3)]
        return partial(ops.rotary_backward, grads, 2, *turn(m), interleaved=False)

    for op, build, passes in (("rotary_", forward, 4), ("rotary_backward", backward, 6)):
        moved = (passes * numbers + angles) * dtype.itemsize
        yield OpCase(key=op.rstrip("_"), op=op, build=build, moved_bytes=moved)


def _rms_norm(s: RankSizes, dtype: torch.dtype) -> Iterator[OpCase]:
    """Of whole tokens, with the residual branch's gradient."""
    n, d, e = s.tokens // s.tp, s.hidden, dtype.itemsize

    def forward(m: Maker, ops: Any) -> Callable[[], object]:
        return partial(ops.rms_norm, m.normal(n, d), m.normal(d), _EPS)

    def backward(m: Maker, ops: Any) -> Callable[[], object]:
        dy, x, dresidual = (m.normal(n, d) for _ in range(3))
        rho = m.statistics(n, 1)
        return partial(ops.rms_norm_backward, dy, x, m.normal(d), rho, dresidual)

    moved = (2 * n + 1) * d * e + 4 * n, (4 * n + 2) * d * e + 4 * n
    yield from _pair("rms_norm", "", (forward, backward), moved)


def _down_projections(s: RankSizes) -> Iterator[OpCase]:
    """q, k, v together; o, whose input has attention's layout; and the FFN's down."""
    n, k, f, r = s.tokens, s.width, s.ffn, s.rank
    tokens = (s.sequence, s.batch)

    def qkv(m: Maker, ops: Any) -> Callable[[], object]:
        (folded,) = m.weights(1, 3 * r, k)
        return partial(ops.down_projection, m.normal(n, k), folded, m.out(n, 3 * r))

    def qkv_dgrad(m: Maker, ops: Any) -> Callable[[], object]:
        (folded,) = m.weights(1, 3 * r, k)
        return partial(ops.down_projection_dgrad, m.normal(n, 3 * r), folded, m.changed(n, k))

    def qkv_wgrad(m: Maker, ops: Any) -> Callable[[], object]:
        return partial(ops.down_projection_wgrad, m.normal(n, 3 * r), m.normal(n, k))

    def o(m: Maker, ops: Any) -> Callable[[], object]:
        y, (weight,) = m.batch_first(*tokens, k), m.weights(1, r, k)
        return partial(ops.down_projection, y, weight, m.out(*tokens, r))

    def o_wgrad(m: Maker, ops: Any) -> Callable[[], object]:
        return partial(ops.down_projection_wgrad, m.normal(*tokens, r), m.batch_first(*tokens, k))

    def o_accumulate(m: Maker, ops: Any) -> Callable[[], object]:
        du, y = m.normal(*tokens, r), m.batch_first(*tokens, k)
        return partial(ops.down_projection_accumulate, du, y, m.changed(r, k, dtype=torch.float32))

    def ffn(m: Maker, ops: Any) -> Callable[[], object]:
        (weight,) = m.weights(1, r, f)
        return partial(ops.down_projection, m.normal(n, f), weight, m.out(n, r))

    def ffn_dgrad(m: Maker, ops: Any) -> Callable[[], object]:
        (weight,) = m.weights(1, r, f)
        return partial(ops.down_projection_dgrad, m.normal(n, r), weight)

    def ffn_accumulate(m: Maker, ops: Any) -> Callable[[], object]:
        du, y = m.normal(n, r), m.normal(n, f)
        return partial(ops.down_projection_accumulate, du, y, m.changed(r, f, dtype=torch.float32))

    for op, key, build, weight in (
        ("down_projection", "qkv", qkv, 3 * r * k),
        ("down_projection_dgrad", "qkv", qkv_dgrad, 3 * r * k),
        ("down_projection_wgrad", "qkv", qkv_wgrad, 3 * r * k),
        ("down_projection", "o", o, r * k),
        ("down_projection_wgrad", "o", o_wgrad, r * k),
        ("down_projection_accumulate", "o", o_accumulate, r * k),
        ("down_projection", "ffn", ffn, r * f),
        ("down_projection_dgrad", "ffn", ffn_dgrad, r * f),
        ("down_projection_accumulate", "ffn", ffn_accumulate, r * f),
    ):
        yield OpCase(key=f"{op}_{key}", op=op, build=build, flop=2 * n * weight)


def _up_projections(s: RankSizes, group: str, members: int, out: int) -> Iterator[OpCase]:
    """Projections `[out, r]` of one group."""
    n, r = s.tokens, s.rank
    outs, ranks = [out] * members, [r] * members

    def forward(m: Maker, ops: Any) -> Callable[[], object]:
        return partial(ops.up_projection, m.normal(n * members * r), m.weights(members, out, r))

    def dgrad(m: Maker, ops: Any) -> Callable[[], object]:
        return partial(ops.up_projection_dgrad, m.members(n, outs), m.weights(members, out, r))

    def wgrad(m: Maker, ops: Any) -> Callable[[], object]:
        z = m.normal(n * members * r)
        return partial(ops.up_projection_wgrad, m.members(n, outs), z, ranks)

    def accumulate(m: Maker, ops: Any) -> Callable[[], object]:
        z, dys = m.normal(n * members * r), m.members(n, outs)
        main_grads = m.changed(members, out, r, dtype=torch.float32).unbind(0)
        return partial(ops.up_projection_accumulate, dys, z, main_grads)

    for op, build in (
        ("up_projection", forward),
        ("up_projection_dgrad", dgrad),
        ("up_projection_wgrad", wgrad),
        ("up_projection_accumulate", accumulate),
    ):
        yield OpCase(key=f"{op}_{group}", op=op, build=build, flop=2 * n * members * out * r)


def rate(amount: int, milliseconds: float | None) -> float | None:
    """10⁹ bytes or operations a second; None for what was not measured, and of nothing."""
    return amount / milliseconds / 1e6 if amount and milliseconds else None
