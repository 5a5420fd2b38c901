"""A recipe against the accounting: its first, middle and last pipeline stage."""

from __future__ import annotations

from dataclasses import dataclass, replace

from megatron.boost.accounting.collectives import layer_collectives
from megatron.boost.accounting.memory_report import memory_footprint
from megatron.boost.accounting.parameters import model_parameters
from megatron.boost.accounting.sizes import Layout, validate_layout
from megatron.boost.recipes.commands import Command
from megatron.boost.recipes.facts import accounted_facts, differences
from megatron.boost.recipes.meta_rank import (
    Run,
    built_facts,
    configured,
    fake_world,
    rank_at,
)

GPU_GIB = 80e9 / 2**30
"""Of the GPUs that the layouts are for."""
FREE_SHARE = 0.1
"""Of a GPU's memory, for what the accounting leaves out: the CUDA context, NCCL's buffers, GEMMs'
workspaces, the borders of a backward, fragmentation."""


@dataclass(frozen=True)
class Checked:
    """What became of one recipe."""

    ranks: int
    """Of the whole run."""
    tensor_parallel: int
    pipeline_parallel: int
    data_parallel: int
    micro_batch_size: int
    parameters: int
    """Of the model."""
    gib: float
    """Of the rank that needs most."""
    all_reduces: tuple[int, int]
    """Per layer, forward and backward."""
    built: int
    """Ranks that were built."""
    faults: tuple[str, ...]


def places(layout: Layout) -> list[tuple[int, int]]:
    """(TP rank, PP rank) of the first, the middle and the last stage, as far as they are several,
    each at another place of its tensor-parallel group."""
    tp, pp = layout.tensor_parallel, layout.pipeline_parallel
    stages = sorted({0, pp // 2, pp - 1})
    return list(zip((0, tp // 2, tp - 1), stages, strict=False))


def check(command: Command) -> Checked:
    """Validate a recipe's command line as its run would, build its ranks and compare; inside
    `megatron_on_cpu()`.

    Raises:
        ValueError: for a command line that the run would refuse.
    """
    with configured(command, rank=0) as run:
        validate_layout(run.model, run.layout)
        layout, faults = run.layout, _faults_of_memory(run)
        summary = _summary(run, len(places(layout)))
    for tp_rank, pp_rank in places(layout):
        faults += [
            f"stage {pp_rank}, TP rank {tp_rank}: {line}"
            for line in rank_differences(command, rank_at(layout, tp_rank, pp_rank))
        ]
    return replace(summary, faults=tuple(faults))


def rank_differences(command: Command, rank: int) -> list[str]:
    """What of one rank is not as accounted."""
    with configured(command, rank) as run, fake_world(run):
        return differences(built_facts(run), accounted_facts(run.model, run.layout, run.pp_rank))


def _summary(run: Run, built: int) -> Checked:
    layer = layer_collectives(run.model, run.layout, run.model.num_layers - 1)
    forward, backward = (
        layer[phase, "all_reduce"].calls if (phase, "all_reduce") in layer else 0
        for phase in ("forward", "backward")
    )
    return Checked(
        ranks=run.world_size,
        tensor_parallel=run.layout.tensor_parallel,
        pipeline_parallel=run.layout.pipeline_parallel,
        data_parallel=run.layout.data_parallel,
        micro_batch_size=run.layout.micro_batch_size,
        parameters=model_parameters(run.model),
        gib=memory_footprint(run.model, run.layout).total_mib / 1024,
        all_reduces=(forward, backward),
        built=built,
        faults=(),
    )


def _faults_of_memory(run: Run) -> list[str]:
    footprint = memory_footprint(run.model, run.layout)
    gib, most = footprint.total_mib / 1024, (1 - FREE_SHARE) * GPU_GIB
    if gib <= most:
        return []
    return [f"stage {footprint.pp_rank}: needs {gib:.1f} GiB, and {most:.1f} are there"]
