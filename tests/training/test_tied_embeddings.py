"""Tied embedding and head, Megatron's default, train alike on one rank and over a pipeline.

On two stages the shared weight exists twice: both copies must start equal, get the sum of both
gradients, and be counted once in the gradient norm.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.distributed import run_ranks
from tests.support.runs import (
    TIED_MODEL,
    losses,
    relative_difference,
    train_here,
    weight_differences,
    whole_weights,
)

# See test_layouts for ε.
FLAGS = "--low-rank-arch cola --num-layers 4 --global-batch-size 8 --train-iters 5 --adam-eps 1e-5"
TP2_PP2 = "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2"


def trained(flags: str, ranks: int) -> list[dict[str, Any]]:
    return run_ranks(
        train_here, ranks, f"{FLAGS} {flags}".split(), None, TIED_MODEL, init_process_group=False
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    "layout", [TP2_PP2, f"{TP2_PP2} --num-layers-per-virtual-pipeline-stage 1"]
)
def test_tied_embeddings_train_alike_over_a_pipeline(layout: str) -> None:
    single, results = trained("", 1), trained(layout, 4)

    assert relative_difference(losses(results), losses(single)) <= 2e-6
    for rank in results:
        norms = rank["exact_grad_norm"], single[0]["exact_grad_norm"]
        assert relative_difference(*norms) <= 2e-6
    weights = whole_weights(results)
    head = weights.pop("output_layer.weight")
    assert (head == weights["embedding.word_embeddings.weight"]).all()
    differences = weight_differences(weights, whole_weights(single))
    assert {name: d for name, d in differences.items() if not d <= 1e-5} == {}
