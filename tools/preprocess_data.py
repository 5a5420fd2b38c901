r"""Tokenise text for training: .txt and .jsonl files, also compressed (.gz, .zst), or folders of
them, to Megatron's .bin/.idx.

    python tools/preprocess_data.py --input corpus/ --output-prefix data/corpus \
        --tokenizer-model tokenizer/ --append-eod --workers 8

writes data/corpus_text_document.bin and .idx, for `--data-path data/corpus_text_document`. A run
that is killed leaves data/corpus.partial/, and the same command goes on from there.
"""

import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

# Run from a checkout, the package may not be installed.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from megatron.boost.command_line import ToolParser, run_tool, whole_number, write_json
from megatron.boost.preprocessing.encoding import EncodingSettings
from megatron.boost.preprocessing.pipeline import Progress, Summary, preprocess
from megatron.boost.preprocessing.records import MAX_LINE_BYTES, BadRecord


def main(argv: Sequence[str] | None) -> None:
    """Run the tool with `argv`, or the command line when it is None."""
    args = _parser().parse_args(argv)
    if args.output_prefix.endswith("/"):
        raise ValueError(
            f"--output-prefix {args.output_prefix}: is a folder, and a file name in it is needed; "
            f"nearest legal value: {args.output_prefix}data"
        )
    try:
        with _progress_bar() as show:
            summary = preprocess(
                args.input,
                args.output_prefix,
                EncodingSettings(args.tokenizer_model, tuple(args.json_keys), args.append_eod),
                workers=args.workers,
                on_error=args.on_error,
                max_line_bytes=args.max_line_mib << 20,
                start_over=args.start_over,
                on_progress=show,
                note=lambda text: print(f"note: {text}", file=sys.stderr),
            )
    except BadRecord as error:
        if args.json is not None:
            write_json(args.json, _failed(error))
        raise
    _print_summary(summary)
    if args.json is not None:
        write_json(args.json, summary.as_flat_dict() | {"finished": True})


def _print_summary(summary: Summary) -> None:
    for key, prefix in summary.prefixes.items():
        print(
            f"{prefix}: {summary.documents:,} documents, {summary.tokens[key]:,} tokens in "
            f"{summary.seconds:.1f} s ({summary.documents_per_second:,.0f} documents/s, "
            f"{summary.megabytes_per_second:.2f} MB/s)"
        )
    if summary.bad_documents:
        shown = len(summary.first_bad)
        more = f"; the first {shown}" if shown < summary.bad_documents else ""
        total = summary.documents + summary.bad_documents
        print(f"left out: {summary.bad_documents:,} bad documents of {total:,}{more}:")
        for bad in summary.first_bad:
            print(f"  {bad}")


def _failed(error: BadRecord) -> dict[str, object]:
    return {
        "finished": False,
        "documents": error.good_documents,
        "bad_documents": 1,
        "first_bad_documents": [str(error.document)],
    }


def _parser() -> ToolParser:
    parser = ToolParser("Tokenise text into Megatron's indexed data format.")
    parser.add_argument(
        "--input",
        type=Path,
        nargs="+",
        required=True,
        metavar="PATH",
        help=".txt files (one document each), .jsonl files (one document a line), either also with "
        ".gz or .zst after it, or folders",
    )
    parser.add_argument(
        "--output-prefix", required=True, help="PREFIX_KEY_document.bin and .idx are written"
    )
    parser.add_argument(
        "--tokenizer-type", default="HuggingFaceTokenizer", choices=["HuggingFaceTokenizer"]
    )
    parser.add_argument(
        "--tokenizer-model", required=True, help="folder of the tokenizer, or its tokenizer.json"
    )
    parser.add_argument(
        "--json-keys",
        nargs="+",
        default=["text"],
        metavar="KEY",
        help="the keys of a line that hold text, one data set for each (text)",
    )
    parser.add_argument(
        "--append-eod", action="store_true", help="end every document with the EOS token"
    )
    parser.add_argument(
        "--workers", type=whole_number(1), default=1, help="processes that encode (%(default)s)"
    )
    parser.add_argument(
        "--on-error",
        choices=["fail", "skip"],
        default="fail",
        help="what a document that can't be used does: end the run, or be left out (%(default)s)",
    )
    parser.add_argument(
        "--max-line-mib",
        type=whole_number(1),
        default=MAX_LINE_BYTES >> 20,
        metavar="MIB",
        help="a longer line of a .jsonl file is a bad one (%(default)s)",
    )
    parser.add_argument(
        "--start-over",
        action="store_true",
        help="begin anew instead of going on with an unfinished run",
    )
    return parser


@contextmanager
def _progress_bar() -> Iterator[Callable[[Progress], None] | None]:
    """Yield what shows progress on standard error, or None where that is no terminal."""
    if not sys.stderr.isatty():
        yield None
        return
    from rich import progress
    from rich.console import Console

    with progress.Progress(
        progress.TextColumn("{task.fields[documents]:,} documents"),
        progress.BarColumn(),
        progress.DownloadColumn(),
        progress.TextColumn("{task.fields[rates]}"),
        progress.TimeRemainingColumn(),
        console=Console(stderr=True),
    ) as bar:
        task = bar.add_task("", total=None, documents=0, rates="")
        yield lambda state: bar.update(
            task,
            total=state.total_disk_bytes,
            completed=state.disk_bytes,
            documents=state.documents,
            rates=f"{state.documents_per_second:,.0f} documents/s "
            f"{state.text_bytes_per_second / 1e6:.2f} MB/s",
        )


if __name__ == "__main__":
    # `kill`, or closing the terminal, ends the run as Ctrl-C does: with all that it had done saved.
    for ending in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(ending, signal.default_int_handler)
    run_tool(main)
