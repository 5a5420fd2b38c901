"""The files of a tokenizer and of the generation settings that travel with a model."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

GENERATION = "generation_config.json"
TOKENIZER_FOLDER = "tokenizer"
"""Where a checkpoint that was converted keeps its tokenizer, below the folder of `--load`."""

_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
)
_VOCABULARIES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt")


def has_tokenizer(folder: Path) -> bool:
    """Whether `folder` holds a tokenizer's vocabulary."""
    return any((folder / name).is_file() for name in _VOCABULARIES)


def copy_tokenizer(source: Path, target: Path) -> list[str]:
    """Copy the tokenizer's files and the generation settings that `source` has, byte for byte.

    Returns:
        the names of the files copied; none if there are none, and then no folder is made.
    """
    copied = []
    for name in (*_FILES, GENERATION):
        if (source / name).is_file():
            target.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source / name, target / name)
            copied.append(name)
    return copied


def token_count(folder: Path) -> int | None:
    """The tokens of the tokenizer in `folder`, added ones included; None if there is none that can
    be counted."""
    if not has_tokenizer(folder):
        return None
    if (folder / "tokenizer.json").is_file():
        from tokenizers import Tokenizer

        # An added token may leave a gap, and an id is a row.
        vocabulary = Tokenizer.from_file(str(folder / "tokenizer.json")).get_vocab(True)
        return max(vocabulary.values()) + 1
    from transformers import AutoTokenizer

    return len(AutoTokenizer.from_pretrained(folder, local_files_only=True))


def refuse_unusable(folder: Path) -> None:
    """Raise ValueError for the value of `--tokenizer` if it is no folder with a tokenizer that can
    be read."""
    if not folder.is_dir():
        raise ValueError(f"--tokenizer {folder}: there is no such folder")
    if not has_tokenizer(folder):
        raise ValueError(
            f"--tokenizer {folder}: has no tokenizer ({', '.join(_VOCABULARIES)}); "
            "nearest legal value: a folder with one of these files"
        )
    try:
        token_count(folder)
    except Exception as failure:  # the tokenizers library raises plain ones
        reason = str(failure).partition("\n")[0]
        raise ValueError(f"--tokenizer {folder}: cannot be read ({reason})") from failure


def special_tokens(folder: Path, *, generation_only: bool = False) -> dict[str, Any]:
    """`bos_token_id`, `eos_token_id` and `pad_token_id` as far as the generation settings or, where
    these say nothing, the tokenizer in `folder` say.

    Args:
        folder: with the settings, a tokenizer, both or neither.
        generation_only: whether to leave the tokenizer unasked.
    """
    names = ("bos_token_id", "eos_token_id", "pad_token_id")
    if (folder / GENERATION).is_file():
        settings = json.loads((folder / GENERATION).read_text(encoding="utf-8"))
        known = {name: settings[name] for name in names if settings.get(name) is not None}
        if known:
            return known
    if generation_only or not has_tokenizer(folder):
        return {}
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    found = {name: getattr(tokenizer, name) for name in names}
    return {name: value for name, value in found.items() if value is not None}
