"""BOOST's flags beside Megatron's, and what is checked across them before any process group.

`prepare` turns the user's command line into the one Megatron parses: defaults that a low-rank model
needs are added to it, each said in one line; `parse` parses and validates it.
"""

from __future__ import annotations

import importlib
import sys
import traceback
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal
from unittest import mock

from boost_layers.config import LowRankConfig
from boost_layers.validation import ModelSizes, nearest_multiple, validate_sizes
from megatron.boost.checkpoint_flags import flags_for_async_save, flags_of_checkpoint
from megatron.boost.flags import (
    add_flags,
    config_from,
    is_given,
    make_help_printable,
    refuse_in_one_line,
)
from megatron.boost.idle_flags import refuse_idle_flags
from megatron.boost.learning_rate import check_schedule
from megatron.boost.megatron_flags import refuse_unsupported
from megatron.boost.missing_packages import flags_for_missing_packages
from megatron.boost.stored_run import TRACKER, stored_run, with_stored_arguments
from megatron.boost.vocabulary import require_tokenizer
from megatron.boost.writers import check_writers


def _flag(name: str, default: Any, **argparse_keywords: Any) -> Any:
    return field(default=default, metadata={"flag": name, **argparse_keywords})


@dataclass(frozen=True, kw_only=True)
class LaunchConfig:
    """How a run is started and what it reports; nothing that changes the model."""

    device: Literal["auto", "cuda", "cpu"] = _flag("--device", "auto")
    """Where the run takes place; cpu: gloo, Megatron's local implementation, no fused CUDA kernels;
    auto: cuda where there is one."""

    comm_report: str | None = _flag(
        "--low-rank-comm-report", None, nargs="?", const="", metavar="FILE"
    )
    """After training, print a table of collectives by operation and by forward, backward and
    recompute, per layer and micro-batch; with FILE, also write it there as JSON."""

    log_latents_interval: int = _flag("--low-rank-log-latents-interval", 0, metavar="N")
    """Every N steps, log the norm and the effective rank of each projection's latent to TensorBoard
    (--tensorboard-dir) and W&B (--wandb-project); 0: never."""

    verbose: bool = _flag("--verbose", False)
    """On CPU, also print upstream's warnings and its list of arguments, which otherwise go to the
    log file."""

    def __post_init__(self) -> None:
        if self.log_latents_interval < 0:
            raise ValueError(
                f"--low-rank-log-latents-interval {self.log_latents_interval}: is a number of "
                "steps, 0 or more; nearest legal value: 0"
            )


@dataclass(frozen=True)
class Settings:
    """A parsed and validated command line."""

    launch: LaunchConfig
    low_rank: LowRankConfig
    megatron: Namespace
    """Megatron's own arguments, as it validated them."""


def add_boost_flags(parser: ArgumentParser) -> ArgumentParser:
    """Add our two groups to Megatron's parser, and make it refuse bad input in one line and print
    its help."""
    add_flags(parser, LowRankConfig, "low-rank (BOOST)")
    add_flags(parser, LaunchConfig, "launch (BOOST)")
    refuse_in_one_line(parser)
    make_help_printable(parser)
    return parser


def early_launch_flags(argv: Sequence[str]) -> LaunchConfig:
    """The launch flags alone, before Megatron is imported.

    Raises:
        ValueError: for an illegal value of one of them.
    """
    parser = ArgumentParser(add_help=False, allow_abbrev=False)
    add_flags(parser, LaunchConfig, "launch")
    refuse_in_one_line(parser)
    launch: LaunchConfig = config_from(parser.parse_known_args(list(argv))[0], LaunchConfig)
    return launch


def prepare(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """Megatron's command line for the user's, and the lines that say what was added.

    Raises:
        ValueError: for settings or sizes that cannot be run, by flag, value and nearest legal one.
    """
    if is_given(argv, "--yaml-cfg"):
        raise ValueError(
            "--yaml-cfg: Megatron ignores all other flags beside it, ours included; "
            "nearest legal value: leave it out and pass flags"
        )
    arguments, parser = _parse_only(argv)
    if arguments.spec is not None:
        _check_spec(arguments)
    added, said = flags_for_async_save(argv, arguments)
    if arguments.use_checkpoint_args:
        restored = flags_of_checkpoint(argv, arguments)
        said.append(f"from the checkpoint: {' '.join(restored) or 'no flag of BOOST'}")
        argv = [*argv, *restored]
        arguments = with_stored_arguments(_parse_only(argv)[0])
    said += require_tokenizer(arguments)
    _check_missing(arguments)
    said += _said_of_load(arguments)
    low_rank = low_rank_config(arguments)
    refuse_idle_flags(argv, low_rank)
    check_writers(arguments, low_rank)
    spared = flags_for_missing_packages(argv, has_our_layers(arguments))
    if spared:
        added += spared
        said.append(f"{' '.join(spared)}: for want of apex or Transformer Engine")
    if low_rank.arch == "none":
        return [*argv, *added], said
    dropout = []
    for flag, value in (
        ("--hidden-dropout", arguments.hidden_dropout),
        ("--attention-dropout", arguments.attention_dropout),
    ):
        if not is_given(argv, flag):
            dropout += [flag, "0.0"]
        elif value > 0:
            raise ValueError(
                f"{flag} {value}: low-rank layers have no dropout; nearest legal value: 0.0"
            )
    added += dropout
    if dropout:
        said.append("dropout: 0 (Megatron's default of 0.1 was not asked for)")
    if (
        low_rank.hidden_sharded
        and arguments.tensor_model_parallel_size > 1
        and not arguments.sequence_parallel
    ):
        added.append("--sequence-parallel")
        said.append("sequence parallelism: on at the borders of the BTP layers")
    if low_rank.low_rank and low_rank.tp == "vanilla" and arguments.sequence_parallel:
        raise ValueError(
            "--sequence-parallel: vanilla low-rank layers keep the residual stream whole; "
            "nearest legal value: leave it out"
        )
    if arguments.use_distributed_optimizer and not arguments.dist_ckpt_optim_fully_reshardable:
        added.append("--dist-ckpt-optim-fully-reshardable")
    refuse_unsupported(parser, arguments, argv, low_rank.arch)
    _check_sizes(arguments, low_rank)
    return [*argv, *added], said


def parse(argv: Sequence[str], defaults: dict[str, Any]) -> Settings:
    """Parse and validate with Megatron, and set its global variables.

    Raises:
        ValueError: with Megatron's own words where it refuses the flags.
    """
    from megatron.training.arguments import parse_and_validate_args

    with mock.patch.object(sys, "argv", [sys.argv[0], *argv]), refusals_of_megatron():
        arguments = parse_and_validate_args(add_boost_flags, args_defaults=defaults)
    low_rank = low_rank_config(arguments)
    return Settings(config_from(arguments, LaunchConfig), low_rank, arguments)


@contextmanager
def refusals_of_megatron() -> Iterator[None]:
    """Context in which what Megatron's checks of its flags raise becomes a ValueError: assertions,
    and errors of arithmetic with sizes that make no sense."""
    try:
        yield
    except (AssertionError, ArithmeticError, LookupError, TypeError) as refusal:
        raise ValueError(f"Megatron refuses these flags: {_reason(refusal)}") from refusal


def has_our_layers(arguments: Namespace) -> bool:
    """Whether parsed arguments, maybe another program's, ask for layers of ours."""
    return getattr(arguments, "low_rank_arch", "none") != "none"


def low_rank_config(arguments: Namespace) -> LowRankConfig:
    """`LowRankConfig` from parsed arguments; the seed is Megatron's."""
    config: LowRankConfig = config_from(arguments, LowRankConfig, seed=arguments.seed)
    return config


def _parse_only(argv: Sequence[str]) -> tuple[Namespace, ArgumentParser]:
    """Megatron's parser with our flags, and what it makes of `argv` before Megatron's validation
    changes or refuses anything."""
    from megatron.training.arguments import parse_args

    parsers = []

    def keep(parser: ArgumentParser) -> ArgumentParser:
        parsers.append(add_boost_flags(parser))
        return parser

    with mock.patch.object(sys, "argv", [sys.argv[0], *argv]):
        return parse_args(keep), parsers[0]


def _check_spec(arguments: Namespace) -> None:
    """Import the user's layer spec now: Megatron only logs a failure and trains a full-rank
    model."""
    shown = "--spec " + " ".join(arguments.spec)
    if len(arguments.spec) != 2:
        raise ValueError(f"{shown}: takes two values, a module and a name in it")
    module, name = arguments.spec
    try:
        found = getattr(importlib.import_module(module), name, None)
    except Exception as failure:  # whatever a user's module raises, the run must not start
        raise ValueError(f"{shown}: cannot be imported: {failure!r}") from failure
    if found is None:
        raise ValueError(f"{shown}: module {module} has no {name}")
    if module == "boost_layers.specs" and arguments.low_rank_arch == "none":
        raise ValueError(
            f"{shown}: is for scripts other than this one, where dropout, embedding, head and "
            "padding would stay Megatron's; nearest legal value: --low-rank-arch cola"
        )
    if arguments.low_rank_arch != "none":
        raise ValueError(
            f"{shown}: --low-rank-arch {arguments.low_rank_arch} brings its own spec; "
            "nearest legal value: leave --spec out"
        )


def _check_missing(arguments: Namespace) -> None:
    """Refuse a run without what Megatron would miss late, or in words of its source code; and a
    course of the learning rate that its scheduler does not take."""
    if arguments.eval_interval is None:
        raise ValueError(
            "--eval-interval: is missing and has no default in Megatron 0.19; a usual value: 1000"
        )
    if arguments.save is not None and arguments.save_interval is None:
        raise ValueError(
            f"--save {arguments.save}: needs --save-interval, and that is missing; a usual value: "
            "1000"
        )
    if (
        arguments.num_layers is None
        and not arguments.use_checkpoint_args
        and stored_run(arguments) is not None
    ):
        raise ValueError(
            f"--num-layers: is missing; nearest legal value: --use-checkpoint-args, which takes "
            f"the model's sizes from --load {arguments.load}"
        )
    steps = arguments.train_iters or arguments.train_samples or 0
    if arguments.lr is not None and steps > 0 and not arguments.skip_train:
        check_schedule(arguments)


def _said_of_load(arguments: Namespace) -> list[str]:
    """A line where `--load` names nothing to load: Megatron starts from scratch, as it must for the
    first of a job's restarts, but a mistyped folder looks the same."""
    load = arguments.load
    if load is None or load == arguments.save or "://" in load or (Path(load) / TRACKER).is_file():
        return []
    return [f"--load {load}: holds no checkpoint, so the training starts from scratch"]


def _check_sizes(arguments: Namespace, low_rank: LowRankConfig) -> None:
    required = (
        ("--num-layers", arguments.num_layers),
        ("--hidden-size", arguments.hidden_size),
        ("--num-attention-heads", arguments.num_attention_heads),
        ("--seq-length", arguments.seq_length),
        ("--micro-batch-size", arguments.micro_batch_size),
    )
    for flag, value in required:
        if value is None:
            raise ValueError(f"{flag}: is missing and has no default")
    if arguments.lr is None and not arguments.skip_train:
        raise ValueError("--lr: is missing and has no default")
    iterations = arguments.train_iters or arguments.train_samples or 0
    if iterations <= 0 and not arguments.skip_train:
        raise ValueError(
            f"--train-iters {arguments.train_iters}: there is nothing to train without a positive "
            "number of iterations (or --train-samples); nearest legal value: 1"
        )
    tp, pp = arguments.tensor_model_parallel_size, arguments.pipeline_model_parallel_size
    for flag, size in (
        *required,
        ("--ffn-hidden-size", arguments.ffn_hidden_size),
        ("--kv-channels", arguments.kv_channels),
        ("--num-query-groups", arguments.num_query_groups),
        ("--tensor-model-parallel-size", tp),
        ("--pipeline-model-parallel-size", pp),
    ):
        if size is not None and size < 1:
            raise ValueError(f"{flag} {size}: must be positive; nearest legal value: 1")
    if arguments.world_size % (tp * pp):
        raise ValueError(
            f"--tensor-model-parallel-size {tp} times --pipeline-model-parallel-size {pp}: does "
            f"not divide the {arguments.world_size} ranks of this run; nearest legal value: start "
            f"{nearest_multiple(arguments.world_size, tp * pp)} ranks"
        )
    _check_heads(arguments)
    ffn = arguments.ffn_hidden_size
    if ffn is None:
        # As Megatron sets it for a gated MLP: two thirds of 4·d, in whole blocks of 64.
        ffn = int((4 * arguments.hidden_size * 2 / 3) / 64) * 64
    heads = arguments.num_attention_heads
    validate_sizes(
        low_rank,
        ModelSizes(
            hidden_size=arguments.hidden_size,
            ffn_hidden_size=ffn,
            num_attention_heads=heads,
            num_query_groups=arguments.num_query_groups
            if arguments.group_query_attention
            else heads,
            tensor_parallel=tp,
            num_layers=arguments.num_layers,
            seq_length=arguments.seq_length,
        ),
    )
    if arguments.sequence_parallel and arguments.seq_length % tp:
        raise ValueError(
            f"--seq-length {arguments.seq_length}: with --sequence-parallel it is split over "
            f"--tensor-model-parallel-size {tp}; nearest legal value: "
            f"{nearest_multiple(arguments.seq_length, tp)}"
        )
    _check_stages(arguments)
    if low_rank.crossing:
        _check_stages_have_layers(arguments)


def _check_heads(arguments: Namespace) -> None:
    """The width of a head: a whole number, and with RoPE an even one."""
    hidden, heads = arguments.hidden_size, arguments.num_attention_heads
    even = 2 if arguments.position_embedding_type in ("rope", "yarn") else 1
    if arguments.kv_channels is not None:
        if arguments.kv_channels % even:
            raise ValueError(
                f"--kv-channels {arguments.kv_channels}: rotary embeddings turn pairs of channels; "
                f"nearest legal value: {nearest_multiple(arguments.kv_channels, even)}"
            )
        return
    if hidden % (even * heads):
        raise ValueError(
            f"--hidden-size {hidden}: must be a multiple of {even} times --num-attention-heads "
            f"{heads}; nearest legal value: {nearest_multiple(hidden, even * heads)} "
            "(or set --kv-channels)"
        )


def _check_stages(arguments: Namespace) -> None:
    """Layers that divide over the stages of the pipeline, virtual ones included."""
    if (
        arguments.account_for_embedding_in_pipeline_split
        or arguments.account_for_loss_in_pipeline_split
        or arguments.pipeline_model_parallel_layout is not None
        or arguments.decoder_first_pipeline_num_layers
        or arguments.decoder_last_pipeline_num_layers
    ):
        return
    pp, layers = arguments.pipeline_model_parallel_size, arguments.num_layers
    unit, over = pp, f"{pp} pipeline stages"
    if arguments.num_virtual_stages_per_pipeline_rank:
        unit *= arguments.num_virtual_stages_per_pipeline_rank
        over = f"{unit} virtual pipeline stages"
    elif arguments.num_layers_per_virtual_pipeline_stage:
        unit *= arguments.num_layers_per_virtual_pipeline_stage
        over += f" in chunks of {arguments.num_layers_per_virtual_pipeline_stage} layers"
    if layers % unit:
        raise ValueError(
            f"--num-layers {layers}: is split over {over}; "
            f"nearest legal value: {nearest_multiple(layers, unit)}"
        )


def _check_stages_have_layers(arguments: Namespace) -> None:
    """LaX's latents go from layer to layer: a stage without one could not pass them on."""
    layout = arguments.pipeline_model_parallel_layout
    if layout is not None:
        from megatron.core.transformer.enums import LayerType
        from megatron.core.transformer.pipeline_parallel_layer_layout import (
            PipelineParallelLayerLayout,
        )

        with refusals_of_megatron():
            stages_of_layout = PipelineParallelLayerLayout.parse_str_to_list(layout)
        if not all(LayerType.decoder in stage for stage in stages_of_layout):
            raise ValueError(
                f"--pipeline-model-parallel-layout {layout}: with --low-rank-arch lax every stage "
                "needs a layer (t); nearest legal value: one with the E and the L beside layers"
            )
    ends = (
        arguments.account_for_embedding_in_pipeline_split,
        arguments.account_for_loss_in_pipeline_split,
    )
    stages = arguments.pipeline_model_parallel_size
    stages *= arguments.num_virtual_stages_per_pipeline_rank or 1
    per_stage = arguments.num_layers_per_virtual_pipeline_stage
    if per_stage:
        stages = (arguments.num_layers + sum(ends)) // per_stage
    if any(ends) and (arguments.num_layers + sum(ends)) // stages < 2:
        raise ValueError(
            f"--num-layers {arguments.num_layers}: with --low-rank-arch lax the stages of the "
            "embedding and of the loss need a layer too; nearest legal value: "
            f"{2 * stages - sum(ends)}"
        )


def _reason(refusal: Exception) -> str:
    """An assertion's message, or the line that failed where it says too little."""
    if str(refusal) and isinstance(refusal, AssertionError):
        return str(refusal)
    frame = traceback.extract_tb(refusal.__traceback__)[-1]
    return f"{frame.line} ({Path(frame.filename).name}:{frame.lineno})"
