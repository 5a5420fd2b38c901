"""The example of an architecture in one file, examples/gated_latent.py, by the checks that any
architecture may ask for, and what they say of one with a mistake."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.architecture_checks import (
    UserArchitecture,
    check_accounting,
    check_parity,
    check_resharding,
)
from tests.support.distributed import run_ranks
from tests.unit.test_main_grads import backward, layer, with_main_grads

ROOT = Path(__file__).parents[2]
GATED = UserArchitecture(ROOT / "examples" / "gated_latent.py", "gated", "GatedProjection")
# Three latents, which are combined across the rank: nothing that vanilla could split.
SOFTMAX = UserArchitecture(
    ROOT / "tests" / "support" / "softmax_latent.py", "softmax", "SoftmaxProjection"
)


@pytest.mark.parametrize("tp", [2, *(pytest.param(tp, marks=pytest.mark.slow) for tp in (1, 4))])
def test_it_agrees_with_its_definition_in_plain_pytorch(tp: int) -> None:
    check_parity(GATED, tp)


@pytest.mark.slow
@pytest.mark.parametrize("tp", [2, 1, 4])
def test_its_accounting_is_that_of_a_built_model(tp: int) -> None:
    check_accounting(GATED, tp)


@pytest.mark.slow
def test_its_checkpoints_load_in_every_layout(tmp_path: Path) -> None:
    check_resharding(GATED, tmp_path)


@pytest.mark.slow
def test_several_latents_may_be_combined_across_the_rank() -> None:
    check_parity(SOFTMAX, 2)
    check_accounting(SOFTMAX, 2)


def of_main_gradients(
    architecture: UserArchitecture,
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """On a rank: what is added to main gradients, and the gradients of a twin without them."""
    low_rank = architecture.cases(1)["btp"].low_rank
    plain, fused = layer(low_rank), layer(low_rank)
    backward(plain)
    main = with_main_grads(fused)
    backward(fused)
    added, expected = {}, {}
    twins = zip(fused.named_parameters(), plain.parameters(), strict=True)
    for (name, parameter), twin in twins:
        of_megatron: Any = parameter
        if of_megatron.grad_added_to_main_grad:
            assert twin.grad is not None
            added[name], expected[name] = main[name] - 1, twin.grad
    return added, expected


def test_all_factors_are_added_to_main_gradients() -> None:
    ((added, expected),) = run_ranks(of_main_gradients, 1, GATED)
    assert len(added) == 7 * 3
    torch.testing.assert_close(added, expected, rtol=1e-4, atol=1e-5)


def test_the_checks_notice_another_function(tmp_path: Path) -> None:
    source = GATED.file.read_text()
    wrong = source.replace("torch.sigmoid(F.linear(x, self.A_gate))", "F.linear(x, self.A_gate)")
    assert wrong != source
    file = tmp_path / "wrong_latent.py"
    file.write_text(wrong)
    with pytest.raises(AssertionError, match="'btp': {"):
        check_parity(UserArchitecture(file, "gated", "GatedProjection"), 1)
