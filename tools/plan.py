r"""Which layout trains a model fastest on a cluster, how long an iteration takes, and why.

    python tools/plan.py --model 7B --gpus 8 --gpu a100-80 --arch cola --ratio 0.25
    python tools/plan.py --model llama/config.json --gpus 512 --gpu my-cluster.toml
    python tools/plan.py --validate
    python tools/plan.py --model 7B --gpus 4 --gpu a100-80 --analyse
    python tools/plan.py --model 40B --gpus 8192 --gpu h100 --scaling weak --global-batch-size 16384

No GPU is needed. docs/planner.md says what the figures are made of and how far they can be trusted.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

# Run from a checkout, the package may not be installed.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from boost_layers.config import LowRankConfig
from megatron.boost.accounting import Layout, Model, validate_layout
from megatron.boost.command_line import ToolParser, run_tool, whole_number, write_json
from megatron.boost.planner.cluster import load_cluster, presets
from megatron.boost.planner.layouts import STRATEGIES, Workload
from megatron.boost.planner.models import SIZES, load_model
from megatron.boost.planner.published import PUBLISHED_ON
from megatron.boost.planner.reports.analysis import analysis_report
from megatron.boost.planner.reports.plan import plan_report
from megatron.boost.planner.reports.plots import plots_report
from megatron.boost.planner.reports.report import Report
from megatron.boost.planner.reports.scaling import scaling_report
from megatron.boost.planner.reports.validation import validation_report


def main(argv: Sequence[str] | None) -> None:
    """Run the tool with `argv`, or the command line when it is None."""
    args = _parser().parse_args(argv)
    report = _report(args)
    report.show()
    if args.json is not None:
        write_json(args.json, report.flat)


def _report(args: argparse.Namespace) -> Report:
    cluster = load_cluster(args.gpu)
    if args.validate:
        if args.gpu in presets() and args.gpu != PUBLISHED_ON:
            raise ValueError(
                f"--gpu {args.gpu}: the published times are {PUBLISHED_ON}'s; "
                f"nearest legal value: {PUBLISHED_ON}"
            )
        return validation_report(cluster)
    workload = Workload(
        model=_model(args),
        sequence_length=args.seq_length,
        global_batch=args.global_batch_size,
        dtype=args.dtype or next(iter(cluster.compute)),
    )
    if args.plot is not None:
        return plots_report(workload, cluster, args.gpus, args.micro_batch_size, args.plot)
    if args.analyse:
        return analysis_report(workload, cluster, args.gpus, args.micro_batch_size)
    if args.scaling is not None:
        return scaling_report(workload, cluster, args.gpus, args.scaling)
    return plan_report(workload, cluster, args.gpus, args.strategies, args.top)


def _model(args: argparse.Namespace) -> Model:
    """Refusals name the tool's flags, which are shorter than those of training."""
    try:
        low_rank = LowRankConfig(arch=args.arch, ratio=args.ratio, rank=args.rank)
        model = load_model(args.model, low_rank)
        validate_layout(model, Layout(sequence_length=args.seq_length, micro_batch_size=1))
    except ValueError as error:
        raise ValueError(str(error).replace("--low-rank-", "--")) from None
    return model


def _parser() -> ToolParser:
    parser = ToolParser(
        "Rank the layouts of a model on a cluster by predicted time, with memory and break-down."
    )
    parser.add_argument(
        "--model",
        default="7B",
        metavar="SIZE|FILE",
        help=f"one of {', '.join(SIZES)}, or a config.json of a Hugging Face LLaMA (%(default)s)",
    )
    parser.add_argument(
        "--gpus", type=whole_number(1), default=8, metavar="N", help="GPUs in all (%(default)s)"
    )
    parser.add_argument(
        "--gpu",
        default="a100-80",
        metavar="NAME|FILE",
        help=f"one of {', '.join(presets())}, or a cluster's TOML file (%(default)s)",
    )
    parser.add_argument(
        "--arch", choices=["cola", "svd", "lax"], default="cola", help="(%(default)s)"
    )
    parser.add_argument(
        "--ratio", type=float, default=0.25, metavar="F", help="rank / hidden (%(default)s)"
    )
    parser.add_argument(
        "--rank", type=whole_number(1), metavar="R", help="the rank, instead of the ratio's"
    )
    parser.add_argument(
        "--seq-length", type=whole_number(1), default=4096, metavar="N", help="(4096)"
    )
    parser.add_argument(
        "--global-batch-size",
        type=whole_number(1),
        default=1024,
        metavar="N",
        help="sequences of an iteration (%(default)s)",
    )
    parser.add_argument(
        "--dtype", choices=["bf16", "fp16", "fp32"], help="(the first in the cluster's file)"
    )
    parser.add_argument(
        "--strategies",
        type=_strategies,
        default=("btp", "full-rank"),
        metavar="S,…",
        help=f"which of {', '.join(STRATEGIES)} to rank (btp,full-rank)",
    )
    parser.add_argument(
        "--top", type=whole_number(1), default=10, metavar="N", help="layouts to show (%(default)s)"
    )
    parser.add_argument(
        "--micro-batch-size",
        type=whole_number(1),
        default=4,
        metavar="N",
        help="with --analyse and --plot (%(default)s)",
    )
    mode = parser.add_mutually_exclusive_group()
    mode.add_argument(
        "--validate", action="store_true", help="predicted against published iteration times"
    )
    mode.add_argument(
        "--analyse",
        action="store_true",
        help="one block's products and collectives, and the largest micro-batch, with --gpus as "
        "the tensor-parallel size",
    )
    mode.add_argument(
        "--plot",
        type=Path,
        metavar="PREFIX",
        help="draw time against rank, TP size and link rate, and memory against micro-batch, with "
        "--gpus as the tensor-parallel size, to PREFIX.png and PREFIX.html",
    )
    mode.add_argument(
        "--scaling",
        choices=["strong", "weak"],
        help="the fastest layout on 1 to --gpus GPUs: with one global batch, or with as many "
        "sequences for each GPU",
    )
    return parser


def _strategies(text: str) -> tuple[str, ...]:
    chosen = tuple(text.split(","))
    for name in chosen:
        if name not in STRATEGIES:
            raise argparse.ArgumentTypeError(
                f"{name!r} is none of {', '.join(STRATEGIES)}; nearest legal value: btp"
            )
    return chosen


if __name__ == "__main__":
    run_tool(main)
