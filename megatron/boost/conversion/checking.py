"""`--check`: the logits of source and result at every position of a sample.

One side is computed by transformers, the other by Megatron's model with the weights that Megatron's
own loader finds in the checkpoint, both in fp32 on the CPU.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from megatron.boost.conversion.checkpoint_reader import CheckpointReader
from megatron.boost.conversion.exporting import Export, load_as_transformers, transformers_model
from megatron.boost.conversion.importing import HfSource, ImportPlan
from megatron.boost.conversion.megatron_model import megatron_logits
from megatron.boost.conversion.names import hf_entries
from megatron.boost.conversion.progress import without_bars
from megatron.boost.quiet import quiet_output

if TYPE_CHECKING:
    from megatron.boost.conversion.description import ModelDescription

TOLERANCE = 1e-5
"""Of the largest difference, where logits are below 1; above, of that over the largest logit."""

_OF_ROUNDED_PRODUCTS = 32.0
"""Steps of a dtype, over the largest logit, that weights which were multiplied and then rounded to
it may change a logit by."""

_SEQUENCES, _LENGTH = 2, 64


@dataclass(frozen=True)
class Agreement:
    """How far two models' logits are apart."""

    difference: float
    """The largest absolute one."""
    position: int
    """Where in the sequence it is."""
    largest_logit: float

    def within(self, tolerance: float) -> bool:
        """Whether the difference is at most `tolerance`, a share of the largest logit above 1."""
        return self.difference <= tolerance * max(1.0, self.largest_logit)

    @property
    def agrees(self) -> bool:
        """Whether they are the same up to rounding."""
        return self.within(TOLERANCE)


def sample_tokens(description: ModelDescription) -> Tensor:
    """Tokens `[2, s]`, the same for every model of the same vocabulary and context."""
    generator = torch.Generator().manual_seed(20261130)
    shape = (_SEQUENCES, min(_LENGTH, description.max_positions))
    return torch.randint(description.vocab_size, shape, generator=generator)


def compare(value: Tensor, reference: Tensor) -> Agreement:
    """Compare logits `[b, s, vocabulary]`; a NaN counts as an infinite difference."""
    apart = (value.double() - reference.double()).abs().amax(dim=(0, 2))
    apart = torch.nan_to_num(apart, nan=torch.inf)
    return Agreement(float(apart.max()), int(apart.argmax()), float(reference.abs().max()))


@torch.no_grad()
def source_logits(source: HfSource, tokens: Tensor) -> Tensor:
    """Logits of a Hugging Face folder, by transformers in fp32."""
    if source.family == "llama":
        from transformers import AutoModelForCausalLM

        model = AutoModelForCausalLM.from_pretrained(
            source.reader.folder,
            dtype=torch.float32,
            local_files_only=True,
            use_safetensors=not source.reader.trust_pickle or None,
        )
    else:
        # transformers has no code for these names; the layers are those of an export.
        tensors = {
            entry.name: source.tensor(entry.canonical[0])
            for entry in hf_entries(source.description)
        }
        model = transformers_model(source.description, tensors, torch.float32)
    logits: Tensor = model.eval()(tokens).logits
    return logits


@contextmanager
def _quiet_libraries() -> Iterator[None]:
    """Context without the notices of Megatron and torch and the progress bars of transformers."""
    with without_bars(), quiet_output(Path(os.devnull)):
        yield


def check_import(plan: ImportPlan, checkpoint: Path) -> Agreement:
    """Compare a new checkpoint with its source, or where it is another function by intent (a
    truncated model) with what transformers makes of the checkpoint.

    Returns:
        how far the checkpoint is from the source.

    Raises:
        ValueError: for a difference above rounding.
    """
    tokens = sample_tokens(plan.description)
    with _quiet_libraries():
        result = megatron_logits(CheckpointReader(checkpoint), tokens)
        to_source = compare(result, source_logits(plan.source, tokens))
    if plan.exact:
        _refuse_difference(to_source, "the checkpoint", "its source")
    else:
        with torch.no_grad():
            again = load_as_transformers(checkpoint, dtype=torch.float32)(tokens).logits
        _refuse_difference(compare(result, again), "the checkpoint", "the model in transformers")
    return to_source


def check_export(export: Export, folder: Path) -> Agreement:
    """Compare a new Hugging Face folder with the checkpoint it was made of.

    In a lower precision than the checkpoint's it is compared with the checkpoint's weights rounded
    to that precision, or where factors were multiplied, within the size of the precision.

    Returns:
        how far the export is from the checkpoint as it is.

    Raises:
        ValueError: for a difference above rounding, and for logits that are no numbers.
    """
    from transformers import AutoModelForCausalLM

    tokens = sample_tokens(export.description)
    with _quiet_libraries(), torch.no_grad():
        model = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, local_files_only=True, trust_remote_code=True
        )
        result = model.eval()(tokens).logits
        agreement = compare(result, megatron_logits(export.reader, tokens))
        if export.exact:
            _refuse_difference(agreement, "the export", "the checkpoint")
            return agreement
        if not result.isfinite().all():
            raise ValueError(
                "--check: logits of the export are infinite or no numbers; nothing was written"
            )
        dtype = export.description.dtype
        if export.merged:
            tolerance = _OF_ROUNDED_PRODUCTS * torch.finfo(dtype).eps
            _refuse_difference(agreement, "the export", "the checkpoint", tolerance)
        else:
            to_rounded = compare(result, megatron_logits(export.reader, tokens, export.dtype))
            _refuse_difference(to_rounded, "the export", f"the checkpoint rounded to {dtype}")
    return agreement


def _refuse_difference(
    agreement: Agreement, result: str, source: str, tolerance: float = TOLERANCE
) -> None:
    if not agreement.within(tolerance):
        raise ValueError(
            f"--check: the logits of {result} differ from those of {source} by "
            f"{agreement.difference:.3g} at position {agreement.position} (largest logit "
            f"{agreement.largest_logit:.3g}); nothing was written"
        )
