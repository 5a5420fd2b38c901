r"""Tokenise text for training: .txt and .jsonl files, or folders of them, to Megatron's .bin/.idx.

    python tools/preprocess_data.py --input corpus/ --output-prefix data/corpus \
        --tokenizer-model tokenizer/ --append-eod --workers 8

writes data/corpus_text_document.bin and .idx, for `--data-path data/corpus_text_document`.
"""

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

# Run from a checkout, the package may not be installed.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from megatron.boost.command_line import ToolParser, run_tool, whole_number, write_json
from megatron.boost.preprocessing.encoding import EncodingSettings
from megatron.boost.preprocessing.pipeline import Progress, preprocess


def main(argv: Sequence[str] | None) -> None:
    """Run the tool with `argv`, or the command line when it is None."""
    args = _parser().parse_args(argv)
    if args.output_prefix.endswith("/"):
        raise ValueError(
            f"--output-prefix {args.output_prefix}: is a folder, and a file name in it is needed; "
            f"nearest legal value: {args.output_prefix}data"
        )
    with _progress_bar() as show:
        summary = preprocess(
            args.input,
            args.output_prefix,
            EncodingSettings(args.tokenizer_model, tuple(args.json_keys), args.append_eod),
            workers=args.workers,
            on_progress=show,
        )
    for key, prefix in summary.prefixes.items():
        print(
            f"{prefix}: {summary.documents:,} documents, {summary.tokens[key]:,} tokens in "
            f"{summary.seconds:.1f} s ({summary.documents / summary.seconds:,.0f} documents/s, "
            f"{summary.input_bytes / 1e6 / summary.seconds:.2f} MB/s)"
        )
    if args.json is not None:
        write_json(args.json, summary.as_flat_dict())


def _parser() -> ToolParser:
    parser = ToolParser("Tokenise text into Megatron's indexed data format.")
    parser.add_argument(
        "--input",
        type=Path,
        nargs="+",
        required=True,
        metavar="PATH",
        help=".txt files (one document each), .jsonl files (one document a line), or folders",
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
        progress.TransferSpeedColumn(),
        progress.TimeRemainingColumn(),
        console=Console(stderr=True),
    ) as bar:
        task = bar.add_task("", total=None, documents=0)
        yield lambda state: bar.update(
            task,
            total=state.total_bytes,
            completed=state.input_bytes,
            documents=state.documents,
        )


if __name__ == "__main__":
    run_tool(main)
