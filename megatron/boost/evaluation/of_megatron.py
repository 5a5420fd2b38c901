"""Scoring windows with the model of a Megatron checkpoint, at any TP, PP and DP.

Nothing here may be imported before Megatron may be: on CPU, inside `megatron_on_cpu()`.
"""

from __future__ import annotations

import os
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from megatron.core import mpu
from megatron.core.enums import ModelType
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.utils import get_attr_wrapped_model, get_model_config, unwrap_model
from megatron.training.argument_utils import pretrain_cfg_container_from_args
from megatron.training.initialize import initialize_megatron, set_jit_fusion_options
from megatron.training.training import setup_model_and_optimizer
from torch import Tensor

from boost_layers.annealing import set_activation_amount
from boost_layers.carry import width_between_stages
from boost_layers.validation import nearest_multiple
from boost_layers.vocabulary import mask_padded_vocabulary
from megatron.boost.arguments import (
    Settings,
    has_our_layers,
    parse,
    prepare,
    refusals_of_megatron,
)
from megatron.boost.builder import model_config
from megatron.boost.checkpoint_settings import check_run
from megatron.boost.evaluation.folders import require_checkpoint
from megatron.boost.evaluation.stored_flags import flags_of_model
from megatron.boost.evaluation.tokens import TokenStream
from megatron.boost.evaluation.windows import Batch, Window, batches, share_of
from megatron.boost.megatron_flags import megatron_parser
from megatron.boost.patches.wide_pipeline_tensor import wide_pipeline_tensor
from megatron.boost.stored_run import TRUE_VOCABULARY, StoredRun, stored_run

_DTYPE_FLAGS = {"float32": [], "bfloat16": ["--bf16"], "float16": ["--fp16"]}


@dataclass(frozen=True, kw_only=True)
class Layout:
    """How the model is spread over the ranks; what is left of them is data-parallel."""

    tensor_parallel: int = 1
    pipeline_parallel: int = 1
    micro_batch_size: int = 4

    def refuse_world(self, ranks: int) -> None:
        """Raise ValueError if this many ranks do not make whole replicas of the model."""
        tp, pp = self.tensor_parallel, self.pipeline_parallel
        if ranks % (tp * pp):
            raise ValueError(
                f"--tensor-model-parallel-size {tp} times --pipeline-model-parallel-size {pp}: "
                f"does not divide the {ranks} ranks of this run; nearest legal value: torchrun "
                f"--nproc-per-node {nearest_multiple(ranks, tp * pp)}"
            )


def run_of_checkpoint(load: Path, step: int | None) -> StoredRun:
    """What a Megatron checkpoint says of its model; needs no process group.

    Args:
        load: the folder of `--load`.
        step: the iteration of `--ckpt-step`; None: the last one that was saved.

    Raises:
        ValueError: if there is no such checkpoint.
    """
    where = f"--load {load}"
    require_checkpoint(load)
    run = stored_run(_loading(load, step))
    if run is None:
        raise ValueError(f"{where}: there is no torch_dist checkpoint of Megatron's in it")
    if not hasattr(run.arguments, "num_layers"):
        raise ValueError(f"{where}: the checkpoint lacks the arguments of the run that wrote it")
    return run


def _loading(load: Path, step: int | None) -> Namespace:
    """What Megatron's readers of checkpoints look up in its arguments."""
    with refusals_of_megatron():
        argv = ["--load", str(load), *([] if step is None else ["--ckpt-step", str(step)])]
        return megatron_parser().parse_args(argv)


def vocabulary_of(run: StoredRun, tokenizer_size: int | None) -> int:
    """The number of tokens that a checkpoint's model has, without the padding.

    Args:
        run: the checkpoint's.
        tokenizer_size: that of the model's tokenizer, if it is known.

    Raises:
        ValueError: if neither says it.
    """
    stored = run.arguments
    true = getattr(stored, TRUE_VOCABULARY, None)
    stated = getattr(stored, "vocab_size", None)
    padded = getattr(stored, "padded_vocab_size", None)
    if true is None and getattr(stored, "tokenizer_type", None) == "NullTokenizer":
        true = stated
    if true is not None:
        return int(true)
    # A tokenizer that was given may be larger than this model's matrix; its tokens tell later.
    known = tokenizer_size if tokenizer_size is not None else stated
    sizes = [size for size in (known, padded) if size is not None]
    if not sizes:
        raise ValueError(
            f"{run.where}: says nothing of its vocabulary; nearest legal value: add "
            "--tokenizer-model"
        )
    return int(min(sizes))


def configure(
    run: StoredRun,
    load: Path,
    step: int | None,
    layout: Layout,
    *,
    window: int,
    vocab_size: int,
    dtype: str | None,
    cpu_flags: Callable[[Sequence[str]], list[str]],
) -> Settings:
    """Megatron's arguments for the stored model in this layout, parsed and validated; sets its
    global variables, and makes no process group.

    Args:
        run: the checkpoint's.
        load: the folder of `--load`.
        step: the iteration of `--ckpt-step`.
        layout: on this run's ranks.
        window: the longest window, in tokens.
        vocab_size: the number of tokens that exist.
        dtype: "float32", "bfloat16" or "float16"; None: the model's own.
        cpu_flags: adds what the device needs.

    Raises:
        ValueError: for a layout that this model does not take.
    """
    stored, tp, pp = run.arguments, layout.tensor_parallel, layout.pipeline_parallel
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    layout.refuse_world(ranks)
    flags = flags_of_model(run.where, stored)
    if dtype is not None:
        flags = [flag for flag in flags if flag not in ("--bf16", "--fp16")] + _DTYPE_FLAGS[dtype]
    _check_layout(stored, tp, pp)
    # Sequence parallelism cuts the sequence into tp parts; what is added behind is no window's.
    columns = -(-window // tp) * tp
    positions = max(columns, int(stored.max_position_embeddings))
    argv, _ = prepare(
        cpu_flags(
            [*flags, "--load", str(load), *([] if step is None else ["--ckpt-step", str(step)])]
            + ["--max-position-embeddings", str(positions), "--seq-length", str(columns)]
            + ["--tensor-model-parallel-size", str(tp), "--pipeline-model-parallel-size", str(pp)]
            + ["--micro-batch-size", str(layout.micro_batch_size)]
            + ["--global-batch-size", str(layout.micro_batch_size * (ranks // (tp * pp)))]
            # Tokens come as numbers; the tokenizer is not Megatron's business.
            + ["--tokenizer-type", "NullTokenizer", "--vocab-size", str(vocab_size)]
            + ["--skip-train", "--no-load-optim", "--no-load-rng", "--mock-data"]
            + ["--eval-interval", "1", "--eval-iters", "1", "--train-iters", "1"]
        )
    )
    settings = parse(argv, {})
    with refusals_of_megatron():
        model_config(settings.megatron, settings.low_rank)
    check_run(run, settings.low_rank, settings.megatron)
    return settings


def _check_layout(stored: Namespace, tp: int, pp: int) -> None:
    """Refuse a layout that does not divide the model's sizes. Here they are given and the layout is
    to be chosen; the checks of training name the sizes."""
    sizes = [(stored.num_attention_heads, "attention heads")]
    if has_our_layers(stored) and getattr(stored, "group_query_attention", False):
        sizes.append((stored.num_query_groups, "KV heads"))
    for size, what in (*sizes, (stored.ffn_hidden_size, "channels of the MLP")):
        if size % tp:
            raise ValueError(
                f"--tensor-model-parallel-size {tp}: does not divide the model's {size} {what}; "
                f"nearest legal value: {_nearest_divisor(size, tp)}"
            )
    if stored.num_layers % pp:
        raise ValueError(
            f"--pipeline-model-parallel-size {pp}: does not divide the model's "
            f"{stored.num_layers} layers; nearest legal value: "
            f"{_nearest_divisor(stored.num_layers, pp)}"
        )


def _nearest_divisor(size: int, wanted: int) -> int:
    divisors = [number for number in range(1, size + 1) if size % number == 0]
    return min(divisors, key=lambda number: abs(number - wanted))


class CheckpointModel:
    """The model of a Megatron checkpoint with its weights, this rank's part of it.

    Making one makes the process group and Megatron's model-parallel groups, on all ranks.

    Args:
        settings: what `configure` returned.
        vocab_size: the number of tokens that exist.
        iteration: the checkpoint's, which decides how far an annealed φ has grown.
    """

    def __init__(self, settings: Settings, vocab_size: int, iteration: int) -> None:
        initialize_megatron()
        arguments = settings.megatron
        set_jit_fusion_options(tp_size=arguments.tensor_model_parallel_size)
        config = model_config(arguments, settings.low_rank)
        self._settings = settings
        self._chunks, _, _ = setup_model_and_optimizer(
            ModelType.encoder_or_decoder,
            cfg_container=pretrain_cfg_container_from_args(arguments, config),
            pg_collection=ProcessGroupCollection.use_mpu_process_groups(),
        )
        for chunk in self._chunks:
            chunk.eval()
        set_activation_amount(self._chunks, settings.low_rank.activation_amount(iteration))
        if settings.low_rank.arch == "none":
            # Megatron gives the padded rows a share of the probability, which would make the loss
            # depend on the tensor-parallel size.
            for stage in unwrap_model(self._chunks):
                group = mpu.get_tensor_model_parallel_group()
                mask_padded_vocabulary(stage, vocab_size, group)
        get_model_config(self._chunks[0]).timers = None

    def share_of(self, windows: Sequence[Window]) -> list[Window]:
        """Those of all windows that this rank's replica of the model scores."""
        return share_of(windows, mpu.get_data_parallel_rank(), mpu.get_data_parallel_world_size())

    @torch.no_grad()
    def nats_of_windows(
        self,
        stream: TokenStream,
        windows: Sequence[Window],
        on_window: Callable[[int], None] = lambda count: None,
    ) -> tuple[float, int]:
        """The sum of −ln p over the scored tokens of this rank's share of the windows, and their
        number; both 0 but on one rank of each model replica, so that the sum over all ranks is that
        of all windows.

        Runs Megatron's forward-only schedule. Every rank must call it.

        Args:
            stream: the tokens that the windows are cut from.
            windows: all of them; data-parallel ranks share them out.
            on_window: told after each micro-batch that this rank has read how many windows it had.
        """
        arguments = self._settings.megatron
        rows, columns = arguments.micro_batch_size, arguments.seq_length
        own = self.share_of(windows)
        if not own:
            return 0.0, 0
        count = -(-len(own) // rows)
        tp_size = arguments.tensor_model_parallel_size
        width = width_between_stages(self._settings.low_rank, arguments.hidden_size, tp_size)
        with wide_pipeline_tensor(width):
            sums = get_forward_backward_func()(
                forward_step_func=partial(_forward_step, on_window),
                data_iterator=batches(own, stream, rows, columns),
                model=self._chunks,
                num_microbatches=count,
                seq_length=columns,
                micro_batch_size=rows,
                decoder_seq_length=columns,
                forward_only=True,
            )
        if not sums or mpu.get_tensor_model_parallel_rank() != 0:
            return 0.0, 0
        total = torch.stack([part["nats"] for part in sums]).sum().item()
        return total, sum(part["tokens"] for part in sums)


def _forward_step(
    on_window: Callable[[int], None], source: Iterator[Batch], model: torch.nn.Module
) -> tuple[Tensor, Any]:
    """One micro-batch through this stage, as Megatron's schedules ask for it."""
    batch = next(source)
    tokens, labels = batch.tokens.cuda(), batch.labels.cuda()
    positions = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
    last = get_attr_wrapped_model(model, "post_process")
    # No mask: core attention is causal by itself, and padding stands behind the tokens.
    output = model(tokens, positions, None, labels=labels if last else None)
    on_window(len(tokens))
    return output, partial(_sum_of_losses, batch.scored)


def _sum_of_losses(scored: Tensor, losses: Tensor) -> tuple[Tensor, dict[str, Any]]:
    """For the schedule a loss, which it scales and nobody reads; for us the micro-batch's sums.

    Args:
        scored: bool `[b, s]`, on the CPU.
        losses: −ln p `[b, s]`, fp32.
    """
    # Selected by where and not by index, which would wait for a GPU.
    nats = torch.where(scored.to(losses.device), losses.double(), 0.0).sum()
    return torch.zeros(1, device=losses.device), {"nats": nats, "tokens": int(scored.sum())}
