"""A run that is stopped, saved and resumed is the unbroken run: bit by bit on the same layout,
within rounding on another."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.support.runs import losses, relative_difference, train, weight_differences, whole_weights

TP2 = "--tensor-model-parallel-size 2"
PP2 = "--pipeline-model-parallel-size 2"
DISTRIBUTED = "--use-distributed-optimizer"
COLA = "--low-rank-arch cola"
# With its default ε Adam amplifies what layouts differ by in rounding.
COMMON = "--num-layers 4 --train-iters 4 --adam-eps 1e-5 --ckpt-format torch_dist"


@cache
def unbroken(flags: str, ranks: int) -> list[dict[str, Any]]:
    return train(f"{COMMON} {flags}", ranks)


def broken(flags: str, ranks: int, folder: Path) -> list[dict[str, Any]]:
    """The first two of the four iterations, saved to `folder`."""
    return train(f"{COMMON} {flags} --save {folder} --save-interval 2 --exit-interval 2", ranks)


def resumed(flags: str, ranks: int, folder: Path) -> list[dict[str, Any]]:
    return train(f"{COMMON} {flags} --load {folder}", ranks)


def all_sample_ids(results: list[dict[str, Any]]) -> list[int]:
    return sorted({index for rank in results for index in rank["sample_ids"]})


def slow(*values: Any, id: str) -> Any:
    return pytest.param(*values, id=id, marks=pytest.mark.slow)


@pytest.mark.parametrize(
    ("flags", "ranks"),
    [
        slow(f"{COLA} {TP2}", 2, id="btp-tp2"),
        slow(f"{COLA} {DISTRIBUTED}", 2, id="btp-dp2-distributed"),
        slow(
            f"{COLA} {TP2} {DISTRIBUTED} --overlap-grad-reduce --overlap-param-gather",
            4,
            id="btp-tp2-dp2-overlaps",
        ),
        slow(
            f"{COLA} {TP2} {PP2} --num-layers-per-virtual-pipeline-stage 1",
            4,
            id="btp-tp2-interleaved",
        ),
        slow(f"{COLA} {TP2} {DISTRIBUTED} --bf16", 2, id="btp-tp2-bf16-distributed"),
        slow(f"{COLA} --low-rank-tp vanilla {TP2}", 2, id="vanilla-tp2"),
        slow(f"--low-rank-arch dense {TP2} --sequence-parallel", 2, id="dense-tp2"),
        slow(f"--low-rank-arch none {TP2}", 2, id="none-tp2"),
    ],
)
def test_resuming_is_the_unbroken_run(flags: str, ranks: int, tmp_path: Path) -> None:
    whole = unbroken(flags, ranks)
    first = broken(flags, ranks, tmp_path)
    second = resumed(flags, ranks, tmp_path)

    assert len(losses(first)) == len(losses(second)) == 2
    assert losses(first) + losses(second) == losses(whole)
    for before, after, all_along in zip(first, second, whole, strict=True):
        for name in ("grad_norm", "exact_grad_norm", "sample_ids"):
            assert before[name] + after[name] == all_along[name], name
    differences = weight_differences(whole_weights(second), whole_weights(whole))
    assert set(differences.values()) == {0.0}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("saved", "saved_ranks", "loaded", "loaded_ranks"),
    [
        (f"{COLA} {DISTRIBUTED}", 2, f"{COLA} {TP2} {PP2} {DISTRIBUTED}", 4),
        (f"--low-rank-arch dense {TP2}", 2, f"--low-rank-arch dense {PP2}", 2),
    ],
    ids=["dp2-tp2-pp2", "dense-tp2-pp2"],
)
def test_resuming_on_another_layout_agrees_with_the_unbroken_run(
    saved: str, saved_ranks: int, loaded: str, loaded_ranks: int, tmp_path: Path
) -> None:
    whole = unbroken(saved, saved_ranks)
    first = broken(saved, saved_ranks, tmp_path)
    second = resumed(loaded, loaded_ranks, tmp_path)

    assert relative_difference(losses(first) + losses(second), losses(whole)) <= 2e-6
    norms = first[0]["exact_grad_norm"] + second[0]["exact_grad_norm"]
    assert relative_difference(norms, whole[0]["exact_grad_norm"]) <= 2e-6
    # Two more steps of Adam: with lost or foreign moments these would be other weights.
    differences = weight_differences(whole_weights(second), whole_weights(whole))
    assert {name: d for name, d in differences.items() if not d <= 1e-5} == {}
    ids = all_sample_ids(first), all_sample_ids(second)
    assert max(ids[0]) < min(ids[1])
    assert sorted(ids[0] + ids[1]) == all_sample_ids(whole)
