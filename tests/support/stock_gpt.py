"""Upstream's own GPT, trained by upstream's `pretrain()` on its mock data: the smallest script.

What Megatron on CPU is tested with: nothing of BOOST takes part but `megatron_on_cpu()` and the
patches. A rank's function is `train_stock_gpt`; its result is every logged value of the run.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any
from unittest import mock

import torch

from megatron.boost.cpu import megatron_on_cpu, with_cpu_flags
from megatron.boost.patches import all_patches

MODEL_FLAGS = (
    "--num-layers 2 --hidden-size 32 --ffn-hidden-size 64 --num-attention-heads 4 "
    "--seq-length 32 --max-position-embeddings 32 --normalization RMSNorm --swiglu "
    "--position-embedding-type rope --disable-bias-linear --untie-embeddings-and-output-weights "
    "--attention-dropout 0 --hidden-dropout 0 --init-method-std 0.2 --seed 1234"
).split()
DATA_FLAGS = (
    "--mock-data --tokenizer-type NullTokenizer --vocab-size 127 --make-vocab-size-divisible-by 16 "
    "--split 90,10,0 --num-workers 0"
).split()
TRAINING_FLAGS = (
    "--micro-batch-size 2 --global-batch-size 4 --train-iters 4 --lr 1e-2 --min-lr 1e-3 "
    "--lr-decay-style constant --log-interval 1 --eval-interval 1000 --eval-iters 1"
).split()


History = dict[str, list[float]]


def train_stock_gpt(flags: Sequence[str] = (), without: Sequence[str] = ()) -> History:
    """Trains on this rank and returns what `train_step` returned, by name and iteration.

    Args:
        flags: Megatron's, after those above; of a flag given twice the last counts.
        without: patches to leave out, of those that upstream needs on every device.

    Returns:
        "loss" (on the last pipeline stage only) and "grad_norm" of each iteration.
    """
    argv = with_cpu_flags([*MODEL_FLAGS, *DATA_FLAGS, *TRAINING_FLAGS, *flags])
    with ExitStack() as stack:
        stack.enter_context(megatron_on_cpu())
        for patch in all_patches():
            if patch.needs == "always" and patch.name not in without:
                stack.enter_context(patch.apply())
        stack.enter_context(mock.patch.object(sys, "argv", ["stock_gpt", *argv]))
        return _pretrain()


def _pretrain() -> History:
    from megatron.core.enums import ModelType
    from megatron.training import pretrain, training
    from megatron.training.argument_utils import (
        gpt_config_from_args,
        pretrain_cfg_container_from_args,
    )
    from megatron.training.arguments import parse_and_validate_args

    args = parse_and_validate_args()
    container = pretrain_cfg_container_from_args(args, gpt_config_from_args(args))
    history: History = {"loss": [], "grad_norm": []}
    upstream_step = training.train_step

    def recording_step(*positional: Any, **named: Any) -> Any:
        result = upstream_step(*positional, **named)
        losses, grad_norm = result[0], result[5]
        history["loss"] += [float(loss) for loss in losses.values()]
        history["grad_norm"].append(float(grad_norm))
        return result

    with mock.patch.object(training, "train_step", recording_step):
        pretrain(container, _provide_datasets, ModelType.encoder_or_decoder, _forward_step)
    return history


def _provide_datasets(num_samples: list[int], vp_stage: int | None = None) -> Any:
    from megatron.core.datasets.blended_megatron_dataset_builder import (
        BlendedMegatronDatasetBuilder,
    )
    from megatron.core.datasets.gpt_dataset import GPTDatasetConfig, MockGPTDataset
    from megatron.core.tokenizers.utils.build_tokenizer import build_tokenizer
    from megatron.training import get_args

    args = get_args()
    config = GPTDatasetConfig(
        random_seed=args.seed,
        sequence_length=args.seq_length,
        split=args.split,
        tokenizer=build_tokenizer(args),
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        mid_level_dataset_surplus=args.mid_level_dataset_surplus,
    )
    return BlendedMegatronDatasetBuilder(MockGPTDataset, num_samples, lambda: True, config).build()


# Every rank reads the data itself.
_provide_datasets.is_distributed = True  # type: ignore[attr-defined]


def _forward_step(batches: Iterator[dict[str, torch.Tensor]], model: torch.nn.Module) -> Any:
    batch = {name: value.cuda() for name, value in next(batches).items()}
    losses = model(
        batch["tokens"], batch["position_ids"], batch["attention_mask"], labels=batch["labels"]
    )
    return losses, partial(_loss, batch["loss_mask"])


def _loss(loss_mask: torch.Tensor, losses: torch.Tensor) -> Any:
    loss = torch.sum(losses.view(-1).float() * loss_mask.view(-1))
    tokens = loss_mask.sum().to(torch.int)
    return loss, tokens, {"lm loss": torch.stack([loss.detach(), tokens.to(loss.dtype)])}
