"""The model of a Megatron checkpoint as one of transformers, in memory."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import torch

from megatron.boost.conversion.checkpoint_reader import CheckpointReader
from megatron.boost.conversion.exporting import load_as_transformers
from megatron.boost.evaluation.folders import require_checkpoint
from megatron.boost.evaluation.of_hugging_face import quiet_transformers
from megatron.boost.evaluation.tokenizers import tokenizer_of_checkpoint

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


def load_checkpoint(
    load: Path, step: int | None, *, dtype: torch.dtype | None, device: torch.device
) -> PreTrainedModel:
    """The model of a checkpoint, for inference; no process group is needed.

    Args:
        load: the folder of `--load`.
        step: the iteration of `--ckpt-step`; None: the last one that was saved.
        dtype: of the weights; None: as they are stored.
        device: where to.

    Raises:
        ValueError: if there is no such checkpoint, or it cannot be read.
    """
    with quiet_transformers():
        return load_as_transformers(load, dtype=dtype, device=device, step=step)


def tokenizer_in_checkpoint(
    load: Path, step: int | None, given: str | None
) -> PreTrainedTokenizerBase | None:
    """The tokenizer of a checkpoint; see `tokenizer_of_checkpoint`, which this asks.

    Raises:
        ValueError: if there is no such checkpoint, or its tokenizer is not where it should be.
    """
    require_checkpoint(load)
    try:
        stored = CheckpointReader(load, step).arguments
    except ValueError as refusal:
        raise ValueError(f"--load {load}: {refusal}") from refusal
    return tokenizer_of_checkpoint(load, stored, given)
