"""How many tokens a run's model has: what its checkpoint says comes before what the tokenizer says.

The vocabulary of many a model has more rows than its tokenizer has tokens. Megatron sizes a model
by its tokenizer and would leave the other rows behind.
"""

from __future__ import annotations

import math
from argparse import Namespace
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from megatron.boost.conversion.tokenizer_files import TOKENIZER_FOLDER
from megatron.boost.flags import is_given
from megatron.boost.preprocessing.inputs import nearest_path
from megatron.boost.stored_run import KEPT_SETTINGS, TRUE_VOCABULARY, StoredRun


def padding_flags(argv: Sequence[str], arguments: Namespace, stored: Namespace) -> list[str]:
    """The flags that make a run's padded vocabulary hold the checkpoint's, for
    `--use-checkpoint-args`; none where Megatron sees to it.

    Args:
        argv: the user's command line.
        arguments: the same, parsed.
        stored: the arguments that the checkpoint holds.

    Raises:
        ValueError: for a padded vocabulary of the user's that is too small.
    """
    rows = getattr(stored, TRUE_VOCABULARY, None)
    if rows is None:
        return []
    of_checkpoint = arguments.use_mp_args_from_checkpoint_args
    tp = (stored if of_checkpoint else arguments).tensor_model_parallel_size
    multiple = arguments.make_vocab_size_divisible_by * tp
    enough = math.ceil(rows / multiple) * multiple
    if is_given(argv, "--padded-vocab-size"):
        if arguments.padded_vocab_size < rows:
            raise ValueError(
                f"--padded-vocab-size {arguments.padded_vocab_size}: the checkpoint's model has "
                f"{rows} tokens; nearest legal value: {enough}"
            )
        return []
    before = getattr(stored, "padded_vocab_size", None)
    if before is not None and before >= rows and before % tp == 0:
        return []
    return ["--padded-vocab-size", str(enough)]


def require_tokenizer(arguments: Namespace) -> list[str]:
    """See that a run's tokenizer is there, before Megatron looks for it in a network on all ranks.

    Args:
        arguments: parsed, with what the checkpoint says under `--use-checkpoint-args`.

    Returns:
        a line for a tokenizer that is no folder, and may have its name from the hub.

    Raises:
        ValueError: for a tokenizer that neither the command line nor the checkpoint names, and for
            one whose folder is gone.
    """
    model = arguments.tokenizer_model
    load = arguments.load or arguments.pretrained_checkpoint
    # Megatron's default, GPT-2's, is fetched by this package.
    fetched = find_spec("wget") is not None and not arguments.use_checkpoint_args
    if arguments.tokenizer_type is None and arguments.vocab_file is None and not fetched:
        also = f", and the checkpoint {load} has no tokenizer" if load else ""
        raise ValueError(
            f"--tokenizer-type: is missing{also}; nearest legal value: --tokenizer-type "
            f"HuggingFaceTokenizer with --tokenizer-model {model or 'FOLDER'}, or NullTokenizer "
            "with --vocab-size for --mock-data"
        )
    if arguments.tokenizer_type != "HuggingFaceTokenizer" or model is None or Path(model).exists():
        return []
    if Path(model).is_absolute() or model.startswith((".", "~")) or model.count("/") > 1:
        beside = Path(load or "") / TOKENIZER_FOLDER
        near = f"; nearest legal value: {beside}" if beside.is_dir() else nearest_path(Path(model))
        raise ValueError(f"--tokenizer-model {model}: there is no such folder{near}")
    return [
        f"--tokenizer-model {model}: no folder here, so transformers looks for that name on its hub"
    ]


def keep_vocabulary(run: StoredRun, arguments: Namespace, tokens: int) -> list[str]:
    """Leave in a run's arguments what its checkpoints take over from the one that is loaded: the
    number of tokens, and the settings that no argument of Megatron's keeps.

    Args:
        run: the checkpoint's.
        arguments: this run's, validated; changed.
        tokens: the tokenizer's number of them.

    Returns:
        the lines that say so where the tokenizer's number is another.

    Raises:
        ValueError: for a tokenizer with more tokens than the model, and without
            `--use-checkpoint-args` for one with fewer.
    """
    settings = getattr(run.arguments, KEPT_SETTINGS, None)
    if settings is not None:
        setattr(arguments, KEPT_SETTINGS, settings)
    rows = getattr(run.arguments, TRUE_VOCABULARY, None)
    if rows is None:
        return []
    shown = _tokenizer_flag(arguments)
    if tokens > rows:
        raise ValueError(
            f"{shown}: has {tokens} tokens, but the model of {run.where} has {rows}; nearest "
            "legal value: the tokenizer that the model was trained with"
        )
    if tokens < rows and not arguments.use_checkpoint_args:
        raise ValueError(
            f"{shown}: has {tokens} tokens, but the model of {run.where} has {rows}; nearest "
            f"legal value: add --use-checkpoint-args, which keeps all {rows}"
        )
    setattr(arguments, TRUE_VOCABULARY, rows)
    if tokens == rows:
        return []
    return [f"vocabulary: the model's {rows} tokens, of which the tokenizer has {tokens}"]


def _tokenizer_flag(arguments: Namespace) -> str:
    """The flag that decides the number of tokens, and its value."""
    if arguments.tokenizer_model is not None:
        return f"--tokenizer-model {arguments.tokenizer_model}"
    if arguments.vocab_size is not None:
        return f"--vocab-size {arguments.vocab_size}"
    return f"--tokenizer-type {arguments.tokenizer_type}"
