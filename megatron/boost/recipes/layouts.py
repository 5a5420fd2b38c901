"""Write the layouts of the recipes anew, as the planner finds them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from boost_layers.config import LowRankConfig
from megatron.boost.command_line import ToolParser, run_tool, write_text
from megatron.boost.planner.cluster import Cluster, load_cluster
from megatron.boost.planner.layouts import Plan, Strategy, Workload, find_plans
from megatron.boost.planner.models import SIZES, load_model
from megatron.boost.recipes.table import TABLE, table_rows

CLUSTER = "h100"
_WIDTHS = (6, 9, 5, 10, 5, 3, 3, 8, 12, 4, 10)


def planned_for(cluster: Cluster, training: str, size: str, strategy: str, gpus: int) -> Plan:
    """The fastest layout of a recipe: for LaX, which needs most memory, but for CoLA's training.

    Raises:
        ValueError: where none fits.
    """
    plans = plans_of(cluster, training, size, strategy, gpus)
    if not plans:
        raise ValueError(f"{training} {size} {strategy}: no layout of {gpus} GPUs fits")
    return plans[0]


def plans_of(
    cluster: Cluster, training: str, size: str, strategy: str, gpus: int
) -> Sequence[Plan]:
    """All layouts of a recipe that fit, the fastest first."""
    (numbers,) = (row for row in table_rows("training") if row[0] == training)
    arch: str = "cola" if training == "cola" else "lax"
    workload = Workload(
        model=load_model(size, LowRankConfig(arch=arch, rank=SIZES[size].rank)),
        sequence_length=int(numbers[1]),
        global_batch=int(numbers[2]),
    )
    kind: dict[str, Strategy] = {"full-rank": "full-rank", "vanilla": "vanilla"}
    accepts: dict[str, Callable[[int], bool]] = {
        "full-rank": lambda tp: True,
        "no-tp": lambda tp: tp == 1,
    }
    accepted = accepts.get(strategy, lambda tp: tp > 1)
    plans, _ = find_plans(workload, cluster, gpus, (kind.get(strategy, "btp"),))
    return [plan for plan in plans if accepted(plan.layout.tensor_parallel)]


def layout_lines(cluster: Cluster) -> Iterator[str]:
    """The table's rows of layouts, each for as many GPUs as it is for now."""
    for training, size, strategy, gpus, *_ in table_rows("layout"):
        plan = planned_for(cluster, training, size, strategy, int(gpus))
        layout = plan.layout
        cells = (
            *("layout", training, size, strategy, gpus),
            *(layout.tensor_parallel, layout.pipeline_parallel, layout.virtual_stages),
            *(layout.micro_batch_size, "yes" if layout.sequence_parallel else "no"),
            plan.recompute,
        )
        aligned = zip(cells, _WIDTHS, strict=True)
        yield " ".join(str(cell).rjust(width) for cell, width in aligned).strip()


def main(argv: Sequence[str] | None) -> None:
    """Replace the rows of layouts, and keep all else in the table."""
    parser = ToolParser(__doc__ or "")
    parser.add_argument(
        "--gpu", default=CLUSTER, metavar="NAME|FILE", help="the planner's cluster (%(default)s)"
    )
    arguments = parser.parse_args(argv)
    kept = [
        line
        for line in TABLE.read_text(encoding="utf-8").splitlines()
        if not line.startswith("layout ")
    ]
    lines = list(layout_lines(load_cluster(arguments.gpu)))
    write_text(TABLE, "\n".join([*kept, *lines]) + "\n")
    print(f"{TABLE}: {len(lines)} layouts")


if __name__ == "__main__":
    run_tool(main)
