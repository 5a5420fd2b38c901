"""What TensorBoard and W&B get of a low-rank run beside Megatron's own scalars.

| tag | of |
|---|---|
| `low-rank/collectives-mib-per-step` | every step that Megatron logs there |
| `low-rank-latent-norm/layer-L.P`, `low-rank-effective-rank/layer-L.P` | every N steps |

The throughputs, `low-rank/…-tflops-per-gpu`, are written by the patch that computes them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any
from unittest import mock

from megatron.core import parallel_state
from megatron.core.num_microbatches_calculator import get_current_global_batch_size
from megatron.training import get_args, training

from boost_layers.communication import LEDGER
from boost_layers.observation import observe_latents
from megatron.boost.latent_statistics import LatentStatistics
from megatron.boost.writers import write_scalars, writes_scalars

if TYPE_CHECKING:
    from torch import nn

    from boost_layers.config import LowRankConfig

_MIB = 1024 * 1024


@contextmanager
def logged_metrics(low_rank: LowRankConfig, latents_interval: int) -> Iterator[None]:
    """Context in which the training steps of `pretrain()` are logged.

    Args:
        low_rank: the model's settings; with Megatron's own layers nothing is done.
        latents_interval: steps from one look at the latents to the next; 0: none.
    """
    if low_rank.arch == "none":
        yield
        return
    step = training.train_step

    def logged_step(
        forward_step: Any, data: Any, model: Sequence[nn.Module], *others: Any, **named: Any
    ) -> Any:
        args = get_args()
        iteration = args.curr_iteration + 1
        values: dict[str, float] = {}
        statistics = None
        if latents_interval and iteration % latents_interval == 0:
            statistics = LatentStatistics(
                low_rank,
                hidden_size=args.hidden_size,
                num_layers=args.num_layers,
                sequences=get_current_global_batch_size(),
                data_parallel=parallel_state.get_data_parallel_group(),
            )
            observe_latents(model, statistics)
        before = _bytes_in_collectives()
        try:
            result = step(forward_step, data, model, *others, **named)
        finally:
            if statistics is not None:
                observe_latents(model, None)
        if iteration % args.tensorboard_log_interval == 0:
            mib = (_bytes_in_collectives() - before) / _MIB
            values["low-rank/collectives-mib-per-step"] = mib
        if statistics is not None:
            for (layer, name), (norm, effective_rank) in statistics.values().items():
                values[f"low-rank-latent-norm/layer-{layer}.{name}"] = norm
                values[f"low-rank-effective-rank/layer-{layer}.{name}"] = effective_rank
        if values and writes_scalars():
            write_scalars(values, iteration)
        return result

    with mock.patch.object(training, "train_step", logged_step):
        yield


def _bytes_in_collectives() -> int:
    """What this rank has handed over to the collectives of our layers and their borders."""
    return sum(count.bytes for count in LEDGER.counts.values())
