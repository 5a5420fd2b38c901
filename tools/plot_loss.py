"""Loss curves of training runs in one picture: from Megatron's logs, ours or anybody's, or from
TensorBoard's event files.
"""

from __future__ import annotations

import sys
from argparse import ArgumentTypeError, Namespace
from collections.abc import Sequence
from pathlib import Path

# Run from a checkout, the package may not be installed.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from megatron.boost.command_line import (
    ToolParser,
    output_file,
    run_tool,
    whole_number,
    write_json,
    write_text,
)

_UNASKED = Path("loss.png")


def main(argv: Sequence[str] | None) -> None:
    """Run the tool with `argv`, or the command line when it is None.

    Raises:
        ValueError: for what cannot be read or drawn.
    """
    args = _parser().parse_args(argv)
    # After the flags are known to be right: matplotlib takes a second.
    from rich.console import Console

    from megatron.boost.plotting.figure import save_png
    from megatron.boost.plotting.loss_plot import LossPlot
    from megatron.boost.plotting.sources import named_path, read_runs

    inputs = {named_path(run)[1].resolve() for run in args.runs}
    for flag in ("output", "html", "json"):
        path = getattr(args, flag)
        if path is not None and path.resolve() in inputs:
            raise ValueError(
                f"--{flag} {path}: is one of the runs that are read; nearest legal value: "
                f"{path.with_name(f'{path.name}.{flag}')}"
            )
    plot = LossPlot(
        runs=read_runs(args.runs),
        unit=args.x,
        window=args.smooth,
        sequence_length=args.seq_length,
    )
    figure = plot.figure()
    picture = _picture(args)
    if picture is not None:
        save_png(figure, picture)
    if args.html is not None:
        write_text(args.html, plot.html())
    if args.json is not None:
        write_json(args.json, plot.flat())
    console = Console(highlight=False)
    console.print(plot.terminal_table())
    for note in plot.notes():
        console.print(f"note: {note}", soft_wrap=True, markup=False)
    for path in (picture, args.html):
        if path is not None:
            console.print(f"written: {path}", soft_wrap=True, markup=False)


def _picture(args: Namespace) -> Path | None:
    """Where the picture goes, if one is wanted: where nothing is asked for, one is."""
    if args.output is None and args.html is None and args.json is None:
        return _UNASKED
    picture: Path | None = args.output
    return picture


def _png(text: str) -> Path:
    """An argparse type: where a PNG can be written."""
    path = output_file(text)
    if path.suffix.lower() != ".png":
        raise ArgumentTypeError(
            f"{text}: a PNG is written; nearest legal value: {path.with_suffix('.png')}"
        )
    return path


def _parser() -> ToolParser:
    parser = ToolParser("Draw the loss curves of training runs in one picture.")
    parser.add_argument(
        "runs",
        nargs="+",
        metavar="[NAME=]LOG|TENSORBOARD",
        help="what a Megatron training printed, a TensorBoard event file, or a folder of them "
        "(each folder below is a run)",
    )
    parser.add_argument(
        "--output",
        type=_png,
        metavar="FILE.png",
        help=f"a picture ({_UNASKED}, unless --html or --json is given)",
    )
    parser.add_argument(
        "--html", type=output_file, metavar="FILE.html", help="a page that needs no other file"
    )
    parser.add_argument(
        "--x", choices=("steps", "tokens", "time"), default="steps", help="(%(default)s)"
    )
    parser.add_argument(
        "--smooth",
        type=whole_number(1),
        default=1,
        metavar="N",
        help="draw the mean of N logged losses in a row, and each of them faint (%(default)s)",
    )
    parser.add_argument(
        "--seq-length",
        type=whole_number(1),
        metavar="N",
        help="tokens of a sample, for --x tokens (what the log or TensorBoard says)",
    )
    return parser


if __name__ == "__main__":
    run_tool(main)
