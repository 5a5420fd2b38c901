"""A whole training run of ours on the ranks of a test, without starting an interpreter for it."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch import Tensor, distributed

from megatron.boost.cpu import megatron_on_cpu, with_cpu_flags
from megatron.boost.patches import apply_always
from megatron.boost.recipes.meta_rank import canonical_name
from tests.support.distributed import run_ranks
from tests.support.training_state import rank_state

MODEL = (
    "--num-layers 2 --hidden-size 32 --ffn-hidden-size 48 --num-attention-heads 4 "
    "--seq-length 32 --max-position-embeddings 32 --normalization RMSNorm --swiglu "
    "--position-embedding-type rope --disable-bias-linear --untie-embeddings-and-output-weights "
    "--init-method-std 0.2 --seed 1234"
).split()
TIED_MODEL = [flag for flag in MODEL if flag != "--untie-embeddings-and-output-weights"]
DATA = (
    "--mock-data --tokenizer-type NullTokenizer --vocab-size 100 --make-vocab-size-divisible-by 48 "
    "--split 90,10,0 --num-workers 0"
).split()
"""The vocabulary is padded, and at TP 2 (to 192 rows) more than at TP 1 (to 144)."""
TRAINING = (
    "--micro-batch-size 2 --global-batch-size 4 --train-iters 4 --lr 1e-2 --min-lr 1e-3 "
    "--lr-decay-style constant --log-interval 1 --eval-interval 1000 --eval-iters 1"
).split()


@dataclass(frozen=True)
class Shard:
    """One rank's part of a parameter, cut along `axis` (None: the rank holds all of it)."""

    tensor: Tensor
    axis: int | None
    tp_rank: int


def train(flags: str, world_size: int = 1, before: Callable[[], Any] | None = None) -> list[Any]:
    """`train_here` on `world_size` fresh ranks; its results by rank."""
    return run_ranks(train_here, world_size, flags.split(), before, init_process_group=False)


def train_in_turn(runs: Sequence[str], **more: Any) -> list[dict[str, Any]]:
    """On a rank that has no world yet: one run after the other in this process, each in a world of
    its own, which spares all but the first what a process has to do once.

    Args:
        runs: the flags of each.
        more: as for `train_here`.
    """
    port, rank, size = (int(os.environ[name]) for name in ("MASTER_PORT", "RANK", "WORLD_SIZE"))
    store = distributed.TCPStore(os.environ["MASTER_ADDR"], port, is_master=False)
    results = []
    for number, flags in enumerate(runs):
        distributed.init_process_group(
            "gloo",
            store=distributed.PrefixStore(f"run {number}", store),
            rank=rank,
            world_size=size,
        )
        results.append(train_here(flags.split(), **more))
        forget_run()
        distributed.destroy_process_group()
    return results


def forget_run() -> None:
    """Destroys what a run leaves in Megatron's globals, so that another one can start."""
    from megatron.core import num_microbatches_calculator, parallel_state, rerun_state_machine
    from megatron.training import global_vars

    parallel_state.destroy_model_parallel()
    num_microbatches_calculator.destroy_num_microbatches_calculator()
    rerun_state_machine.destroy_rerun_state_machine()
    global_vars.destroy_global_vars()


def train_here(
    flags: Sequence[str],
    before: Callable[[], Any] | None = None,
    model: Sequence[str] = MODEL,
    with_state: bool = False,
) -> dict[str, Any]:
    """Trains on this rank as `pretrain_gpt.py` would.

    Args:
        flags: Megatron's and ours, after those above; of a flag given twice the last counts.
        before: called with Megatron ready for the CPU; what it returns is a context for the run.
        model: the flags that describe the model.
        with_state: whether to return "loaded" and "trained".

    Returns:
        by iteration "loss" (on the last pipeline stage) and "grad_norm", both as `train_step` gave
        them, and "exact_grad_norm", computed in fp64; "sample_ids" of the training set in the
        order read; "weights" after the run, a `Shard` by canonical name; "vocab_size", the number
        of tokens that exist; "loaded" and "trained", the `RankState` before the first and after the
        last iteration.
    """
    argv = with_cpu_flags([*model, *DATA, *TRAINING, *flags])
    with ExitStack() as stack:
        stack.enter_context(megatron_on_cpu())
        stack.enter_context(apply_always())
        from megatron.core.optimizer import optimizer
        from megatron.training import training as upstream

        from megatron.boost import training
        from megatron.boost.builder import true_vocabulary

        if before is not None:
            stack.enter_context(before())
        history: dict[str, Any] = {"loss": [], "grad_norm": [], "exact_grad_norm": []}
        upstream_step, setup = upstream.train_step, upstream.setup_model_and_optimizer
        models: list[Any] = []
        optimizers: list[Any] = []

        def recording_step(*positional: Any, **named: Any) -> Any:
            result = upstream_step(*positional, **named)
            history["loss"] += [float(loss) for loss in result[0].values()]
            history["grad_norm"].append(float(result[5]))
            return result

        def keeping_setup(*positional: Any, **named: Any) -> Any:
            result = setup(*positional, **named)
            models.extend(result[0])
            optimizers.append(result[1])
            if with_state:
                history["loaded"] = rank_state(models, optimizers[0])
            return result

        def exact_norm(grads: Any, norm_type: float = 2, **named: Any) -> float:
            history["exact_grad_norm"].append(_norm_in_fp64(grads, **named))
            return upstream_norm(grads, norm_type, **named)

        upstream_norm = optimizer.get_grad_norm_fp32
        for owner, name, value in (
            (upstream, "train_step", recording_step),
            (upstream, "setup_model_and_optimizer", keeping_setup),
            (optimizer, "get_grad_norm_fp32", exact_norm),
        ):
            stack.enter_context(mock.patch.object(owner, name, value))
        history["sample_ids"] = stack.enter_context(_recorded_sample_ids())
        plan = training.configure(argv)
        training.train(plan)
        history["weights"] = _weights(models)
        if with_state:
            history["trained"] = rank_state(models, optimizers[0])
        history["vocab_size"] = true_vocabulary(plan.settings.megatron)
        return history


def losses(results: Sequence[dict[str, Any]]) -> list[float]:
    """The run's losses by iteration; only the last stage of a pipeline knows them."""
    known: list[float] = results[-1]["loss"]
    return known


def whole_weights(results: Sequence[dict[str, Any]]) -> dict[str, Tensor]:
    """The run's whole weights by canonical name, put together from all ranks' shards, without the
    rows of tokens that do not exist.

    Raises:
        AssertionError: if ranks that must hold the same values do not, bit by bit.
    """
    parts: dict[str, dict[int, Shard]] = {}
    for result in results:
        for name, shard in result["weights"].items():
            slot = 0 if shard.axis is None else shard.tp_rank
            known = parts.setdefault(name, {}).setdefault(slot, shard)
            assert torch.equal(known.tensor, shard.tensor), f"ranks differ in {name}"
    whole = {}
    for name, shards in parts.items():
        ordered = [shards[rank].tensor for rank in sorted(shards)]
        axis = shards[0].axis
        whole[name] = ordered[0] if axis is None else torch.cat(ordered, dim=axis)
        if name.endswith(("word_embeddings.weight", "output_layer.weight")):
            whole[name] = whole[name][: results[0]["vocab_size"]]
    return whole


def relative_difference(value: Sequence[float], reference: Sequence[float]) -> float:
    """The largest |a − b|/|b| of two equally long series."""
    return max(abs(a - b) / abs(b) for a, b in zip(value, reference, strict=True))


def relative_distance(value: Sequence[float], reference: Sequence[float]) -> float:
    """‖a − b‖/‖b‖ of two equally long series."""
    a, b = (torch.tensor(series, dtype=torch.float64) for series in (value, reference))
    assert a.shape == b.shape
    return float((a - b).norm() / b.norm())


def weight_differences(value: dict[str, Tensor], reference: dict[str, Tensor]) -> dict[str, float]:
    """‖a − b‖/‖b‖ of each weight, in fp64; both must have the same names and shapes."""
    assert value.keys() == reference.keys()
    return {
        name: float(
            (value[name].double() - reference[name].double()).norm()
            / reference[name].double().norm()
        )
        for name in reference
    }


def _weights(models: Iterable[torch.nn.Module]) -> dict[str, Shard]:
    from megatron.core import parallel_state

    tp_rank = parallel_state.get_tensor_model_parallel_rank()
    weights = {}
    for model in models:
        for name, parameter in model.named_parameters():
            sharded = getattr(parameter, "tensor_model_parallel", False)
            axis = parameter.partition_dim if sharded else None
            weights[canonical_name(model, name)] = Shard(parameter.detach().clone(), axis, tp_rank)
    return weights


def _norm_in_fp64(grads: list[Tensor], grad_stats_parallel_group: Any = None) -> float:
    """What `get_grad_norm_fp32` computes, without its rounding: torch's fp32 norm on CPU is off by
    some 5e-6."""
    squares = torch.zeros(1, dtype=torch.float64)
    for grad in grads:
        squares += grad.double().square().sum()
    distributed.all_reduce(squares, group=grad_stats_parallel_group)
    return float(squares.sqrt())


@contextmanager
def _recorded_sample_ids() -> Iterator[list[int]]:
    """Context with the list of the training samples that are read on this rank."""
    from megatron.core.datasets.gpt_dataset import GPTDataset
    from megatron.core.datasets.utils import Split

    ids: list[int] = []
    upstream = GPTDataset.__getitem__

    def recording(dataset: Any, index: int | None) -> Any:
        if dataset.index_split == Split.train and index is not None:
            ids.append(int(index))
        return upstream(dataset, index)

    with mock.patch.object(GPTDataset, "__getitem__", recording):
        yield ids
