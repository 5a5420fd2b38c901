"""The tokenizer that belongs to a model."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path
from typing import TYPE_CHECKING

from megatron.boost.conversion.tokenizer_files import TOKENIZER_FOLDER, has_tokenizer
from megatron.boost.preprocessing.encoding import load_tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def tokenizer_of_checkpoint(
    load: Path, stored: Namespace, given: str | None
) -> PreTrainedTokenizerBase | None:
    """The tokenizer of a Megatron checkpoint; None if it has none that can be found here.

    Args:
        load: the folder of `--load`.
        stored: the arguments in the checkpoint.
        given: the value of `--tokenizer-model`, which comes before the checkpoint's own.

    Raises:
        ValueError: for one that is said to be there and is not.
    """
    if given is not None:
        return load_tokenizer(given)
    if has_tokenizer(load / TOKENIZER_FOLDER):
        return load_tokenizer(str(load / TOKENIZER_FOLDER))
    model = getattr(stored, "tokenizer_model", None)
    of_hugging_face = getattr(stored, "tokenizer_type", None) == "HuggingFaceTokenizer"
    # A name on the hub is left alone: evaluation asks no network for anything.
    if model is None or not of_hugging_face or not Path(model).exists():
        return None
    return load_tokenizer(str(model))


def tokenizer_of_folder(folder: Path, given: str | None) -> PreTrainedTokenizerBase | None:
    """The tokenizer of a Hugging Face folder; None if it has none.

    Args:
        folder: the folder of `--hf`.
        given: the value of `--tokenizer-model`, which comes before the folder's own.

    Raises:
        ValueError: for one that cannot be loaded.
    """
    if given is not None:
        return load_tokenizer(given)
    if not has_tokenizer(folder):
        return None
    return load_tokenizer(str(folder))


def required(
    tokenizer: PreTrainedTokenizerBase | None, where: str, what: str
) -> PreTrainedTokenizerBase:
    """`tokenizer`, which is needed.

    Args:
        tokenizer: what was found.
        where: the flag that names the model, and its value.
        what: the flag that needs it.

    Raises:
        ValueError: if it is None.
    """
    if tokenizer is None:
        raise ValueError(
            f"{what}: needs a tokenizer, and {where} has none; nearest legal value: add "
            "--tokenizer-model with the folder of the one that the model was trained with"
        )
    return tokenizer


def beginning(tokenizer: PreTrainedTokenizerBase | None) -> int | None:
    """The token that is read before a text whose first token is to be predicted: BOS, or EOS where
    there is no BOS, or none."""
    if tokenizer is None:
        return None
    bos, eos = tokenizer.bos_token_id, tokenizer.eos_token_id
    return bos if bos is not None else eos
