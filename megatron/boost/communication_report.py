"""The report of a run's collectives: a table on the terminal and flat JSON.

Calls are per layer and micro-batch and sizes those of the tensor handed over on one rank, borders
of the stack of layers apart; they are this rank's, and equal on all ranks of a TP group.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, get_args

import torch
from rich.console import Console
from rich.table import Table

from boost_layers.communication import Ledger, Operation, Phase

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch import nn

_MIB = 1024 * 1024
_VOCABULARY = ("word_embeddings.weight", "output_layer.weight")


def report(ledger: Ledger, models: Iterable[nn.Module], vocab_size: int) -> dict[str, Any]:
    """Everything that the ledger counted, under flat keys with their units.

    `…_calls_per_layer` and `…_mib_per_layer` per layer and micro-batch (None where no layer of ours
    ran, so that nothing was counted), `…_seconds` over the whole run, `border_…` whole-run counts
    of what surrounds the layers; `parameters` of the whole model and `peak_memory_mib` of this
    rank. Called by every rank: see `whole_parameters`.

    Args:
        ledger: the run's.
        models: the model chunks of this rank.
        vocab_size: the number of tokens that exist.
    """
    ledger.settle()
    counted = ledger.layer_passes["forward"] > 0
    values: dict[str, Any] = {}
    for phase in get_args(Phase):
        for operation in get_args(Operation):
            calls, mib = ledger.per_layer(phase, operation)
            count = ledger.counts.get(("layer", phase, operation))
            values[f"{phase}_{operation}_calls_per_layer"] = round(calls, 6) if counted else None
            values[f"{phase}_{operation}_mib_per_layer"] = mib if counted else None
            values[f"{phase}_{operation}_seconds"] = count.seconds if count else 0.0
            border = ledger.counts.get(("border", phase, operation))
            values[f"border_{phase}_{operation}_calls"] = border.calls if border else 0
            values[f"border_{phase}_{operation}_mib"] = border.bytes / _MIB if border else 0.0
            values[f"border_{phase}_{operation}_seconds"] = border.seconds if border else 0.0
    values["recompute_collective_calls_per_layer"] = (
        sum(values[f"recompute_{operation}_calls_per_layer"] for operation in get_args(Operation))
        if counted
        else None
    )
    values["layer_passes"] = ledger.layer_passes["forward"]
    values["parameters"] = whole_parameters(models, vocab_size)
    values["peak_memory_mib"] = peak_memory_mib()
    return values


def whole_parameters(models: Iterable[nn.Module], vocab_size: int) -> int:
    """Parameters of the whole model, which do not depend on its layout: whole tensors of every
    pipeline stage, tied weights once, without the rows that pad the vocabulary. One all-reduce of
    one integer over the pipeline."""
    from megatron.core import parallel_state
    from megatron.core.transformer.module import param_is_not_shared

    tp_size = parallel_state.get_tensor_model_parallel_world_size()
    total = 0
    for model in models:
        for name, parameter in model.named_parameters():
            if not param_is_not_shared(parameter):
                continue
            size = parameter.numel()
            if getattr(parameter, "tensor_model_parallel", False):
                size *= tp_size
            if name.endswith(_VOCABULARY):
                padded = parameter.shape[0] * tp_size
                size = size // padded * min(padded, vocab_size)
            total += size
    group = parallel_state.get_pipeline_model_parallel_group()
    summed = torch.tensor(total, device=torch.cuda.current_device())
    torch.distributed.all_reduce(summed, group=group)
    return int(summed)


def peak_memory_mib() -> float:
    """The most memory this rank has held: allocated on CUDA, else resident in the process."""
    # On CPU, Megatron's context lends torch.cuda the process's own figure.
    return torch.cuda.max_memory_allocated() / _MIB


def print_report(values: dict[str, Any]) -> None:
    """The table, one row per operation and phase that occurred."""
    table = Table(
        title="collectives of this rank (layers: per layer and micro-batch; borders: all)"
    )
    for column in ("where", "phase", "operation", "calls", "MiB", "seconds, whole run"):
        table.add_column(column, justify="left" if column in ("where", "operation") else "right")
    for phase in get_args(Phase):
        for operation in get_args(Operation):
            key = f"{phase}_{operation}"
            rows = (
                ("layer", f"{key}_calls_per_layer", f"{key}_mib_per_layer", f"{key}_seconds"),
                (
                    "border",
                    f"border_{key}_calls",
                    f"border_{key}_mib",
                    f"border_{key}_seconds",
                ),
            )
            for where, calls, mib, seconds in rows:
                if values[calls]:
                    table.add_row(
                        where,
                        phase,
                        operation.replace("_", "-"),
                        f"{values[calls]:g}",
                        f"{values[mib]:.3f}",
                        f"{values[seconds]:.3f}",
                    )
    if values["layer_passes"] == 0:
        table.caption = "no layer of BOOST ran: collectives of Megatron's own are not counted"
    Console(width=100).print(table)
