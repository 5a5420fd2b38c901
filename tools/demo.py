"""Train a CoLA model with BTP on two CPU ranks, beside its two baselines, and write a report.

`make demo` calls this. Everything goes to runs/demo: report.html, loss.png, a log per run.
"""

import signal
import sys
from collections.abc import Sequence
from pathlib import Path

# Run from a checkout, the package may not be installed.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from rich.console import Console

from megatron.boost.command_line import ToolParser, run_tool, whole_number, write_json
from megatron.boost.demo.recipe import Recipe
from megatron.boost.demo.run import run_demo

REPOSITORY = Path(__file__).resolve().parent.parent


def main(argv: Sequence[str] | None) -> None:
    """Run the demo with `argv`, or the command line when it is None."""
    parser = ToolParser("Train a CoLA model with BTP and its two baselines on CPU, and compare.")
    parser.add_argument(
        "--steps", type=whole_number(20), default=Recipe.steps, help="of each run (%(default)s)"
    )
    parser.add_argument(
        "--out", type=Path, default=Path("runs/demo"), metavar="DIR", help="(%(default)s)"
    )
    args = parser.parse_args(argv)
    # Closing the terminal, or `kill`, must end the ranks as Ctrl-C does.
    for ending in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(ending, signal.default_int_handler)
    console = Console(highlight=False)
    result = run_demo(REPOSITORY, args.out, Recipe(steps=args.steps), console)
    if args.json is not None:
        write_json(args.json, result)
    console.print(
        "Next: train on your own text. Turn it into tokens with tools/preprocess_data.py, then "
        "take a command from the report and change its paths and sizes.",
        soft_wrap=True,
    )


if __name__ == "__main__":
    run_tool(main)
