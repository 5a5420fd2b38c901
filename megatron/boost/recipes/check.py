"""A recipe against the accounting: its first, middle and last pipeline stage."""

from __future__ import annotations

import os
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path

from megatron.boost.accounting.collectives import layer_collectives
from megatron.boost.accounting.parameters import model_parameters
from megatron.boost.accounting.sizes import Layout, validate_layout
from megatron.boost.cpu import megatron_on_cpu
from megatron.boost.planner.cluster import load_cluster
from megatron.boost.planner.iteration import estimate
from megatron.boost.planner.memory import GIB, memory_need
from megatron.boost.quiet import quiet_output
from megatron.boost.recipes.commands import Command, Recipe, command_of
from megatron.boost.recipes.facts import accounted_facts, differences
from megatron.boost.recipes.layouts import CLUSTER
from megatron.boost.recipes.meta_rank import (
    Run,
    built_facts,
    configured,
    fake_world,
    rank_at,
)


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
    """Of the GPU that needs most, by the planner."""
    seconds: float
    """Of an iteration, by the planner."""
    forward_collectives: int
    """Calls per layer and micro-batch."""
    backward_collectives: int
    built: int
    """Ranks that were built."""
    faults: tuple[str, ...]


def places(layout: Layout) -> list[tuple[int, int]]:
    """(TP rank, PP rank) of the first, the middle and the last stage, as far as they are several,
    each at another place of its tensor-parallel group."""
    tp, pp = layout.tensor_parallel, layout.pipeline_parallel
    stages = sorted({0, pp // 2, pp - 1})
    return list(zip((0, tp // 2, tp - 1), stages, strict=False))


def check_recipe(recipe: Recipe) -> Checked:
    """`check` of a recipe, in a process that has not imported Megatron yet, or has done so here.

    Raises:
        ValueError: for a recipe that the script or the run would refuse, by its name.
    """
    try:
        with quiet_output(Path(os.devnull)), megatron_on_cpu():
            return check(command_of(recipe))
    except ValueError as refusal:
        raise ValueError(f"{recipe.name}: {refusal}") from refusal


def check(command: Command) -> Checked:
    """Validate a recipe's command line as its run would, build its ranks and compare; inside
    `megatron_on_cpu()`.

    Raises:
        ValueError: for a command line that the run would refuse.
    """
    with configured(command, rank=0) as run:
        validate_layout(run.model, run.layout)
        others = [rank_at(run.layout, *place) for place in places(run.layout)[1:]]
        summary = _summary(run, built=1 + len(others))
        faults = _faults_of_memory(run) + rank_faults(run)
    for rank in others:
        with configured(command, rank) as run:
            faults += rank_faults(run)
    return replace(summary, faults=tuple(faults))


def rank_faults(run: Run) -> list[str]:
    """A line for each fact of this rank, built, that is not as accounted."""
    with fake_world(run):
        found = differences(built_facts(run), accounted_facts(run.model, run.layout, run.pp_rank))
    return [f"rank {run.rank}, of stage {run.pp_rank}: {line}" for line in found]


def _summary(run: Run, built: int) -> Checked:
    cluster = load_cluster(CLUSTER)
    layer = layer_collectives(run.model, run.layout, run.model.num_layers - 1)
    calls = Counter[str]()
    for (phase, _), traffic in layer.items():
        calls[phase] += traffic.calls
    return Checked(
        ranks=run.world_size,
        tensor_parallel=run.layout.tensor_parallel,
        pipeline_parallel=run.layout.pipeline_parallel,
        data_parallel=run.layout.data_parallel,
        micro_batch_size=run.layout.micro_batch_size,
        parameters=model_parameters(run.model),
        gib=memory_need(run.model, run.layout, cluster).total / GIB,
        seconds=estimate(run.model, run.layout, cluster).seconds,
        forward_collectives=calls["forward"],
        backward_collectives=calls["backward"],
        built=built,
        faults=(),
    )


def _faults_of_memory(run: Run) -> list[str]:
    cluster = load_cluster(CLUSTER)
    need = memory_need(run.model, run.layout, cluster)
    gib, most = need.total / GIB, cluster.memory.capacity_gib
    if gib <= most:
        return []
    return [f"stage {need.pp_rank}: needs {gib:.1f} GiB, and {cluster.name} has {most:g}"]
