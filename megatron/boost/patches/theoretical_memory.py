"""Megatron's theoretical memory footprint takes every model for a full-rank one.

`report_theoretical_memory()`, which the training loop prints after the first iteration, knows
neither the factors' weights nor what low-rank layers keep for their backward, and takes every run
for one in bf16.
"""

from __future__ import annotations

import contextlib
from argparse import Namespace
from collections.abc import Iterator

from megatron.boost.patches import Patch
from megatron.boost.patches.replacement import replaced


@contextlib.contextmanager
def _apply() -> Iterator[None]:
    from megatron.training import theoretical_memory_usage, training

    from megatron.boost.accounting.memory_report import (
        closing_line,
        memory_footprint,
        memory_report_lines,
    )
    from megatron.boost.accounting.of_megatron import layout_of_arguments, model_of_arguments
    from megatron.boost.arguments import has_our_layers, low_rank_config

    upstream = theoretical_memory_usage.report_theoretical_memory

    def report_theoretical_memory(
        args: Namespace, num_microbatches: int | None = None, verbose: bool = False
    ) -> tuple[float, float, float] | None:
        """Upstream's report; for our layers, its lines with our accounting's figures."""
        if not has_our_layers(args):
            reported: tuple[float, float, float] | None
            reported = upstream(args, num_microbatches=num_microbatches, verbose=verbose)
            return reported
        model = model_of_arguments(args, low_rank_config(args))
        layout = layout_of_arguments(args, num_microbatches)
        footprint = memory_footprint(model, layout)
        if verbose:
            print("\n".join(memory_report_lines(model, layout)))
        print(closing_line(footprint))
        return (
            footprint.weight_and_optimizer_mib,
            footprint.activation_mib,
            footprint.total_mib,
        )

    # The training loop has a reference of its own.
    with (
        replaced(training, "report_theoretical_memory", report_theoretical_memory),
        replaced(theoretical_memory_usage, "report_theoretical_memory", report_theoretical_memory),
    ):
        yield


PATCH = Patch(
    name="theoretical_memory",
    reason="the theoretical memory footprint is that of a full-rank model in bf16",
    needs="always",
    apply=_apply,
)
