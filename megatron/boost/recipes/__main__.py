"""Check the recipes of `examples/` against the accounting."""

from __future__ import annotations

import multiprocessing
import os
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict

from rich import box
from rich.console import Console
from rich.table import Table

from megatron.boost.command_line import FAILED, ToolParser, print_error, run_tool, write_json
from megatron.boost.recipes.check import check_recipe
from megatron.boost.recipes.commands import all_recipes

# GiB and s, of an iteration, are the planner's; calls are a layer's collectives, both ways.
_COLUMNS = ("recipe", "GPUs", "TP·PP·DP", "micro", "parameters", "GiB", "s", "calls", "")
_MOST_PROCESSES = 8


def main(argv: Sequence[str] | None) -> None:
    """Check all recipes, or those whose name contains `--only`, on this machine's cores."""
    parser = ToolParser(__doc__ or "")
    parser.add_argument("--only", default="", metavar="WORDS", help="e.g. '7B btp'")
    arguments = parser.parse_args(argv)
    recipes = [recipe for recipe in all_recipes() if arguments.only in recipe.name]
    if not recipes:
        known = ", ".join(recipe.name for recipe in all_recipes())
        raise ValueError(f"--only {arguments.only}: no recipe has that in its name; known: {known}")
    table = Table(*_COLUMNS, box=box.SIMPLE, padding=(0, 0, 0, 1))
    started, results, faults = time.monotonic(), {}, []
    processes = min(len(recipes), os.cpu_count() or 1, _MOST_PROCESSES)
    # A process that torch has not been used in: after a fork its threads would be missing.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(processes, context) as pool:
        for recipe, checked in zip(recipes, pool.map(check_recipe, recipes), strict=True):
            results[recipe.name.replace(" ", "_")] = asdict(checked)
            faults += [f"{recipe.name}: {fault}" for fault in checked.faults]
            table.add_row(
                recipe.name,
                str(checked.ranks),
                f"{checked.tensor_parallel}·{checked.pipeline_parallel}·{checked.data_parallel}",
                str(checked.micro_batch_size),
                f"{checked.parameters / 1e9:.3f} B",
                f"{checked.gib:.1f}",
                f"{checked.seconds:.1f}",
                f"{checked.forward_collectives} + {checked.backward_collectives}",
                "differs" if checked.faults else "as accounted",
            )
    Console(width=110).print(table)
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


if __name__ == "__main__":
    run_tool(main)
