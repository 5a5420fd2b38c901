"""What TensorBoard and W&B get of whole runs, through Megatron's own writers."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from megatron.boost.plotting.sources import read_runs
from tests.support.distributed import run_ranks
from tests.support.runs import losses, train, train_in_turn
from tests.support.writers import Written, recorded_writers

COLA = "--low-rank-arch cola --low-rank-rank 8"
LAX = "--low-rank-arch lax --low-rank-rank 8"
TP2 = "--tensor-model-parallel-size 2"
PP2 = "--pipeline-model-parallel-size 2"
BOARD = "--tensorboard-dir board"
EVERY_2 = "--low-rank-log-latents-interval 2"
RANK, LAYERS, TOKENS = 8, 2, 2 * 32

ONE_RANK = {
    "cola": f"{COLA} {BOARD} {EVERY_2}",
    "lax": f"{LAX} {BOARD} {EVERY_2}",
    "silent": COLA,
    "silent lax": LAX,
    "throughput": f"{COLA} {BOARD} --log-throughput",
    "dense": f"--low-rank-arch dense {BOARD} --log-throughput",
}
TWO_RANKS = {
    "btp": f"{COLA} {TP2} {BOARD} {EVERY_2}",
    "checkpointing": f"{COLA} {TP2} --low-rank-recompute {BOARD} {EVERY_2}",
    "full recompute": f"{COLA} {TP2} --recompute-granularity full --recompute-method uniform "
    f"--recompute-num-layers 1 {BOARD} {EVERY_2}",
    "vanilla": f"{COLA} --low-rank-tp vanilla {TP2} {BOARD} {EVERY_2}",
    "pipeline": f"{COLA} {PP2} {BOARD} {EVERY_2}",
    "data parallel": f"{COLA} --use-distributed-optimizer {BOARD} {EVERY_2}",
    "lax pipeline": f"{LAX} {PP2} {BOARD} {EVERY_2}",
    "bf16": f"{COLA} {TP2} --bf16 {BOARD} {EVERY_2}",
    "evaluated": f"{COLA} {TP2} {BOARD} --eval-interval 1 --train-iters 2",
}


def recorded(runs: Sequence[str]) -> list[dict[str, Any]]:
    """On a rank: `train_in_turn`, each with "written", what the two writers were given."""
    written: list[Written] = []

    @contextmanager
    def recording() -> Iterator[None]:
        with recorded_writers() as of_run:
            written.append(of_run)
            yield

    results = train_in_turn(runs, before=recording)
    return [{**result, "written": w} for result, w in zip(results, written, strict=True)]


@cache
def runs(world_size: int) -> dict[str, list[dict[str, Any]]]:
    """Each run's results by rank."""
    flags = ONE_RANK if world_size == 1 else TWO_RANKS
    by_rank = run_ranks(
        recorded, world_size, list(flags.values()), init_process_group=False, timeout_s=240.0
    )
    return dict(zip(flags, map(list, zip(*by_rank, strict=True)), strict=True))


def written(name: str, world_size: int = 2) -> Written:
    """By the last rank, which alone has writers."""
    *others, last = runs(world_size)[name]
    assert not any(other["written"].tensorboard for other in others)
    found: Written = last["written"]
    return found


def latents(of: Written) -> dict[tuple[str, int], float]:
    return of.of("low-rank-latent-norm/") | of.of("low-rank-effective-rank/")


@pytest.mark.slow
@pytest.mark.parametrize("name", list(TWO_RANKS)[:-1])
def test_latents_are_the_same_at_every_layout(name: str) -> None:
    one_rank = latents(written("lax" if "lax" in name else "cola", 1))
    found = latents(written(name))
    assert found.keys() == one_rank.keys()
    for key, value in found.items():
        assert value == pytest.approx(one_rank[key], rel=2e-2 if name == "bf16" else 2e-4), key


@pytest.mark.slow
def test_every_projection_every_second_step_and_nothing_on_the_others() -> None:
    found = latents(written("cola", 1))
    names = [f"{part}_proj" for part in ("q", "k", "v", "o", "gate", "up", "down")]
    assert found.keys() == {
        (f"low-rank-{what}/layer-{layer}.{name}", step)
        for what in ("latent-norm", "effective-rank")
        for layer in range(LAYERS)
        for name in names
        for step in (2, 4)
    }
    for (tag, _), value in found.items():
        assert value > 0
        if "effective" in tag:
            assert 1 < value <= RANK
    # The model moves, and so do they.
    assert len({round(value, 6) for value in found.values()}) == len(found)


@pytest.mark.slow
def test_looking_at_latents_does_not_change_the_training() -> None:
    assert losses(runs(1)["cola"]) == losses(runs(1)["silent"])
    assert losses(runs(1)["lax"]) == losses(runs(1)["silent lax"])
    assert written("silent", 1) == Written()


@pytest.mark.slow
def test_megabytes_of_a_step_are_those_of_its_collectives() -> None:
    """Forward and backward of two micro-batches and two layers, and two borders each way;
    evaluations between the steps are not counted."""
    layer = TOKENS * (7 * RANK + 2 + 7 * RANK) * LAYERS
    # The embedding's reduce-scatter takes the whole hidden states, everything else a half.
    borders = TOKENS * 32 * (1 + 1 / 2 + 1 / 2 + 1 / 2)
    for name, steps in (("btp", 4), ("evaluated", 2)):
        found = written(name).of("low-rank/collectives")
        assert list(found) == [("low-rank/collectives-mib-per-step", s + 1) for s in range(steps)]
        assert list(found.values()) == [pytest.approx(2 * 4 * (layer + borders) / 2**20)] * steps
    assert set(written("cola", 1).of("low-rank/collectives").values()) == {0.0}


@pytest.mark.slow
def test_throughputs_go_where_the_log_line_goes() -> None:
    found = written("throughput", 1).of("low-rank/")
    true, dense = (
        [found[f"low-rank/{which}-tflops-per-gpu", step] for step in range(1, 5)]
        for which in ("true", "dense-equivalent")
    )
    ratios = [d / t for d, t in zip(dense, true, strict=True)]
    assert min(true) > 0
    # Of one model: the ratio of operations, whatever the steps took.
    assert ratios == [pytest.approx(ratios[0])] * 4 and ratios[0] > 1.2
    # A full-rank model has one throughput, which is Megatron's.
    assert not written("dense", 1).of("low-rank/true")


@pytest.mark.slow
def test_w_and_b_gets_the_same(tmp_path: Path) -> None:
    flags = f"{COLA} {EVERY_2} --log-throughput --wandb-project p --wandb-exp-name e"
    flags += f" --wandb-save-dir {tmp_path}"
    ((alone, beside),) = run_ranks(
        recorded,
        1,
        [flags, f"{flags} {BOARD}"],
        init_process_group=False,
    )
    ours = [entry for entry in alone["written"].wandb if entry[0].startswith("low-rank")]
    steps = {(tag, step) for tag, _, step in ours}
    assert ("low-rank-effective-rank/layer-1.down_proj", 4) in steps
    assert ("low-rank/true-tflops-per-gpu", 3) in steps
    assert len(ours) == len(steps) == 2 * 2 * 7 * LAYERS + 3 * 4
    both = beside["written"]
    of_board = [entry for entry in both.tensorboard if entry[0].startswith("low-rank")]
    assert of_board == [entry for entry in both.wandb if entry[0].startswith("low-rank")]


@pytest.mark.slow
def test_real_event_files_hold_the_losses_and_the_metrics(tmp_path: Path) -> None:
    """With the package itself, whose files our reader and its own read alike."""
    pytest.importorskip("tensorboard", reason="the extra `tensorboard` brings it")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    board = tmp_path / "board"
    results = train(f"{COLA} {TP2} {EVERY_2} --tensorboard-dir {board}", 2)
    (run,) = read_runs([str(board)])
    assert run.losses == pytest.approx(losses(results), rel=1e-6)
    assert run.x("tokens") == [step * 4 * 32.0 for step in range(1, 5)]
    events = EventAccumulator(str(board))
    events.Reload()
    assert [event.value for event in events.Scalars("lm loss")] == run.losses
    assert len(events.Scalars("low-rank-effective-rank/layer-0.q_proj")) == 2


def test_the_reports_megabytes_are_the_metrics(tmp_path: Path) -> None:
    """The metric adds up over the steps to what the report of collectives says of the run."""
    report = tmp_path / "report.json"
    flags = f"{COLA} {TP2} {BOARD} --eval-iters 0 --low-rank-comm-report {report}"
    *_, (last,) = run_ranks(recorded, 2, [flags], init_process_group=False)
    values = json.loads(report.read_text())
    passes = values["layer_passes"]
    total = sum(v * passes for k, v in values.items() if k.endswith("_mib_per_layer"))
    total += sum(v for k, v in values.items() if k.startswith("border") and k.endswith("_mib"))
    assert sum(last["written"].of("low-rank/collectives").values()) == pytest.approx(total)
