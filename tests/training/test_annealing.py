"""Training with an annealed φ: it starts as the model without φ, ends as the one with it, and a
resumed run and an evaluation are on the same schedule."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from tests.support.distributed import RankFailure, run_ranks
from tests.support.runs import train, train_in_turn, weight_differences, whole_weights

COLA = "--low-rank-arch cola --low-rank-mlp swiglu"
COMMON = "--train-iters 4 --eval-interval 2 --ckpt-format torch_dist"
SHORT = "--train-iters 2 --eval-iters 0"
STEPS = "--low-rank-act-anneal 3"


def amounts_of(models: list[Any]) -> list[float]:
    from boost_layers.layer import LowRankLayer

    modules = [module for model in models for module in model.modules()]
    return [m.activation_amount for m in modules if isinstance(m, LowRankLayer)]


def recorded(runs: list[str]) -> list[dict[str, Any]]:
    """On a rank: `train_in_turn`, and what φ's amount was in each step and each evaluation."""
    seen: list[dict[str, list[float]]] = []

    @contextmanager
    def recording() -> Iterator[None]:
        from megatron.training import training as upstream

        step, evaluate = upstream.train_step, upstream.evaluate
        amounts: dict[str, list[float]] = {"steps": [], "evaluations": []}
        seen.append(amounts)

        def one_value(models: list[Any]) -> float:
            (amount,) = set(amounts_of(models))
            return amount

        def recording_step(forward: Any, data: Any, model: Any, *more: Any, **named: Any) -> Any:
            amounts["steps"].append(one_value(model))
            return step(forward, data, model, *more, **named)

        def recording_evaluation(forward: Any, data: Any, model: Any, *more: Any, **n: Any) -> Any:
            amounts["evaluations"].append(one_value(model))
            return evaluate(forward, data, model, *more, **n)

        with (
            mock.patch.object(upstream, "train_step", recording_step),
            mock.patch.object(upstream, "evaluate", recording_evaluation),
        ):
            yield

    results = train_in_turn(runs, before=recording)
    return [{**result, **amounts} for result, amounts in zip(results, seen, strict=True)]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("annealed")


@pytest.fixture(scope="module")
def runs(checkpoint: Path) -> dict[str, dict[str, Any]]:
    half = f"--save {checkpoint} --save-interval 2 --exit-interval 2"
    flags = {
        "svd": f"{SHORT} --low-rank-arch svd",
        "cola": f"{SHORT} {COLA}",
        "unbroken": f"{COMMON} {COLA} {STEPS}",
        "first half": f"{COMMON} {COLA} {STEPS} {half}",
        "second half": f"{COMMON} --use-checkpoint-args --load {checkpoint}",
        "evaluation": f"{COMMON} {COLA} {STEPS} --load {checkpoint} --skip-train",
    }
    (found,) = run_ranks(recorded, 1, list(flags.values()), init_process_group=False)
    return dict(zip(flags, found, strict=True))


@pytest.mark.slow
def test_the_first_step_is_that_of_the_model_without_an_activation(
    runs: dict[str, dict[str, Any]],
) -> None:
    annealed, svd, cola = (runs[name] for name in ("unbroken", "svd", "cola"))
    for name in ("loss", "grad_norm"):
        assert annealed[name][0] == svd[name][0] != cola[name][0]
        assert annealed[name][1] not in (svd[name][1], cola[name][1])


@pytest.mark.slow
def test_the_amount_follows_the_iterations_in_steps_and_evaluations(
    runs: dict[str, dict[str, Any]],
) -> None:
    third = pytest.approx(1 / 3), pytest.approx(2 / 3)
    assert runs["unbroken"]["steps"] == [0.0, *third, 1.0]
    first, *others = runs["unbroken"]["evaluations"]
    assert first == third[1] and others and set(others) == {1.0}
    assert runs["cola"]["steps"] == [1.0] * 2
    assert runs["evaluation"]["steps"] == []
    assert set(runs["evaluation"]["evaluations"]) == {first}


@pytest.mark.slow
def test_a_run_resumed_on_the_way_is_the_unbroken_one(runs: dict[str, dict[str, Any]]) -> None:
    first, second, whole = (runs[name] for name in ("first half", "second half", "unbroken"))
    for name in ("loss", "grad_norm", "steps"):
        assert first[name] + second[name] == whole[name]
    differences = weight_differences(whole_weights([second]), whole_weights([whole]))
    assert set(differences.values()) == {0.0}


@pytest.mark.slow
def test_another_schedule_is_refused(runs: dict[str, Any], checkpoint: Path) -> None:
    flags = f"{COMMON} {COLA} --low-rank-act-anneal 5 --load {checkpoint}"
    with pytest.raises(RankFailure, match="--low-rank-act-anneal: 5, but the .* trained with 3"):
        train(flags)
