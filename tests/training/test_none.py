"""`--low-rank-arch none` is Megatron: bit by bit what upstream's GPT gives with the same flags."""

import pytest

from tests.support.distributed import run_ranks
from tests.support.runs import DATA, MODEL, TRAINING, losses, relative_difference, train
from tests.support.stock_gpt import train_stock_gpt

NO_DROPOUT = "--attention-dropout 0 --hidden-dropout 0"
# Megatron's defaults, said aloud because the harness of the stock model turns dropout off.
DROPOUT = "--attention-dropout 0.1 --hidden-dropout 0.1"

LAYOUTS = [
    pytest.param(1, DROPOUT, id="tp1", marks=pytest.mark.slow),
    pytest.param(2, f"--tensor-model-parallel-size 2 {DROPOUT} --sequence-parallel", id="tp2-sp"),
    pytest.param(
        2, f"--tensor-model-parallel-size 2 {NO_DROPOUT}", id="tp2", marks=pytest.mark.slow
    ),
    pytest.param(
        2, f"--pipeline-model-parallel-size 2 {NO_DROPOUT}", id="pp2", marks=pytest.mark.slow
    ),
]


@pytest.mark.parametrize(("ranks", "flags"), LAYOUTS)
def test_losses_and_gradient_norms_are_upstreams(ranks: int, flags: str) -> None:
    ours = train(f"--low-rank-arch none {flags}", ranks)
    upstream = run_ranks(
        train_stock_gpt,
        ranks,
        [*MODEL, *DATA, *TRAINING, *flags.split()],
        init_process_group=False,
    )

    assert len(losses(ours)) == 4
    assert losses(ours) == upstream[-1]["loss"]
    assert [rank["grad_norm"] for rank in ours] == [rank["grad_norm"] for rank in upstream]


@pytest.mark.slow
def test_sequence_parallelism_with_the_replaced_norm_is_megatron_without_it() -> None:
    layout = f"--low-rank-arch none --tensor-model-parallel-size 2 {NO_DROPOUT}"
    with_it = train(f"{layout} --sequence-parallel", 2)
    without = train(layout, 2)

    assert relative_difference(losses(with_it), losses(without)) <= 2e-6
    norms = (run[0]["exact_grad_norm"] for run in (with_it, without))
    assert relative_difference(*norms) <= 2e-6
