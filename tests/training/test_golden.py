"""Seeded runs give the curves of `golden/`, to 1e-5; `tests.training.golden` says how to write
them."""

import pytest

from tests.support.runs import relative_difference
from tests.training.golden import RUNS, STEPS, curves, stored


@pytest.mark.parametrize(
    "name",
    [name if name == "cola_btp" else pytest.param(name, marks=pytest.mark.slow) for name in RUNS],
)
def test_the_run_gives_the_stored_curve(name: str) -> None:
    found, golden = curves(name), stored(name)

    assert found.keys() == golden.keys()
    assert len(found["loss"]) == STEPS
    for quantity in golden:
        assert relative_difference(found[quantity], golden[quantity]) <= 1e-5, quantity
