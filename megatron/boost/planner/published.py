"""Published times of full-rank, vanilla and BTP training, and the code base that they come from.

Source: the BOOST paper (arXiv 2512.12131) with the README and the logs of its code. A100-80,
sequence 4096, bf16, CoLA with r = d/4, vocabulary 32000, tied. The microbenchmarks calibrate the
clusters' file `a100-80`, the iteration times judge the model (`validation`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

from boost_layers.config import LowRankConfig
from megatron.boost.accounting.collectives import Message, layer_messages
from megatron.boost.accounting.sizes import Layout, Model, Strategy
from megatron.boost.planner.elementwise import Sweep
from megatron.boost.planner.implementation import Implementation
from megatron.boost.planner.models import SIZES, model_of_size

SEQUENCE = 4096
PUBLISHED_ON = "a100-80"
"""The cluster, by the name of its file."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """Iteration times of one model and layout."""

    size: str
    tensor_parallel: int
    pipeline_parallel: int = 1
    micro_batch: int = 4
    micro_batches: int = 1
    layers: int | None = None
    """Where the logs have another number than the paper."""
    recompute: bool = False
    """Full for full-rank and vanilla, at the latents for BTP."""
    full_rank: float | None
    vanilla: float | None
    btp: float
    arch: Literal["cola", "svd", "lax"] = "cola"

    @property
    def title(self) -> str:
        """For people."""
        layers = f", {self.layers} layers" if self.layers else ""
        batches = f" x {self.micro_batches}" if self.micro_batches > 1 else ""
        arch = "" if self.arch == "cola" else f", {self.arch.upper().replace('LAX', 'LaX')}"
        return f"{self.size}{layers}, micro-batch {self.micro_batch}{batches}{arch}"


ROWS = (
    Row(size="1B", tensor_parallel=1, full_rank=0.85, vanilla=0.56, btp=0.59),
    Row(size="3B", tensor_parallel=2, full_rank=1.14, vanilla=1.41, btp=0.78),
    Row(size="7B", tensor_parallel=4, full_rank=1.06, vanilla=1.64, btp=0.72),
    Row(size="13B", tensor_parallel=4, pipeline_parallel=2, full_rank=2.07, vanilla=2.42, btp=1.30),
    Row(
        size="30B",
        tensor_parallel=4,
        pipeline_parallel=4,
        micro_batch=1,
        micro_batches=4,
        recompute=True,
        full_rank=2.43,
        vanilla=2.58,
        btp=1.27,
    ),
    Row(size="7B", tensor_parallel=4, micro_batch=1, full_rank=0.368, vanilla=0.433, btp=0.283),
    Row(
        size="3B",
        tensor_parallel=2,
        micro_batch=1,
        layers=26,
        full_rank=0.336,
        vanilla=0.384,
        btp=0.255,
    ),
    Row(size="7B", tensor_parallel=4, arch="svd", full_rank=None, vanilla=1.57, btp=0.70),
    Row(size="7B", tensor_parallel=4, arch="lax", full_rank=None, vanilla=1.72, btp=0.75),
)
"""By architecture the full-rank time is the same, and stands once."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """One published time, and what is assumed of the run."""

    title: str
    strategy: Strategy
    seconds: float
    model: Model
    layout: Layout
    assumes: str
    row: Row


def runs() -> list[Run]:
    """Every published iteration time."""
    return [run for row in ROWS for run in _runs_of(row)]


def _runs_of(row: Row) -> Iterator[Run]:
    names: dict[Strategy, str] = {"dense": "full-rank", "vanilla": "vanilla", "btp": "BTP"}
    times: dict[Strategy, float | None] = {
        "dense": row.full_rank,
        "vanilla": row.vanilla,
        "btp": row.btp,
    }
    for strategy, seconds in times.items():
        if seconds is None:
            continue
        # The full-rank 7B alone kept bf16 gradients.
        in_fp32 = not (strategy == "dense" and row.size == "7B")
        recompute = row.recompute and strategy != "btp"
        size = SIZES[row.size]
        model = model_of_size(
            replace(size, layers=row.layers or size.layers),
            _settings(row, strategy),
            tied=True,
        )
        yield Run(
            title=f"{row.title}, {names[strategy]}",
            strategy=strategy,
            seconds=seconds,
            model=model,
            layout=Layout(
                sequence_length=SEQUENCE,
                micro_batch_size=row.micro_batch,
                micro_batches=row.micro_batches,
                tensor_parallel=row.tensor_parallel,
                pipeline_parallel=row.pipeline_parallel,
                gradients_in_fp32=in_fp32,
                recompute="full" if recompute else "none",
            ),
            assumes=_assumptions(row, strategy, in_fp32),
            row=row,
        )


def _settings(row: Row, strategy: Strategy) -> LowRankConfig:
    if strategy == "dense":
        return LowRankConfig(arch="dense")
    settings = LowRankConfig(arch=row.arch, rank=SIZES[row.size].rank)
    if row.arch == "lax":
        # No source names LaX's gate; its 0.03 s leave room for a sum alone.
        settings = replace(settings, lax_gate="identity", lax_norm="none")
    if strategy == "vanilla":
        return replace(settings, tp="vanilla", vanilla_attention="replicated")
    return replace(settings, norm="sync", recompute=row.recompute)


def _assumptions(row: Row, strategy: Strategy, in_fp32: bool) -> str:
    parts = {
        "dense": "q, k, v, gate and up unfused: five all-reduces of [n, d] backward, behind dW",
        "vanilla": "attention on all heads everywhere; A's of q, k, v and of gate, up grouped",
        "btp": "statistics in all-reduces of their own, six a block forward",
    }[strategy]
    if row.tensor_parallel == 1:
        parts = "no tensor parallelism" + (", statistics apart" if strategy == "btp" else "")
    if row.recompute:
        parts += (
            "; checkpointing at the latents, every all-reduce again"
            if strategy == "btp"
            else "; full recompute"
        )
    if row.arch == "lax":
        parts += "; LaX's gate the identity, without norm"
    if row.pipeline_parallel > 1 and row.micro_batches == 1:
        parts += "; the stages one after the other"
    return parts + ("; gradients in fp32" if in_fp32 else "; gradients in bf16")


def _messages(model: Model, layout: Layout, layer: int) -> tuple[Message, ...]:
    """Full-rank reduces the input's gradient of each of q, k, v, gate and up by itself."""
    messages: list[Message] = []
    for message in layer_messages(model, layout, layer):
        single = model.strategy(layer) == "dense" and message.phase == "backward"
        parts = [(member,) for member in message.members] if single else [message.members]
        messages += [replace(message, members=members) for members in parts]
    return tuple(messages)


_NORM, _RESIDUAL, _ROPE, _SILU, _PRODUCT, _SCALE = 4, 6, 20, 4, 6, 8
"""Bytes that a bf16 number costs in PyTorch without fusion: a fused RMSNorm 2 + 2; a sum 2·2 + 2; a
rotary embedding of x·cos + rotated(x)·sin, the rotation copied by halves, 20; SiLU 2 + 2; a product
2·2 + 2; dividing a latent by ρ with a cast to fp32 and back, 8."""
_EAGER_BACKWARD = 2
"""Its bytes and kernels, in those of the forward."""


def _sweeps(model: Model, layout: Layout, layer: int) -> tuple[Sweep, ...]:
    """Plain PyTorch operations between the products."""
    n, tp = layout.tokens, layout.tensor_parallel
    strategy, settings = model.strategy(layer), model.settings(layer)
    d = model.hidden_size / (tp if strategy == "btp" else 1)
    heads = 2 * model.query_width / (1 if strategy == "vanilla" else tp)
    ffn = model.ffn_hidden_size / (1 if strategy == "vanilla" else tp)
    latents = model.ranks(layer) / (1 if strategy == "btp" else tp)
    swiglu = settings.mlp_kind == "swiglu" or strategy == "dense"
    found = [
        _eager("norm", 2 * n * d * _NORM, 2),
        _eager("residual", 2 * n * d * _RESIDUAL, 2),
        _eager("rotary embedding", n * heads * _ROPE, 8),
        _eager("gate", n * ffn * (_PRODUCT + (_SILU if swiglu else 0)), 2 if swiglu else 1),
    ]
    if strategy != "dense" and settings.activation != "identity":
        found.append(_eager("latents", n * latents * _SILU, 7))
    if strategy == "btp":
        opening = sum(p.rank or 0 for group in model.groups(layer)[::2] for p in group)
        found.append(_eager("latents divided by rho", n * opening * _SCALE, 5))
    if model.place(layer).crosses:
        found.append(_eager("latent crossing", n * latents * _RESIDUAL, 7))
    return tuple(found)


def _eager(name: str, size: float, kernels: int) -> Sweep:
    return Sweep(name, size, _EAGER_BACKWARD * size, kernels, _EAGER_BACKWARD * kernels, again=True)


CODE = Implementation(
    name="the paper's code",
    sweeps=_sweeps,
    messages=_messages,
    hidden_strategies=frozenset({"dense"}),
    latent_recompute_communicates=True,
    fused_accumulation=False,
)
"""What the published times were measured with, as far as its source tells."""


PUBLISHED_UTILISATION: dict[tuple[str, str], dict[int, float]] = {
    ("BTP", "attention"): {1: 55.1, 2: 69.7, 4: 72.3, 8: 76.1},
    ("BTP", "MLP"): {1: 64.9, 2: 69.9, 4: 75.0, 8: 76.6},
    ("vanilla", "attention"): {1: 48.1, 2: 56.8, 4: 61.1, 8: 65.7},
}
"""Percent of an A100's peak that the forward's products reach, 7B at TP 4, by micro-batch."""
