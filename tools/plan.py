r"""Which layout trains a model fastest on a cluster, how long an iteration takes, and why.

    python tools/plan.py --model 7B --gpus 8 --gpu a100-80 --arch cola --ratio 0.25
    python tools/plan.py --model llama/config.json --gpus 512 --gpu my-cluster.toml
    python tools/plan.py --validate
    python tools/plan.py --calibrate my-machine.toml
    python tools/plan.py --model 7B --gpus 4 --gpu a100-80 --analyse
    python tools/plan.py --model 40B --gpus 8192 --gpu h100 --scaling weak --global-batch-size 16384

No GPU is needed. docs/planner.md says what the figures are made of and how far they can be trusted.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

# Run from a checkout, the package may not be installed.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from boost_layers.config import LowRankConfig
from megatron.boost.accounting import Layout, Model, validate_layout
from megatron.boost.command_line import ToolParser, output_file, run_tool, whole_number, write_json
from megatron.boost.planner.cluster import load_cluster, presets, with_nodes_of
from megatron.boost.planner.layouts import STRATEGIES, Workload
from megatron.boost.planner.models import SIZES, function_flags, load_model
from megatron.boost.planner.published import PUBLISHED_ON
from megatron.boost.planner.reports.analysis import analysis_report
from megatron.boost.planner.reports.calibration import calibration_report
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
    """What the mode asks for; a flag that the mode has no use for is refused."""
    mode = next((name for name in _FLAGS_OF_MODE if getattr(args, name, None)), "rank")
    given_for_calibration = args.gpu, args.gpus, args.dtype
    gpus_given = args.gpus is not None
    for name, default in _DEFAULTS.items():
        given = getattr(args, name)
        if given is not None and name not in _FLAGS_OF_MODE[mode]:
            raise ValueError(
                f"--{name.replace('_', '-')} {_shown(given)}: "
                f"{'without a mode' if mode == 'rank' else f'with --{mode}'} it has no meaning; "
                "nearest legal value: leave it out"
            )
        setattr(args, name, default if given is None else given)
    if mode == "calibrate":
        return calibration_report(args.calibrate, *given_for_calibration)
    cluster = load_cluster(args.gpu)
    if args.gpus_per_node is not None:
        cluster = with_nodes_of(cluster, args.gpus_per_node)
    if mode in ("analyse", "plot") and not gpus_given:
        # The tensor-parallel size there, which stays within a node.
        args.gpus = min(args.gpus, cluster.gpus_per_node)
    if mode == "validate":
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
        function_flags=function_flags(args.model),
    )
    if mode == "plot":
        return plots_report(workload, cluster, args.gpus, args.micro_batch_size, args.plot)
    if mode == "analyse":
        return analysis_report(workload, cluster, args.gpus, args.micro_batch_size)
    if mode == "scaling":
        return scaling_report(workload, cluster, args.gpus, args.scaling, args.strategies)
    return plan_report(workload, cluster, args.gpus, args.strategies, args.top)


_DEFAULTS: dict[str, Any] = {
    "model": "7B",
    "gpus": 8,
    "gpu": PUBLISHED_ON,
    "gpus_per_node": None,
    "arch": "cola",
    "ratio": 0.25,
    "rank": None,
    "seq_length": 4096,
    "global_batch_size": 1024,
    "dtype": None,
    "strategies": ("btp", "full-rank"),
    "top": 10,
    "micro_batch_size": 4,
}
_MODEL = {"model", "gpus", "gpu", "gpus_per_node", "arch", "ratio", "rank", "seq_length", "dtype"}
_FLAGS_OF_MODE = {
    "calibrate": {"gpu", "gpus", "dtype"},
    "validate": {"gpu"},
    "plot": {*_MODEL, "micro_batch_size"},
    "analyse": {*_MODEL, "micro_batch_size"},
    "scaling": {*_MODEL, "global_batch_size", "strategies"},
    "rank": {*_MODEL, "global_batch_size", "strategies", "top"},
}
"""What each mode takes, and the ranking of layouts, which is none."""


def _shown(value: Any) -> str:
    return ",".join(value) if isinstance(value, tuple) else str(value)


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
        metavar="SIZE|FILE",
        help=f"one of {', '.join(SIZES)}, or a config.json of a Hugging Face LLaMA (7B)",
    )
    parser.add_argument(
        "--gpus", type=whole_number(1), metavar="N", help=f"GPUs in all ({_DEFAULTS['gpus']})"
    )
    parser.add_argument(
        "--gpu",
        metavar="NAME|FILE",
        help=f"one of {', '.join(presets())}, or a cluster's TOML file ({PUBLISHED_ON})",
    )
    parser.add_argument(
        "--gpus-per-node", type=whole_number(1), metavar="N", help="(what the cluster has)"
    )
    parser.add_argument("--arch", choices=["cola", "svd", "lax"], help="(cola)")
    parser.add_argument("--ratio", type=float, metavar="F", help="rank / hidden (0.25)")
    parser.add_argument(
        "--rank", type=whole_number(1), metavar="R", help="the rank, instead of the ratio's"
    )
    parser.add_argument("--seq-length", type=whole_number(1), metavar="N", help="(4096)")
    parser.add_argument(
        "--global-batch-size",
        type=whole_number(1),
        metavar="N",
        help="sequences of an iteration (1024)",
    )
    parser.add_argument(
        "--dtype", choices=["bf16", "fp16", "fp32"], help="(the first in the cluster's file)"
    )
    parser.add_argument(
        "--strategies",
        type=_strategies,
        metavar="S,…",
        help=f"which of {', '.join(STRATEGIES)} to rank (btp,full-rank)",
    )
    parser.add_argument("--top", type=whole_number(1), metavar="N", help="layouts to show (10)")
    parser.add_argument(
        "--micro-batch-size",
        type=whole_number(1),
        metavar="N",
        help="with --analyse and --plot (4)",
    )
    mode = parser.add_mutually_exclusive_group()
    mode.add_argument(
        "--validate", action="store_true", help="predicted against published iteration times"
    )
    mode.add_argument(
        "--calibrate",
        type=output_file,
        nargs="?",
        const=Path("this-machine.toml"),
        metavar="FILE",
        help="measure this machine and write its file (this-machine.toml); --gpu then names the "
        "cluster that says what one machine cannot show, --gpus the number of ranks",
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
