"""A checkpoint loads only into the function that it was trained as."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest

from boost_layers.config import LowRankConfig
from megatron.boost.checkpoint_settings import check_settings
from megatron.boost.flags import flags_of
from tests.support.distributed import RankFailure
from tests.support.runs import train


def stored(hidden_size: int = 64, **settings: Any) -> Namespace:
    """The arguments that a checkpoint holds."""
    config = LowRankConfig(**settings)
    values = {flag.destination: getattr(config, flag.field) for flag in flags_of(LowRankConfig)}
    return Namespace(hidden_size=hidden_size, **values)


@pytest.mark.parametrize(
    ("then", "now", "named"),
    [
        ({"arch": "cola"}, {"arch": "dense"}, ("--low-rank-arch", "dense", "cola")),
        ({"arch": "cola"}, {"arch": "cola", "act": "gelu"}, ("--low-rank-act", "gelu", "silu")),
        ({"arch": "cola", "mlp": "swiglu"}, {"arch": "cola"}, ("--low-rank-mlp", "product")),
        ({"arch": "cola", "rank": 8}, {"arch": "cola"}, ("--low-rank-ratio", "16", "8")),
        (
            {"arch": "cola", "mlp_rank": 8},
            {"arch": "cola", "mlp_rank": 12},
            ("--low-rank-mlp-rank", "12", "8", "gate_proj"),
        ),
    ],
)
def test_a_contradiction_names_flag_and_both_values(
    then: dict[str, Any], now: dict[str, Any], named: tuple[str, ...]
) -> None:
    with pytest.raises(ValueError) as refusal:
        check_settings(stored(**then), LowRankConfig(**now), 64)
    assert all(word in str(refusal.value) for word in named)


def test_layout_settings_and_other_spellings_of_the_same_may_differ() -> None:
    now = LowRankConfig(
        arch="cola", rank=16, act="silu", mlp="product", tp="vanilla", norm="sync", grouping=False
    )
    check_settings(stored(arch="cola"), now, 64)


def test_megatrons_own_checkpoints_and_older_ones_of_ours_are_read() -> None:
    check_settings(Namespace(hidden_size=64), LowRankConfig(), 64)
    older = stored(arch="cola")
    del older.core_attention
    check_settings(older, LowRankConfig(arch="cola"), 64)


def test_another_activation_stops_the_resumed_run(tmp_path: Path) -> None:
    cola = f"--low-rank-arch cola --train-iters 1 --save {tmp_path} --save-interval 1"
    train(cola)
    with pytest.raises(RankFailure, match="--low-rank-act: gelu, but the checkpoint .* silu"):
        train(f"{cola} --load {tmp_path} --low-rank-act gelu")
