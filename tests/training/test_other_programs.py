"""Our layers in programs that are not ours: a Megatron-LM user's script, and a plain one."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from tests.support.distributed import run_ranks
from tests.support.runs import DATA, MODEL, TRAINING, losses, relative_difference

pytestmark = pytest.mark.slow

REPOSITORY = Path(__file__).parents[2]
SCRIPT = REPOSITORY / "tests" / "support" / "plain_pretrain_gpt.py"
TP2 = "--tensor-model-parallel-size 2"
TP2_PP2 = f"{TP2} --pipeline-model-parallel-size 2"
SPEC = "--spec boost_layers.specs gpt_spec --hidden-dropout 0 --attention-dropout 0"


def train_script(flags: str, settings: str | None) -> dict[str, Any]:
    """On a rank: `python -m megatron.boost.cpu SCRIPT FLAGS` with the layers' settings in the
    environment, and what it did."""
    from megatron.training import training

    from boost_layers.communication import LEDGER
    from megatron.boost import cpu

    environment = {} if settings is None else {"BOOST_LOW_RANK": settings}
    history: dict[str, Any] = {"loss": []}
    step, setup = training.train_step, training.setup_model_and_optimizer

    def recording_step(*args: Any, **kwargs: Any) -> Any:
        result = step(*args, **kwargs)
        history["loss"] += [float(loss) for loss in result[0].values()]
        return result

    def keeping_setup(*args: Any, **kwargs: Any) -> Any:
        result = setup(*args, **kwargs)
        layers = [m for model in result[0] for m in model.modules() if hasattr(m, "layer_number")]
        history["layers"] = {type(m).__name__ for m in layers if hasattr(m, "projections")}
        history["stock_layers"] = {type(m).__name__ for m in layers} & {"TransformerLayer"}
        return result

    with (
        mock.patch.dict(os.environ, environment),
        mock.patch.object(training, "train_step", recording_step),
        mock.patch.object(training, "setup_model_and_optimizer", keeping_setup),
    ):
        argv = [*MODEL, *DATA, *TRAINING, "--train-iters", "12", *flags.split()]
        history["code"] = cpu.main(["--verbose", str(SCRIPT), *argv])
    history["counts"] = {
        (scope, phase, operation): count.calls
        for (scope, phase, operation), count in LEDGER.counts.items()
    }
    history["passes"] = dict(LEDGER.layer_passes)
    return history


def collectives(rank: dict[str, Any]) -> dict[tuple[str, str], float]:
    """Calls per layer and micro-batch, by phase and operation, within the layers."""
    return {
        (phase, operation): calls / rank["passes"][phase]
        for (scope, phase, operation), calls in rank["counts"].items()
        if scope == "layer"
    }


@pytest.mark.parametrize(
    ("settings", "layout", "ranks"),
    [
        pytest.param("arch=cola,ratio=0.25", TP2, 2, id="tp2"),
        pytest.param("arch=cola,ratio=0.25", TP2_PP2, 4, id="tp2-pp2"),
        pytest.param("arch=lax,ratio=0.25", TP2_PP2, 4, id="lax-tp2-pp2"),
    ],
)
def test_an_unmodified_script_trains_our_layers_by_its_spec(
    settings: str, layout: str, ranks: int
) -> None:
    results = run_ranks(train_script, ranks, f"{SPEC} {layout}", settings, init_process_group=False)

    trained = losses(results)
    assert len(trained) == 12
    assert trained[-1] < trained[0] - 0.3
    for rank in results:
        assert rank["code"] == 0
        assert rank["layers"] == {"LowRankLayer"} and not rank["stock_layers"]
        # Two layers, two micro-batches, twelve iterations.
        assert rank["passes"]["backward"] == 2 * 2 * 12 * 2 // ranks
        assert collectives(rank) == {("forward", "all_reduce"): 4, ("backward", "all_reduce"): 4}


def test_the_layers_of_a_spec_follow_megatrons_seed_and_the_environments_settings() -> None:
    """As many runs as settings, of one rank each."""
    first, other_seed, same, vanilla = (
        losses(run_ranks(train_script, 1, f"{SPEC} {flags}", settings, init_process_group=False))
        for flags, settings in (
            ("", None),
            ("--seed 4321", "rank=8"),
            ("--seed 1234", "rank=8"),
            ("", "tp=vanilla,seed=1234"),
        )
    )
    # Half of hidden 32 is not a quarter: 8 is.
    assert same == first
    assert relative_difference(other_seed[:1], first[:1]) > 1e-3
    assert relative_difference(vanilla, first) < 1e-5


def test_the_plain_program_is_short() -> None:
    source = (REPOSITORY / "examples" / "plain_gpt_model.py").read_text()
    assert len(source.splitlines()) < 80
