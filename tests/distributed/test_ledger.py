"""Every collective of every strategy, by count and by bytes, as in the design's table.

Expectations are the table's formulas, per layer and token: d hidden, f FFN width, q = heads·head
size, kv = KV heads·head size, a and m the ranks of attention and MLP, T the tensor-parallel size.
With q = kv = d and a = m = r they read as in the table: 7r, 5d + 2f, …
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import distributed

from boost_layers import communication
from boost_layers.communication import LEDGER, Ledger
from boost_layers.config import LowRankConfig
from tests.support.distributed import run_ranks
from tests.support.parallel_gpt import Case, parallel_gpt, tensor_parallel_state
from tests.support.plain_llama import PlainConfig

LAYERS, SEQUENCE, BATCH = 2, 8, 3
TOKENS = SEQUENCE * BATCH

PLAIN = PlainConfig(
    vocab_size=52,
    hidden=32,
    ffn=48,
    heads=8,
    kv_heads=8,
    head_dim=4,
    layers=LAYERS,
    arch="cola",
    rank=12,
    mlp_rank=20,
    mlp="product",
)
BTP = LowRankConfig(arch="cola", attn_rank=12, mlp_rank=20)
VANILLA = replace(BTP, tp="vanilla")
REPLICATED = replace(VANILLA, vanilla_attention="replicated")
DENSE = LowRankConfig(arch="dense")

# (scope, phase, operation) -> calls and bytes of the tensors handed over on one rank.
Counts = dict[tuple[str, str, str], tuple[float, float]]


@dataclass(frozen=True)
class Expected:
    """What the table says of one model in one layout."""

    plain: PlainConfig
    low_rank: LowRankConfig
    T: int
    bytes: int
    """Of a number in a message."""
    sequence_parallel: bool
    recompute: str | None

    def _dense(self) -> dict[tuple[str, str], tuple[int, float]]:
        d = self.plain.hidden
        if not self.sequence_parallel:
            return {("forward", "all_reduce"): (2, 2 * d), ("backward", "all_reduce"): (2, 2 * d)}
        # An all-gather is counted by its input, one rank's share. The input of the column-parallel
        # GEMMs is gathered again in backward rather than kept.
        return {
            ("forward", "all_gather"): (2, 2 * d / self.T),
            ("forward", "reduce_scatter"): (2, 2 * d),
            ("backward", "all_gather"): (4, 4 * d / self.T),
            ("backward", "reduce_scatter"): (2, 2 * d),
        }

    def _btp(self) -> dict[tuple[str, str], tuple[int, float]]:
        a, m = self.low_rank.attn_rank, self.low_rank.mlp_rank
        assert a and m
        latents = 4 * a + 3 * m
        calls = 4 if self.low_rank.grouping else 7
        columns = 3 * self.T if self.bytes == 2 else 1
        forward: tuple[int, float] = (calls, latents + 2 * columns)
        if self.low_rank.norm == "sync":
            # Two messages of one fp32 number per token, apart.
            forward = (calls + 2, latents + 2 * 4 / self.bytes)
        return {("forward", "all_reduce"): forward, ("backward", "all_reduce"): (calls, latents)}

    def _vanilla(self) -> dict[tuple[str, str], tuple[int, float]]:
        d, f = self.plain.hidden, self.plain.ffn
        q, kv = (h * self.plain.head_dim for h in (self.plain.heads, self.plain.kv_heads))
        grouped = self.low_rank.grouping
        inputs = 2 if grouped else 5
        forward = {("forward", "all_reduce"): (7, q + 2 * kv + d + 2 * f + d)}
        # LaX needs whole latents: their shares are gathered, and so are the gradients of z.
        gathers, width = 0, 0.0
        if self.low_rank.crossing:
            a, m = self.low_rank.attn_rank, self.low_rank.mlp_rank
            assert a and m
            gathers, width = (4 if grouped else 7), (4 * a + 3 * m) / self.T
        if self.low_rank.vanilla_attention == "replicated":
            return {**forward, ("backward", "all_reduce"): (inputs + 2, inputs * d + q + f)}
        return {
            **forward,
            ("forward", "all_gather"): (1 + gathers, q / self.T + width),
            ("backward", "all_reduce"): (inputs + 1, inputs * d + f),
            ("backward", "reduce_scatter"): (1, q),
            ("backward", "all_gather"): (
                (1 if grouped else 3) + gathers,
                (q + 2 * kv) / self.T + width,
            ),
        }

    def counts(self) -> Counts:
        """Of one micro-batch, forward and backward, through the model."""
        is_btp = self.low_rank.low_rank and self.low_rank.tp == "btp"
        vanilla_or_dense = self._vanilla if self.low_rank.low_rank else self._dense
        per_layer = self._btp() if is_btp else vanilla_or_dense()
        per_token = LAYERS * TOKENS * self.bytes
        counts: Counts = {
            ("layer", phase, operation): (LAYERS * calls, per_token * numbers)
            for (phase, operation), (calls, numbers) in per_layer.items()
        }
        exchange = TOKENS * self.plain.hidden / self.T * self.bytes
        if is_btp:
            counts["border", "forward", "all_to_all"] = (2, 2 * exchange)
            counts["border", "backward", "all_to_all"] = (2, 2 * exchange)
        if self.recompute == "full":
            for (scope, phase, operation), count in list(counts.items()):
                if (scope, phase) == ("layer", "forward"):
                    counts["layer", "recompute", operation] = count
            if is_btp:
                # The first layer's; the final norm belongs to no layer.
                counts["border", "recompute", "all_to_all"] = (1, exchange)
        return counts


def counted() -> Counts:
    return {key: (count.calls, count.bytes) for key, count in LEDGER.counts.items() if count.calls}


def run_each(
    cases: Mapping[str, Case],
) -> dict[str, tuple[Counts, dict[str, int], dict[str, tuple[float, float]]]]:
    """On a rank: what the ledger counts in a forward without gradients, then one with a backward,
    then another; each as (counts, layer passes, all-reduces per layer by phase)."""
    tokens = torch.randint(52, (BATCH, SEQUENCE), generator=torch.Generator().manual_seed(1))
    positions = torch.arange(SEQUENCE).expand_as(tokens)
    found = {}

    def note(name: str) -> None:
        phases = ("forward", "backward", "recompute")
        found[name] = (
            counted(),
            {phase: LEDGER.layer_passes[phase] for phase in phases},
            {phase: LEDGER.per_layer(phase, "all_reduce") for phase in phases},
        )

    with tensor_parallel_state(next(iter(cases.values())).tp):
        for name, case in cases.items():
            with parallel_gpt(case) as model:
                LEDGER.clear()
                with torch.no_grad():
                    model(tokens, positions, None, labels=tokens)
                note(f"{name}, evaluated")
                LEDGER.clear()
                model(tokens, positions, None, labels=tokens).mean().backward()
                note(name)
                model(tokens, positions, None, labels=tokens).mean().backward()
                note(f"{name}, twice")
    return found


FULL_RECOMPUTE = {
    "recompute_granularity": "full",
    "recompute_method": "uniform",
    "recompute_num_layers": 1,
}
SELECTIVE_RECOMPUTE = {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]}

CASES: dict[str, dict[str, Any]] = {
    "btp": {"low_rank": BTP},
    "btp bf16": {"low_rank": BTP, "dtype": torch.bfloat16},
    "btp ungrouped": {"low_rank": replace(BTP, grouping=False)},
    "btp ungrouped bf16": {"low_rank": replace(BTP, grouping=False), "dtype": torch.bfloat16},
    "btp sync": {"low_rank": replace(BTP, norm="sync")},
    "btp sync bf16": {"low_rank": replace(BTP, norm="sync"), "dtype": torch.bfloat16},
    "btp sync ungrouped": {"low_rank": replace(BTP, norm="sync", grouping=False)},
    "btp full recompute": {"low_rank": BTP, "transformer": FULL_RECOMPUTE},
    "btp lax": {"low_rank": replace(BTP, arch="lax")},
    "btp lax bf16": {"low_rank": replace(BTP, arch="lax"), "dtype": torch.bfloat16},
    "btp lax full recompute": {
        "low_rank": replace(BTP, arch="lax"),
        "transformer": FULL_RECOMPUTE,
    },
    "btp svd": {"low_rank": replace(BTP, arch="svd")},
    "btp latent checkpointing": {"low_rank": replace(BTP, recompute=True)},
    "btp lax latent checkpointing": {"low_rank": replace(BTP, arch="lax", recompute=True)},
    "vanilla lax": {"low_rank": replace(VANILLA, arch="lax")},
    "vanilla lax ungrouped": {"low_rank": replace(VANILLA, arch="lax", grouping=False)},
    "btp selective recompute": {"low_rank": BTP, "transformer": SELECTIVE_RECOMPUTE},
    "vanilla": {"low_rank": VANILLA},
    "vanilla bf16": {"low_rank": VANILLA, "dtype": torch.bfloat16},
    "vanilla ungrouped": {"low_rank": replace(VANILLA, grouping=False)},
    "vanilla replicated": {"low_rank": REPLICATED},
    "vanilla replicated ungrouped": {"low_rank": replace(REPLICATED, grouping=False)},
    "vanilla full recompute": {"low_rank": VANILLA, "transformer": FULL_RECOMPUTE},
    "dense": {"low_rank": DENSE},
    "dense sequence-parallel": {"low_rank": DENSE, "sequence_parallel": True},
    "dense full recompute": {"low_rank": DENSE, "transformer": FULL_RECOMPUTE},
    "dense selective recompute": {"low_rank": DENSE, "transformer": SELECTIVE_RECOMPUTE},
}
GQA_CASES = ("btp", "vanilla", "vanilla ungrouped", "vanilla replicated", "dense")


def cases_of(tp: int) -> dict[str, tuple[Case, Expected]]:
    cases = {}
    for attention, changes in (("", {}), (" gqa", {"kv_heads": 4})):
        for name, settings in CASES.items():
            if tp == 1 and settings.get("sequence_parallel"):
                continue
            if changes and name not in GQA_CASES:
                continue
            low_rank = settings["low_rank"]
            plain = replace(PLAIN, **changes)
            if not low_rank.low_rank:
                plain = replace(plain, arch="dense", mlp="swiglu")
            case = Case(plain=plain, tp=tp, **{"dtype": torch.float32, **settings})
            cases[name + attention] = (
                case,
                Expected(
                    plain,
                    low_rank,
                    tp,
                    bytes=case.dtype.itemsize,
                    sequence_parallel=bool(case.sequence_parallel),
                    recompute=case.transformer.get("recompute_granularity"),
                ),
            )
    return cases


@pytest.mark.parametrize("tp", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_every_strategys_collectives_are_those_of_the_table(tp: int) -> None:
    cases = cases_of(tp)
    for found in run_ranks(run_each, tp, {name: case for name, (case, _) in cases.items()}):
        for name, (_, expected) in cases.items():
            counts = expected.counts()
            assert (name, found[name][0]) == (name, counts)
            twice = {key: (2 * calls, 2 * size) for key, (calls, size) in counts.items()}
            assert found[f"{name}, twice"][0] == twice
            forward = {key: count for key, count in counts.items() if key[1] == "forward"}
            assert found[f"{name}, evaluated"][0] == forward

            again = LAYERS if expected.recompute == "full" or expected.low_rank.recompute else 0
            passes = {"forward": LAYERS, "backward": LAYERS, "recompute": again}
            assert found[name][1] == passes
            assert found[f"{name}, evaluated"][1] == {**passes, "backward": 0, "recompute": 0}
            assert found[name][2] == found[f"{name}, twice"][2]


def test_the_tables_headline_numbers() -> None:
    """As printed: calls, and numbers per token in units of r, d and f, at one rank for all."""
    r, d, f = 8, PLAIN.hidden, PLAIN.ffn
    plain = replace(PLAIN, rank=r, mlp_rank=r)
    equal_ranks = {"attn_rank": r, "mlp_rank": r}
    btp, replicated = replace(BTP, **equal_ranks), replace(REPLICATED, **equal_ranks)
    cases = {
        "btp": Case(plain=plain, low_rank=btp, tp=2),
        "bf16": Case(plain=plain, low_rank=btp, tp=2, dtype=torch.bfloat16),
        "dense": Case(plain=replace(plain, arch="dense", mlp="swiglu"), low_rank=DENSE, tp=2),
        "replicated": Case(plain=plain, low_rank=replicated, tp=2),
    }
    found = run_ranks(run_each, 2, cases)[0]
    for name, forward, backward, size in (
        ("btp", (4, 7 * r + 2), (4, 7 * r), 8),
        ("bf16", (4, 7 * r + 6 * 2), (4, 7 * r), 2),
        ("dense", (2, 2 * d), (2, 2 * d), 8),
        ("replicated", (7, 5 * d + 2 * f), (4, 3 * d + f), 8),
    ):
        mib = TOKENS * size / 1024**2
        per_layer = found[name][2]
        assert per_layer["forward"] == pytest.approx((forward[0], forward[1] * mib))
        assert per_layer["backward"] == pytest.approx((backward[0], backward[1] * mib))
        assert per_layer["recompute"] == (0.0, 0.0)


def test_one_rank_communicates_nothing() -> None:
    cases = {name: case for name, (case, _) in cases_of(1).items()}
    (found,) = run_ranks(run_each, 1, cases)
    assert {name: counts for name, (counts, *_) in found.items() if counts} == {}


def waiting_times() -> dict[str, float]:
    """On each of two ranks: rank 1 comes late to every collective by a fifth of a second."""
    group = distributed.group.WORLD

    def late(operation: str, asynchronous: bool) -> float:
        LEDGER.clear()
        x = torch.ones(2, 5)
        distributed.barrier()
        if distributed.get_rank() == 1:
            time.sleep(0.2)
        if asynchronous:
            pending = communication.start_all_reduce(x, group, "backward")
            assert LEDGER.counts["layer", "backward", "all_reduce"].seconds == 0
            pending.wait()
        else:
            getattr(communication, operation)(x, group, "backward")
        (count,) = LEDGER.counts.values()
        assert (count.calls, count.bytes) == (1, 40)
        return count.seconds

    operations = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")
    times = {"untimed": late("all_reduce", False) + late("all_reduce", True)}
    LEDGER.timed = True
    times |= {operation: late(operation, False) for operation in operations}
    times["asynchronous"] = late("all_reduce", True)
    return times


def test_waiting_is_timed_only_when_asked_for() -> None:
    early, late = run_ranks(waiting_times, 2)
    assert early.pop("untimed") == late.pop("untimed") == 0
    assert min(early.values()) > 0.05
    # Rank 1 waits for nobody; on a crowded machine not for long.
    assert sum(late.values()) < sum(early.values()) / 2


def phases() -> dict[str, str]:
    """On a rank: the phase that is seen in each place."""
    seen = {"outside": communication.current_phase()}

    class Op(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            seen["forward"] = communication.current_phase()
            return x.clone()

        @staticmethod
        def backward(ctx: Any, dx: torch.Tensor) -> torch.Tensor:
            return dx

    def segment(x: torch.Tensor) -> torch.Tensor:
        seen["again" if "first" in seen else "first"] = communication.current_phase()
        return Op.apply(x).square()

    x = torch.ones(2, requires_grad=True)
    torch.utils.checkpoint.checkpoint(segment, x, use_reentrant=False).sum().backward()
    return seen


def test_a_forward_inside_backward_is_a_recompute() -> None:
    (seen,) = run_ranks(phases, 1)
    assert seen == {
        "outside": "forward",
        "first": "forward",
        "again": "recompute",
        "forward": "recompute",
    }


def test_the_ledgers_arithmetic() -> None:
    ledger = Ledger()
    assert ledger.per_layer("forward", "all_reduce") == (0.0, 0.0)
    ledger.enter_layer()
    ledger.enter_layer()
    with torch.no_grad():
        ledger.enter_layer()
        ledger.enter_layer()
    assert dict(ledger.layer_passes) == {"forward": 4, "backward": 2}
    ledger.counts["layer", "forward", "all_reduce"].calls = 6
    ledger.counts["layer", "forward", "all_reduce"].bytes = 1024 * 1024
    ledger.counts["border", "forward", "all_reduce"].calls = 100
    assert ledger.per_layer("forward", "all_reduce") == (1.5, 0.25)
    assert ledger.per_layer("backward", "all_reduce") == (0.0, 0.0)
    assert ("layer", "backward", "all_reduce") not in ledger.counts
    ledger.clear()
    assert not ledger.counts and not ledger.layer_passes
