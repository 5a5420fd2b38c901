"""A race between models that compute different things is refused."""

import pytest

from benchmarks.models import Fingerprint, _require_agreement
from benchmarks.variants import BTP, FULL_RANK, VANILLA

LOW_RANK = Fingerprint(loss=8.5, embedding_gradient_norm=0.26)
DENSE = Fingerprint(loss=8.4, embedding_gradient_norm=1.37)


def test_variants_of_two_models_need_not_agree() -> None:
    _require_agreement({BTP: LOW_RANK, FULL_RANK[0]: DENSE, FULL_RANK[1]: DENSE}, 1e-4)


@pytest.mark.parametrize(
    "other",
    [
        Fingerprint(loss=8.5 * (1 + 2e-4), embedding_gradient_norm=0.26),
        Fingerprint(loss=8.5, embedding_gradient_norm=0.26 * (1 - 2e-4)),
        Fingerprint(loss=float("nan"), embedding_gradient_norm=0.26),
    ],
)
def test_variants_of_one_model_must_agree(other: Fingerprint) -> None:
    with pytest.raises(RuntimeError, match="vanilla_sliced computes another model than btp"):
        _require_agreement({BTP: LOW_RANK, FULL_RANK[0]: DENSE, VANILLA[0]: other}, 1e-4)
