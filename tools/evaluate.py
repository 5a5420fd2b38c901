r"""Measure a model on text: validation loss, perplexity and bits per byte.

    python tools/evaluate.py --load checkpoints --data my-data_text_document
    torchrun --nproc-per-node 4 tools/evaluate.py --load checkpoints --text book.txt \
        --tensor-model-parallel-size 2 --pipeline-model-parallel-size 2
    python tools/evaluate.py --hf llama/ --text book.txt --seq-length 1024 --stride 512

The mean is over tokens: each counts once, whatever the windows, the ranks and the padding.
"""

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

# Run from a checkout, the package may not be installed.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from megatron.boost.command_line import ToolParser, run_tool, whole_number, write_json
from megatron.boost.evaluation.evaluate import LONGEST_WINDOW_UNASKED, Request, evaluate
from megatron.boost.evaluation.model_flags import add_model_flags
from megatron.boost.evaluation.ranks import notices_kept_away, one_refusal, rank


def main(argv: Sequence[str] | None) -> None:
    """Run the tool with `argv`, or the command line when it is None."""
    with one_refusal():
        args = _parser().parse_args(argv)
        request = Request(
            load=args.load,
            step=args.ckpt_step,
            hf=args.hf,
            data=args.data,
            split=args.split,
            text=tuple(args.text or ()),
            tokenizer_model=args.tokenizer_model,
            window=args.seq_length,
            stride=args.stride,
            documents=args.documents,
            tensor_parallel=args.tensor_model_parallel_size,
            pipeline_parallel=args.pipeline_model_parallel_size,
            rows=args.micro_batch_size,
            device=args.device,
            dtype=args.dtype,
            trust_remote_code=args.trust_remote_code,
        )
        with _progress_bar() as show, notices_kept_away(args.verbose):
            result = evaluate(request, show)
    if rank() == 0:
        print("\n".join(result.as_lines()))
        if args.json is not None:
            write_json(args.json, result.as_flat_dict())


def _parser() -> ToolParser:
    parser = ToolParser(
        "Measure a model on text: validation loss, perplexity and bits per byte; alone, or under "
        "torchrun."
    )
    add_model_flags(parser)
    data = parser.add_mutually_exclusive_group(required=True)
    data.add_argument("--data", metavar="PREFIX", help="a data set: PREFIX.bin and PREFIX.idx")
    data.add_argument(
        "--text", type=Path, nargs="+", metavar="FILE", help="UTF-8 text files, one document each"
    )
    parser.add_argument(
        "--split",
        metavar="A,B,C",
        help="measure the validation part of the data set, as training with this --split takes it "
        "(all of it)",
    )
    parser.add_argument(
        "--seq-length",
        type=whole_number(1),
        metavar="N",
        help="tokens in a window (what the checkpoint was trained with; of a Hugging Face folder "
        f"its positions, at most {LONGEST_WINDOW_UNASKED})",
    )
    parser.add_argument(
        "--stride",
        type=whole_number(1),
        metavar="N",
        help="tokens that the next window moves on and scores; the others in it are context "
        "(that of the window)",
    )
    parser.add_argument(
        "--documents",
        choices=["joined", "separate"],
        help="joined: one after the other, each read after the one before it, as in training; "
        "separate: each by itself (joined for --data, separate for --text)",
    )
    parser.add_argument(
        "--tensor-model-parallel-size", type=whole_number(1), default=1, metavar="N", help="(1)"
    )
    parser.add_argument(
        "--pipeline-model-parallel-size", type=whole_number(1), default=1, metavar="N", help="(1)"
    )
    parser.add_argument(
        "--micro-batch-size",
        type=whole_number(1),
        default=Request.rows,
        metavar="N",
        help="windows that are scored together (%(default)s)",
    )
    return parser


@contextmanager
def _progress_bar() -> Iterator[Callable[[int, int], None]]:
    """Yield what shows progress on standard error, where that is the first rank's terminal."""
    if rank() != 0 or not sys.stderr.isatty():
        yield lambda read, total: None
        return
    from rich import progress
    from rich.console import Console

    with progress.Progress(
        progress.TextColumn("windows"),
        progress.BarColumn(),
        progress.MofNCompleteColumn(),
        progress.TimeRemainingColumn(),
        console=Console(stderr=True),
    ) as bar:
        task = bar.add_task("", total=None)
        yield lambda read, total: bar.update(task, total=total, completed=read)


if __name__ == "__main__":
    run_tool(main)
