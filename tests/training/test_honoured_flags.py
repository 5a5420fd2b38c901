"""Flags of Megatron's that the table calls honoured, or apart from the layers, in training runs:
they change what they say and nothing else.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest

from tests.support.runs import losses, relative_difference, train, weight_differences, whole_weights

pytestmark = pytest.mark.slow

COMMON = "--num-layers 4 --global-batch-size 8 --adam-eps 1e-5"
COLA = "--low-rank-arch cola"
VANILLA = f"{COLA} --low-rank-tp vanilla"
DENSE = "--low-rank-arch dense"
TP2 = "--tensor-model-parallel-size 2"
PP2 = "--pipeline-model-parallel-size 2"
FULL = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"


@cache
def trained(flags: str, ranks: int = 1) -> list[dict[str, Any]]:
    return train(f"{COMMON} {flags}", ranks)


# Layouts in which stages differ, and flags that must not change the function.
SAME = [
    pytest.param(COLA, f"{PP2} --decoder-first-pipeline-num-layers 1", 2, id="uneven-first"),
    pytest.param(
        COLA,
        f"{PP2} --account-for-embedding-in-pipeline-split --account-for-loss-in-pipeline-split",
        2,
        id="accounted",
    ),
    pytest.param(COLA, f"{PP2} --pipeline-model-parallel-layout Et|t|t|tL", 2, id="layout"),
    pytest.param(
        COLA, f"{TP2} {PP2} --pipeline-model-parallel-layout E|ttttL", 4, id="stage-without-layer"
    ),
    pytest.param(VANILLA, f"{TP2} {FULL} --distribute-saved-activations", 2, id="distributed"),
    pytest.param(DENSE, f"{TP2} {FULL} --distribute-saved-activations", 2, id="dense-distributed"),
    pytest.param(
        COLA,
        f"{TP2} --recompute-activations --deterministic-mode "
        "--no-create-attention-mask-in-dataloader",
        2,
        id="determinism",
    ),
    pytest.param(
        COLA,
        "--data-parallel-random-init --check-weight-hash-across-dp-replicas-interval 1 "
        "--log-params-norm --log-num-zeros-in-grad",
        2,
        id="replicas",
    ),
]


@pytest.mark.parametrize(("arch", "flags", "ranks"), SAME)
def test_what_must_not_change_the_function_does_not(arch: str, flags: str, ranks: int) -> None:
    reference = trained(COLA if arch == VANILLA else arch)
    results = trained(f"{arch} {flags}", ranks)

    assert len(losses(results)) == 4
    assert relative_difference(losses(results), losses(reference)) <= 2e-6
    differences = weight_differences(whole_weights(results), whole_weights(reference))
    assert {name: d for name, d in differences.items() if not d <= 1e-5} == {}


CHANGES = [
    "--norm-epsilon 0.1",
    "--rotary-interleaved",
    "--rotary-percent 0.5",
    "--rotary-base 10",
    "--rotary-seq-len-interpolation-factor 4",
    "--position-embedding-type none",
    "--position-embedding-type yarn --rotary-scaling-factor 4 "
    "--yarn-original-max-position-embeddings 8",
    "--init-method-std 0.3",
    "--embedding-init-method-std 0.3",
    "--seed 7",
    "--group-query-attention --num-query-groups 2",
    "--kv-channels 16",
]


@pytest.mark.parametrize("flags", CHANGES)
def test_what_changes_the_function_changes_it(flags: str) -> None:
    changed = losses(trained(f"{COLA} {flags} --train-iters 1"))
    assert relative_difference(changed, losses(trained(COLA))[:1]) > 1e-5


def test_what_changes_the_function_does_so_alike_at_any_layout() -> None:
    together = " ".join(flags for flags in CHANGES if "position-embedding" not in flags)
    one, two = trained(f"{COLA} {together}"), trained(f"{COLA} {together} {TP2}", 2)
    assert relative_difference(losses(two), losses(one)) <= 2e-6
