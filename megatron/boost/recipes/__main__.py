"""Check the recipes of `examples/` against the accounting."""

from __future__ import annotations

import multiprocessing
import os
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict

from megatron.boost.command_line import FAILED, ToolParser, print_error, run_tool, write_json
from megatron.boost.recipes.check import Checked, check_recipe
from megatron.boost.recipes.commands import all_recipes

_HEADING = "GPUs  TP·PP·DP  micro-batch  parameters   GiB  s/iteration  collectives  recipe"
_MOST_PROCESSES = 8


def main(argv: Sequence[str] | None) -> None:
    """Check all recipes, or those whose name contains `--only`, on this machine's cores. GiB and
    seconds are the planner's, collectives a layer's, forward and backward."""
    parser = ToolParser(__doc__ or "")
    parser.add_argument("--only", default="", metavar="WORDS", help="e.g. '7B btp'")
    arguments = parser.parse_args(argv)
    recipes = [recipe for recipe in all_recipes() if arguments.only in recipe.name]
    if not recipes:
        known = ", ".join(recipe.name for recipe in all_recipes())
        raise ValueError(f"--only {arguments.only}: no recipe has that in its name; known: {known}")
    print(_HEADING)
    started, results, faults = time.monotonic(), {}, []
    processes = min(len(recipes), os.cpu_count() or 1, _MOST_PROCESSES)
    # A process that torch has not been used in: after a fork its threads would be missing.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(processes, context) as pool:
        for recipe, checked in zip(recipes, pool.map(check_recipe, recipes), strict=True):
            results[recipe.name.replace(" ", "_")] = asdict(checked)
            faults += [f"{recipe.name}: {fault}" for fault in checked.faults]
            print(f"{_line(checked)}  {recipe.name}", flush=True)
    built = sum(result["built"] for result in results.values())
    print(
        f"{len(recipes)} recipes, {built} ranks built, {len(faults)} differences, "
        f"{time.monotonic() - started:.0f} s"
    )
    if arguments.json:
        write_json(
            arguments.json,
            {
                "recipes": len(recipes),
                "ranks_built": built,
                "differences": len(faults),
                **{
                    f"{name}_{key}": value
                    for name, result in results.items()
                    for key, value in result.items()
                    if isinstance(value, int | float)
                },
            },
        )
    if faults:
        for fault in faults:
            print_error(fault)
        sys.exit(FAILED)


def _line(checked: Checked) -> str:
    """Under the heading."""
    layout = (checked.tensor_parallel, checked.pipeline_parallel, checked.data_parallel)
    calls = f"{checked.forward_collectives} + {checked.backward_collectives}"
    return (
        f"{checked.ranks:4}  {'·'.join(map(str, layout)):>8}  {checked.micro_batch_size:11}  "
        f"{checked.parameters / 1e9:8.3f} B  {checked.gib:4.1f}  {checked.seconds:11.2f}  "
        f"{calls:>11}"
    )


if __name__ == "__main__":
    run_tool(main)
