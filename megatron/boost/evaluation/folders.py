"""The two kinds of folder that hold a model, told apart before anything is read from them."""

from __future__ import annotations

from pathlib import Path

from megatron.boost.preprocessing.inputs import why_not
from megatron.boost.stored_run import TRACKER

_CONFIG = "config.json"


def require_checkpoint(load: Path) -> None:
    """Raise ValueError unless the folder of `--load` may be one that Megatron saved to."""
    where = f"--load {load}"
    if not load.is_dir():
        raise ValueError(f"{where}: {why_not(load, 'folder')}")
    if load.name.startswith("iter_") and (load / "metadata.json").is_file():
        raise ValueError(f"{where}: is one iteration; nearest legal value: {load.parent}")
    if (load / _CONFIG).is_file():
        raise ValueError(f"{where}: is a Hugging Face folder; nearest legal value: --hf {load}")


def require_hugging_face(folder: Path) -> None:
    """Raise ValueError unless the folder of `--hf` may be one that transformers saved."""
    where = f"--hf {folder}"
    if not folder.is_dir():
        raise ValueError(f"{where}: {why_not(folder, 'folder')}")
    if (folder / TRACKER).is_file() and not (folder / _CONFIG).is_file():
        raise ValueError(f"{where}: is a Megatron checkpoint; nearest legal value: --load {folder}")
    if not (folder / _CONFIG).is_file():
        raise ValueError(
            f"{where}: has no {_CONFIG}; it wants what save_pretrained or an export wrote"
        )
