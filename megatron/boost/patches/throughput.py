"""Megatron's FLOP count takes every model for a full-rank one.

`num_floating_point_operations()` has no hook. A low-rank model needs fewer operations, so
`--log-throughput` and the FLOPs kept in checkpoints would be overstated. With our layers the log
line's figure is the model's own, and a line after it gives, labelled, the operations of the
full-rank model of the same sizes in the same time.
"""

from __future__ import annotations

import contextlib
from argparse import Namespace
from collections.abc import Iterator
from typing import Any

from megatron.boost.patches import Patch
from megatron.boost.patches.replacement import replaced

_FIELD = "throughput per GPU (TFLOP/s/GPU):"


@contextlib.contextmanager
def _apply() -> Iterator[None]:
    from megatron.training import get_args, one_logger_utils, training

    from megatron.boost.accounting.flops import Work, dense_equivalent_flops, model_flops
    from megatron.boost.accounting.of_megatron import model_of_arguments
    from megatron.boost.arguments import has_our_layers, low_rank_config
    from megatron.boost.writers import write_scalars

    count_dense = training.num_floating_point_operations
    track = one_logger_utils.track_e2e_metrics
    print_on_last_rank = training.print_rank_last
    dense_over_true: float | None = None
    to_print: str | None = None

    def num_floating_point_operations(
        args: Namespace,
        batch_size: float,
        seqlen_squared_sum_in_batch: float | None = None,
        total_real_tokens_in_batch: float | None = None,
    ) -> float:
        """Upstream's count; for our layers, our accounting's."""
        nonlocal dense_over_true
        dense_over_true = None
        if not has_our_layers(args):
            counted: float = count_dense(
                args, batch_size, seqlen_squared_sum_in_batch, total_real_tokens_in_batch
            )
            return counted
        work = Work.of_sequences(batch_size, args.seq_length)
        work = Work(
            work.tokens if total_real_tokens_in_batch is None else total_real_tokens_in_batch,
            work.seqlen_squared_sum
            if seqlen_squared_sum_in_batch is None
            else seqlen_squared_sum_in_batch,
        )
        model = model_of_arguments(args, low_rank_config(args))
        flops = model_flops(model, work)
        if model.low_rank.low_rank:
            dense_over_true = dense_equivalent_flops(model, work) / flops
        return flops

    def track_e2e_metrics(log_throughput: bool = False, throughput: float | None = None) -> Any:
        """Upstream's; the loop hands its figure over here before it rounds and prints it."""
        nonlocal to_print
        to_print = None
        if log_throughput and throughput is not None and dense_over_true is not None:
            dense = throughput * dense_over_true
            to_print = (
                f" dense-equivalent TFLOP/s/GPU: {dense:.4g} "
                "(operations of the full-rank model of these sizes, which were not computed)"
            )
            write_scalars(
                {
                    "low-rank/true-tflops-per-gpu": throughput,
                    "low-rank/dense-equivalent-tflops-per-gpu": dense,
                },
                get_args().curr_iteration + 1,
            )
        return track(log_throughput, throughput)

    def print_rank_last(message: str) -> None:
        """Upstream's, with our line after the log line that shows the throughput."""
        nonlocal to_print
        print_on_last_rank(message)
        if to_print is not None and _FIELD in message:
            print_on_last_rank(to_print)
            to_print = None

    with (
        replaced(training, "num_floating_point_operations", num_floating_point_operations),
        replaced(one_logger_utils, "track_e2e_metrics", track_e2e_metrics),
        replaced(training, "print_rank_last", print_rank_last),
    ):
        yield


PATCH = Patch(
    name="throughput",
    reason="--log-throughput counts the operations of a full-rank model whatever the layers are",
    needs="always",
    apply=_apply,
)
