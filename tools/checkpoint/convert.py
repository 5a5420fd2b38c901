"""Convert between Hugging Face folders and Megatron checkpoints.

    python tools/checkpoint/convert.py import --hf llama/ --save checkpoint/
    python tools/checkpoint/convert.py export --load checkpoint/ --hf exported/

The first takes a LLaMA, CoLA or CoLA-M; the second any checkpoint of ours or of Megatron-LM's own
dense LLaMA, at any TP and PP. docs/checkpoints.md has recipes.
"""

import signal
import sys
import time
from argparse import Namespace
from collections.abc import Iterable, Sequence
from pathlib import Path

# Run from a checkout, the package may not be installed.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))

from megatron.boost.command_line import ToolParser, run_tool, whole_number, write_json
from megatron.boost.conversion.byte_size import byte_size
from megatron.boost.conversion.factorisation_settings import (
    add_factorisation_flags,
    factorisation_settings,
    is_factorisation,
)


def main(argv: Sequence[str] | None) -> None:
    """Run the tool with `argv`, or the command line when it is None."""
    argv = sys.argv[1:] if argv is None else argv
    commands = {"import": _import, "export": _export}
    if not argv or argv[0] not in commands:
        parser = ToolParser(
            "Convert between Hugging Face folders and Megatron checkpoints; `import --help` and "
            "`export --help` say how."
        )
        parser.add_argument("command", choices=tuple(commands))
        parser.parse_args(list(argv[:1]))
        return
    # A signal that ends the tool must let it remove what it has begun.
    for ending in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(ending, signal.default_int_handler)
    commands[argv[0]](argv[1:])


def _import(argv: Sequence[str]) -> None:
    parser = ToolParser("A Hugging Face LLaMA, CoLA or CoLA-M as a Megatron checkpoint.")
    parser.prog += " import"
    parser.add_argument("--hf", type=Path, required=True, metavar="DIR", help="the source")
    parser.add_argument("--save", type=Path, required=True, metavar="DIR", help="the checkpoint")
    parser.add_argument(
        "--low-rank-arch",
        choices=("none", "dense", "svd", "cola", "lax"),
        help="what a dense model becomes: none, Megatron's own layers (the default where they "
        "compute it); dense, ours; svd, cola or lax, low-rank layers by truncated SVD",
    )
    add_factorisation_flags(parser)
    parser.add_argument(
        "--trust-pickle",
        action="store_true",
        help="also read .bin files, which can run code when they are unpickled",
    )
    _add_common(parser)
    args = parser.parse_args(argv)

    from megatron.boost.conversion.checking import check_import
    from megatron.boost.conversion.importing import exact_plan, open_source, write_import
    from megatron.boost.conversion.low_rank_import import check_factors, low_rank_plan
    from megatron.boost.conversion.mapping_table import import_rows, lines
    from megatron.boost.conversion.output_folder import refuse_occupied
    from megatron.boost.conversion.progress import on_terminal

    refuse_occupied(args.save, "--save")
    source = open_source(args.hf, args.trust_pickle)
    report = None
    if is_factorisation(args, source.description):
        plan, report = low_rank_plan(source, factorisation_settings(args))
    else:
        plan = exact_plan(source, args.low_rank_arch, args.low_rank_act_anneal)
    result: dict[str, object] = {
        "parameters_source": source.description.parameter_count(),
        "parameters": plan.description.parameter_count(),
        "tensors": len(plan.entries),
        "low_rank_arch": "none" if plan.megatrons_own else plan.description.low_rank.arch,
    }
    for note in report.notes if report else ():
        print(note)
    if args.dry_run:
        _print_table(lines(import_rows(plan)), args, result)
        return
    checked: list[float] = []

    def check(folder: Path) -> None:
        if report is not None:
            check_factors(plan, report, folder)
        checked.append(check_import(plan, folder).difference)

    started = time.monotonic()
    size = write_import(plan, args.save, check=check if args.check else None, progress=on_terminal)
    if source.family == "llama" and not plan.megatrons_own and args.low_rank_arch is None:
        print(
            "layers: ours (--low-rank-arch dense), Megatron's own do not compute this rope_scaling"
        )
    if report is not None:
        from rich.console import Console

        Console().print(report.table())
        result |= report.values()
    _finish(args, result, args.save, size, started, checked, exact=report is None)
    print(
        f"train on: --load {args.save} --use-checkpoint-args, with the data's and the run's flags"
    )


def _export(argv: Sequence[str]) -> None:
    parser = ToolParser("A Megatron checkpoint as a Hugging Face folder.")
    parser.prog += " export"
    parser.add_argument("--load", type=Path, required=True, metavar="DIR", help="the checkpoint")
    parser.add_argument("--hf", type=Path, required=True, metavar="DIR", help="the result")
    parser.add_argument(
        "--ckpt-step", type=whole_number(0), metavar="N", help="its iteration (the latest)"
    )
    parser.add_argument(
        "--merge",
        action="store_true",
        help="multiply the factors back into a plain LLaMA, where nothing is between them",
    )
    parser.add_argument(
        "--max-shard-size",
        type=byte_size,
        default=byte_size("5GB"),
        metavar="SIZE",
        help="of a file of weights (5GB)",
    )
    parser.add_argument(
        "--dtype", choices=("float32", "bfloat16", "float16"), help="of the weights (as they are)"
    )
    parser.add_argument(
        "--tokenizer", type=Path, metavar="DIR", help="its tokenizer (the one it was trained with)"
    )
    parser.add_argument(
        "--vocab-size",
        type=whole_number(1),
        metavar="N",
        help="tokens that exist, where neither checkpoint nor tokenizer says it",
    )
    _add_common(parser)
    args = parser.parse_args(argv)

    from megatron.boost.conversion.checking import check_export
    from megatron.boost.conversion.exporting import plan_export, write_export
    from megatron.boost.conversion.hf_config import dtype_named
    from megatron.boost.conversion.mapping_table import export_rows, lines
    from megatron.boost.conversion.output_folder import refuse_occupied
    from megatron.boost.conversion.progress import on_terminal

    refuse_occupied(args.hf, "--hf")
    plan = plan_export(
        args.load,
        step=args.ckpt_step,
        merge=args.merge,
        dtype=dtype_named(args.dtype) if args.dtype else None,
        tokenizer=args.tokenizer,
        vocab_size=args.vocab_size,
    )
    reader = plan.reader
    result: dict[str, object] = {
        "parameters_source": reader.description.parameter_count(),
        "parameters": plan.description.parameter_count(),
        "tensors": len(plan.entries),
        "low_rank_arch": reader.description.low_rank.arch,
        "iteration": reader.iteration,
        "vocabulary_rows": plan.description.vocab_size,
        "vocabulary_rows_padded": reader.padded_vocab_size,
    }
    if not reader.vocabulary_is_known:
        print(
            f"vocabulary: {plan.description.vocab_size} rows, padding included; --vocab-size or "
            "--tokenizer says how many tokens there are"
        )
    if plan.tokenizer is None:
        print("tokenizer: none was found beside the checkpoint; --tokenizer DIR adds one")
    if args.dry_run:
        _print_table(lines(export_rows(plan)), args, result)
        return
    checked: list[float] = []

    def check(folder: Path) -> None:
        checked.append(check_export(plan, folder).difference)

    started = time.monotonic()
    size = write_export(
        plan,
        args.hf,
        max_shard_size=args.max_shard_size,
        check=check if args.check else None,
        progress=on_terminal,
    )
    _finish(args, result, args.hf, size, started, checked)


def _add_common(parser: ToolParser) -> None:
    parser.add_argument(
        "--check",
        action="store_true",
        help="compare the logits of source and result at every position of a sample, by "
        "transformers and by Megatron, and write nothing if they differ",
    )
    parser.add_argument(
        "--dry-run", action="store_true", help="print which tensor becomes which, write nothing"
    )


def _print_table(table: Iterable[str], args: Namespace, result: dict[str, object]) -> None:
    for line in table:
        print(line)
    if args.json is not None:
        write_json(args.json, result)


def _finish(
    args: Namespace,
    result: dict[str, object],
    folder: Path,
    size: int,
    started: float,
    checked: list[float],
    exact: bool = True,
) -> None:
    seconds = time.monotonic() - started
    result |= {"bytes": size, "seconds": round(seconds, 3)}
    if checked:
        result["largest_logit_difference"] = checked[0]
        why = "" if exact else ", which is what the lower ranks change"
        print(f"logits of source and result: at most {checked[0]:.3g} apart{why}")
    print(f"written: {folder} ({result['parameters']:,} parameters, {size / 1e6:.1f} MB)")
    if args.json is not None:
        write_json(args.json, result)


if __name__ == "__main__":
    run_tool(main)
