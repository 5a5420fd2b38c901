"""Seeded loss curves, kept in `golden/` so that a change of the numbers is seen and meant.

    python -m tests.training.golden [NAME…]

writes them (or the named ones) anew; commit that with the reason why the numbers changed.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from tests.support.runs import losses, train

FOLDER = Path(__file__).parent / "golden"
STEPS = 10
# With Adam's default ε the rounding of one processor would decide steps of another's.
COMMON = f"--train-iters {STEPS} --adam-eps 1e-5"
# LaX's norms amplify rounding, and Adam what they leave of it.
_LAX = "--low-rank-arch lax --optimizer sgd --lr 0.05"
RUNS = {
    "cola_btp": (2, "--low-rank-arch cola --tensor-model-parallel-size 2"),
    "cola_vanilla": (
        2,
        "--low-rank-arch cola --low-rank-tp vanilla --tensor-model-parallel-size 2",
    ),
    "svd_btp": (2, "--low-rank-arch svd --tensor-model-parallel-size 2"),
    "svd_vanilla": (
        2,
        "--low-rank-arch svd --low-rank-tp vanilla --tensor-model-parallel-size 2",
    ),
    "lax_btp": (2, f"{_LAX} --tensor-model-parallel-size 2"),
    "lax_vanilla": (
        2,
        f"{_LAX} --low-rank-tp vanilla --tensor-model-parallel-size 2",
    ),
    "dense": (2, "--low-rank-arch dense --tensor-model-parallel-size 2 --sequence-parallel"),
    "none": (1, "--low-rank-arch none"),
}
"""Ranks and flags, beside those of `tests.support.runs`."""


def curves(name: str) -> dict[str, list[float]]:
    """Losses and gradient norms of a run by step."""
    ranks, flags = RUNS[name]
    results = train(f"{COMMON} {flags}", ranks)
    return {"loss": losses(results), "grad_norm": results[0]["exact_grad_norm"]}


def stored(name: str) -> dict[str, list[float]]:
    """What `curves` gave when it was last written."""
    values: dict[str, list[float]] = json.loads((FOLDER / f"{name}.json").read_text())
    return values


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for name in sys.argv[1:] or RUNS:
        text = json.dumps(curves(name), indent=2) + "\n"
        (FOLDER / f"{name}.json").write_text(text)
        print(f"wrote {name}")
