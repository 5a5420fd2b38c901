"""What a checkpoint was trained as must agree with what it is loaded as.

Megatron stores all arguments with a checkpoint, ours among them, and compares some of its own when
it loads. Another activation fits the same weights and would go on training without a word.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

from boost_layers.config import (
    ATTENTION_PROJECTIONS,
    MLP_PROJECTIONS,
    LowRankConfig,
    flag_of,
)
from megatron.boost.flags import flags_of


def check_settings(stored: Namespace, low_rank: LowRankConfig, hidden_size: int) -> None:
    """Raise ValueError for the first setting that changes the function and differs from the
    checkpoint's, naming both values. Layout settings may differ.

    Args:
        stored: the arguments that the checkpoint holds.
        low_rank: this run's settings.
        hidden_size: this run's.
    """
    if not hasattr(stored, "low_rank_arch"):
        return
    # A flag that came later than the checkpoint had its default then.
    then = LowRankConfig(
        **{f.field: getattr(stored, f.destination, f.default) for f in flags_of(LowRankConfig)}
    )
    for flag, ours, theirs in (
        (flag_of("arch"), low_rank.arch, then.arch),
        (flag_of("act"), low_rank.activation, then.activation),
        (flag_of("mlp"), low_rank.mlp_kind, then.mlp_kind),
        *(
            (flag_of(name), getattr(low_rank, name), getattr(then, name))
            for name in ("lax_base", "lax_gate", "lax_norm", "layers")
        ),
        *(
            (
                low_rank.rank_flag(name),
                f"rank {low_rank.rank_of(name, hidden_size)} of {name}",
                f"rank {then.rank_of(name, stored.hidden_size)}",
            )
            for name in (*ATTENTION_PROJECTIONS, *MLP_PROJECTIONS)
            if low_rank.low_rank
            and low_rank.rank_of(name, hidden_size) != then.rank_of(name, stored.hidden_size)
        ),
    ):
        if ours != theirs:
            raise ValueError(f"{flag}: {ours}, but the checkpoint was trained with {theirs}")


@contextmanager
def settings_checked_on_load(low_rank: LowRankConfig, hidden_size: int) -> Iterator[None]:
    """Context in which Megatron's check of a checkpoint's arguments includes ours."""
    from megatron.training import checkpointing

    upstream = checkpointing.check_checkpoint_args

    def check(stored: Namespace, *args: Any, **kwargs: Any) -> None:
        check_settings(stored, low_rank, hidden_size)
        upstream(stored, *args, **kwargs)

    with mock.patch.object(checkpointing, "check_checkpoint_args", check):
        yield
