"""`--low-rank-comm-report`: what it writes and prints after whole runs."""

from __future__ import annotations

import contextlib
import io
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.support.distributed import run_ranks
from tests.support.runs import MODEL, TIED_MODEL, train_here

LAYERS, HIDDEN, FFN, RANK, VOCABULARY = 2, 32, 48, 8, 100
TOKENS = 2 * 32
"""Of a micro-batch: two samples of 32 tokens."""
FP32 = 4

COLA = f"--low-rank-arch cola --low-rank-rank {RANK}"
TP2 = "--tensor-model-parallel-size 2"
PP2 = "--pipeline-model-parallel-size 2"
# Two iterations of two micro-batches, a validation after each, and what pretrain() evaluates last.
VALIDATED = "--train-iters 2 --eval-interval 1 --eval-iters 2"

COLA_PARAMETERS = LAYERS * (8 * RANK * HIDDEN + 3 * RANK * (HIDDEN + FFN) + 2 * HIDDEN) + HIDDEN
DENSE_PARAMETERS = LAYERS * (4 * HIDDEN**2 + 3 * HIDDEN * FFN + 2 * HIDDEN) + HIDDEN


def reported(flags: str, ranks: int, folder: Path, model: Sequence[str] = MODEL) -> dict[str, Any]:
    file = folder / "new folder" / "report.json"
    run_ranks(
        train_here,
        ranks,
        [*flags.split(), "--low-rank-comm-report", str(file)],
        model=model,
        init_process_group=False,
    )
    values: dict[str, Any] = json.loads(file.read_text())
    return values


def nonzero(values: dict[str, Any], ending: str) -> dict[str, float]:
    return {key: value for key, value in values.items() if key.endswith(ending) and value}


def mib(elements: float, size: int = FP32) -> float:
    return elements * size / 2**20


def test_a_btp_run_with_micro_batches_and_validation(tmp_path: Path) -> None:
    values = reported(f"{COLA} {TP2} {VALIDATED}", 2, tmp_path)

    assert nonzero(values, "calls_per_layer") == {
        "forward_all_reduce_calls_per_layer": 4,
        "backward_all_reduce_calls_per_layer": 4,
    }
    assert values["recompute_collective_calls_per_layer"] == 0
    # Two of the four messages carry one column of statistics, in fp32 one for all ranks.
    assert nonzero(values, "mib_per_layer") == {
        "forward_all_reduce_mib_per_layer": mib(TOKENS * (7 * RANK + 2)),
        "backward_all_reduce_mib_per_layer": mib(TOKENS * 7 * RANK),
    }
    assert values["forward_all_reduce_seconds"] > 0
    # Training: 2 iterations of 2 micro-batches. Evaluation: after each iteration, and at the end of
    # validation and of test data, 2 iterations of 2 micro-batches.
    trained, evaluated = 2 * 2, 4 * 2 * 2
    assert values["layer_passes"] == LAYERS * (trained + evaluated)
    # The first border is the embedding's own reduce-scatter, along hidden; the last an all-to-all.
    assert values["border_forward_reduce_scatter_calls"] == trained + evaluated
    assert values["border_forward_all_to_all_calls"] == trained + evaluated
    assert values["border_backward_all_gather_calls"] == trained
    assert values["border_backward_all_to_all_calls"] == trained
    assert values["border_backward_all_gather_mib"] == mib(trained * TOKENS * HIDDEN / 2)
    assert values["border_backward_all_to_all_mib"] == mib(trained * TOKENS * HIDDEN / 2)
    assert values["parameters"] == COLA_PARAMETERS + 2 * VOCABULARY * HIDDEN
    assert 50 < values["peak_memory_mib"] < 10_000


@pytest.mark.slow
@pytest.mark.parametrize(
    ("flags", "ranks", "parameters"),
    [
        (f"{COLA}", 1, COLA_PARAMETERS + 2 * VOCABULARY * HIDDEN),
        (f"{COLA} {TP2} {PP2}", 4, COLA_PARAMETERS + 2 * VOCABULARY * HIDDEN),
        (f"--low-rank-arch dense {PP2}", 2, DENSE_PARAMETERS + 2 * VOCABULARY * HIDDEN),
        (f"--low-rank-arch none {TP2}", 2, DENSE_PARAMETERS + 2 * VOCABULARY * HIDDEN),
    ],
    ids=["tp1", "tp2-pp2", "dense-pp2", "none-tp2"],
)
def test_parameters_are_the_whole_models(
    flags: str, ranks: int, parameters: int, tmp_path: Path
) -> None:
    values = reported(f"{flags} --train-iters 1", ranks, tmp_path)
    assert values["parameters"] == parameters


@pytest.mark.slow
def test_tied_weights_on_two_stages_are_counted_once(tmp_path: Path) -> None:
    values = reported(f"{COLA} {PP2} --train-iters 1", 2, tmp_path, TIED_MODEL)
    assert values["parameters"] == COLA_PARAMETERS + VOCABULARY * HIDDEN


@pytest.mark.slow
def test_recomputed_collectives_are_counted_apart(tmp_path: Path) -> None:
    full = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
    values = reported(f"{COLA} {TP2} {full} --bf16 {VALIDATED}", 2, tmp_path)

    assert nonzero(values, "calls_per_layer") == {
        "forward_all_reduce_calls_per_layer": 4,
        "backward_all_reduce_calls_per_layer": 4,
        "recompute_all_reduce_calls_per_layer": 4,
        "recompute_collective_calls_per_layer": 4,
    }
    # In bf16 each rank's statistics take three columns.
    message = mib(TOKENS * (7 * RANK + 2 * 3 * 2), size=2)
    assert values["forward_all_reduce_mib_per_layer"] == message
    assert values["recompute_all_reduce_mib_per_layer"] == message
    assert values["backward_all_reduce_mib_per_layer"] == mib(TOKENS * 7 * RANK, size=2)


@pytest.mark.slow
def test_the_baselines_and_megatrons_own_layers(tmp_path: Path) -> None:
    vanilla = reported(f"{COLA} --low-rank-tp vanilla {TP2}", 2, tmp_path)
    dense = reported(f"--low-rank-arch dense {TP2}", 2, tmp_path)
    none = reported(f"--low-rank-arch none {TP2}", 2, tmp_path)

    assert vanilla["forward_all_reduce_mib_per_layer"] == mib(TOKENS * (5 * HIDDEN + 2 * FFN))
    assert vanilla["forward_all_gather_calls_per_layer"] == 1
    assert nonzero(dense, "per_layer") == {
        "forward_all_reduce_calls_per_layer": 2,
        "forward_all_reduce_mib_per_layer": mib(TOKENS * 2 * HIDDEN),
        "backward_all_reduce_calls_per_layer": 2,
        "backward_all_reduce_mib_per_layer": mib(TOKENS * 2 * HIDDEN),
    }
    # Megatron's collectives pass the ledger by: the report must not say that there were none.
    assert none["forward_all_reduce_calls_per_layer"] is None
    assert none["recompute_collective_calls_per_layer"] is None


def printed(flags: list[str]) -> str:
    with contextlib.redirect_stdout(io.StringIO()) as output:
        train_here(flags)
    return output.getvalue()


def test_without_a_file_it_prints_a_table_once() -> None:
    flags = f"{COLA} {TP2} --train-iters 1 --low-rank-comm-report".split()
    first, second = run_ranks(printed, 2, flags, init_process_group=False)

    assert "collectives of this rank" in first
    rows = [line.split("│") for line in first.splitlines() if "all-reduce" in line]
    assert [(row[1].strip(), row[2].strip(), row[4].strip()) for row in rows] == [
        ("layer", "forward", "4"),
        ("layer", "backward", "4"),
    ]
    assert "collectives of this rank" not in second


@pytest.mark.slow
def test_a_run_that_ends_early_reports_too(tmp_path: Path) -> None:
    values = reported(f"{COLA} --train-iters 4 --exit-interval 1", 1, tmp_path)
    assert values["layer_passes"] == LAYERS * 2


@pytest.mark.slow
def test_without_the_flag_nothing_is_reported() -> None:
    (output,) = run_ranks(printed, 1, f"{COLA} --train-iters 1".split(), init_process_group=False)
    assert "iteration        1/" in output
    assert "collectives of this rank" not in output
