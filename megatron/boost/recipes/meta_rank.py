"""One rank of a run of any size, without its memory and its network: the model stands on the meta
device, and the collectives of its `fake` process group do nothing.

Called inside `megatron_on_cpu()`.
"""

from __future__ import annotations

import io
import os
import re
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, redirect_stdout
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from unittest import mock

import torch
from torch import Tensor, distributed, nn

from boost_layers.carry import width_between_stages
from boost_layers.communication import LEDGER
from megatron.boost.accounting.of_megatron import layout_of_arguments, model_of_arguments
from megatron.boost.accounting.sizes import Layout, Model
from megatron.boost.patches.replacement import replaced
from megatron.boost.recipes.facts import RankFacts
from megatron.boost.recipes.kept_memory import KeptMemory

if TYPE_CHECKING:
    from argparse import Namespace

    from megatron.core.models.gpt import GPTModel

    from megatron.boost.recipes.commands import Command
    from megatron.boost.training import Plan


@dataclass(frozen=True)
class Run:
    """A command line that was found possible, as one rank sees it."""

    plan: Plan
    model: Model
    layout: Layout
    rank: int
    world_size: int

    @property
    def arguments(self) -> Namespace:
        """Megatron's, validated."""
        return self.plan.settings.megatron

    @property
    def pp_rank(self) -> int:
        """The pipeline rank: Megatron counts TP fastest, then DP, then PP."""
        return self.rank // (self.world_size // self.layout.pipeline_parallel)


@contextmanager
def configured(command: Command, rank: int) -> Iterator[Run]:
    """Context with the run that a command is on one of its ranks; Megatron's output is swallowed.

    Raises:
        ValueError: for what the script would refuse.
    """
    from megatron.core import num_microbatches_calculator
    from megatron.training import global_vars

    from megatron.boost.builder import true_vocabulary
    from megatron.boost.cpu import with_cpu_flags
    from megatron.boost.training import configure

    place = {"RANK": str(rank), "WORLD_SIZE": str(command.world_size)}
    with mock.patch.dict(os.environ, place), redirect_stdout(io.StringIO()):
        try:
            plan = configure(with_cpu_flags(command.flags))
            arguments = plan.settings.megatron
            micro_batches = num_microbatches_calculator.get_num_microbatches()
            yield Run(
                plan=plan,
                model=model_of_arguments(
                    arguments, plan.settings.low_rank, true_vocabulary(arguments)
                ),
                layout=layout_of_arguments(arguments, micro_batches),
                rank=rank,
                world_size=command.world_size,
            )
        finally:
            num_microbatches_calculator.destroy_num_microbatches_calculator()
            global_vars.destroy_global_vars()


@contextmanager
def fake_world(run: Run) -> Iterator[None]:
    """Context with Megatron's process groups of this rank, whose collectives do nothing."""
    from megatron.core import parallel_state, tensor_parallel
    from torch.testing._internal.distributed.fake_pg import FakeStore

    arguments = run.arguments
    distributed.init_process_group(
        "fake", rank=run.rank, world_size=run.world_size, store=FakeStore()
    )
    try:
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=arguments.tensor_model_parallel_size,
            pipeline_model_parallel_size=arguments.pipeline_model_parallel_size,
            virtual_pipeline_model_parallel_size=arguments.virtual_pipeline_model_parallel_size,
            create_gloo_process_groups=False,
        )
        assert parallel_state.get_pipeline_model_parallel_rank() == run.pp_rank
        tensor_parallel.model_parallel_cuda_manual_seed(arguments.seed)
        yield
    finally:
        parallel_state.destroy_model_parallel()
        distributed.destroy_process_group()


def rank_at(layout: Layout, tp_rank: int, pp_rank: int) -> int:
    """The first data-parallel rank at a place of the tensor- and the pipeline-parallel group."""
    return pp_rank * layout.data_parallel * layout.tensor_parallel + tp_rank


def build_stages(run: Run) -> list[GPTModel]:
    """The (virtual) stages of this rank, as the run builds them, but on the meta device and not
    wrapped for data parallelism."""
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.training.models.base import compose_hooks
    from megatron.training.models.dist_utils import build_virtual_pipeline_stages
    from megatron.training.models.gpt import GPTModelBuilder

    config = run.plan.container.model
    config.transformer.init_model_with_meta_device = True
    config.transformer.use_cpu_initialization = True
    config.transformer.perform_initialization = False
    with torch.device("meta"):
        stages: list[GPTModel] = build_virtual_pipeline_stages(
            GPTModelBuilder(config).build_model,
            ProcessGroupCollection.use_mpu_process_groups(),
            config.transformer.virtual_pipeline_model_parallel_size,
        )
        compose_hooks(config.pre_wrap_hooks)(stages)
    for stage in stages:
        stage.rotary_pos_emb.inv_freq = stage.rotary_pos_emb.inv_freq.to("meta")
    return stages


def built_facts(run: Run) -> RankFacts:
    """Build this rank's stages and put one micro-batch through each, forward and backward."""
    stages = build_stages(run)
    assert all(p.is_meta for stage in stages for p in stage.parameters())
    kept = KeptMemory(*stages)
    LEDGER.clear()
    inputs = [_stage_input(run, stage) for stage in stages]
    with (
        _empty_cuda_is_meta(),
        mock.patch("torch.nn.functional.scaled_dot_product_attention", _flash_attention),
    ):
        with kept.hooks():
            outputs = [_forward(stage, x, run) for stage, x in zip(stages, inputs, strict=True)]
        kept_bytes = kept.bytes
        for output in outputs:
            output.sum().backward()
    for x in inputs:
        assert x is None or (x.grad is not None and x.grad.shape == x.shape)
    named = [
        (canonical_name(stage, name), parameter)
        for stage in stages
        for name, parameter in stage.named_parameters()
    ]
    return RankFacts(
        shapes={name: tuple(parameter.shape) for name, parameter in named},
        parameter_bytes=sum(parameter.nbytes for _, parameter in named),
        kept_bytes=kept_bytes,
        message_bytes=tuple(
            output.nbytes
            for stage, output in zip(stages, outputs, strict=True)
            if not stage.post_process
        ),
        collectives={
            key: (count.calls, count.bytes) for key, count in LEDGER.counts.items() if count.calls
        },
    )


def canonical_name(stage: nn.Module, name: str) -> str:
    """A parameter's canonical name: layers counted over the whole pipeline, no wrappers."""
    name = re.sub(r"^(module\.)+", "", name)
    found = re.match(r"decoder\.layers\.(\d+)\.(.*)", name)
    if found is None:
        return name
    inner: Any = stage
    while hasattr(inner, "module"):
        inner = inner.module
    layer = inner.decoder.layers[int(found[1])].layer_number - 1
    return f"decoder.layers.{layer}.{found[2]}"


def _empty_cuda_is_meta() -> AbstractContextManager[None]:
    """Context in which an empty tensor on the CUDA device by its number, as Megatron's head makes
    them for what it receives, is on the meta device instead."""
    empty = torch.empty

    def on_meta(*args: Any, device: Any = None, **more: Any) -> Tensor:
        numbered = isinstance(device, int)
        return empty(*args, device="meta" if numbered else device, **more)

    return replaced(torch, "empty", on_meta)


def _stage_input(run: Run, stage: GPTModel) -> Tensor | None:
    """What the stage before sends: `[s/T, b, d]` or `[s, b, d]`, wider under LaX; None for the
    first, which looks tokens up."""
    if stage.pre_process:
        return None
    arguments, low_rank = run.arguments, run.plan.settings.low_rank
    tp = arguments.tensor_model_parallel_size
    return torch.empty(
        arguments.seq_length // (tp if arguments.sequence_parallel else 1),
        arguments.micro_batch_size,
        arguments.hidden_size + width_between_stages(low_rank, arguments.hidden_size, tp),
        dtype=arguments.params_dtype,
        device="meta",
        requires_grad=True,
    )


def _forward(stage: GPTModel, x: Tensor | None, run: Run) -> Tensor:
    """The stage's output, on the last one the loss of every token, `[b, s]`."""
    arguments = run.arguments
    shape = arguments.micro_batch_size, arguments.seq_length
    tokens = torch.empty(shape, dtype=torch.long, device="meta")
    labels = torch.empty(shape, dtype=torch.long, device="meta")
    if x is not None:
        stage.set_input_tensor(x)
    output: Tensor = stage(tokens, tokens, None, labels=labels)
    return output


def _flash_attention(
    q: Tensor, k: Tensor, v: Tensor, *, is_causal: bool, scale: float | None, enable_gqa: bool
) -> Tensor:
    """The kernel that SDPA takes for such tensors on a CPU, and whose like it takes on a GPU. For
    the meta device it would take the one that keeps all of softmax(Q·Kᵀ)."""
    assert is_causal
    if enable_gqa:
        k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], dim=1) for t in (k, v))
    flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    out: Tensor = flash(q, k, v, is_causal=True, scale=scale)[0]
    return out
