"""The run that a checkpoint comes from, read before anything is built."""

from __future__ import annotations

import contextlib
import io
from argparse import Namespace
from dataclasses import dataclass
from pathlib import Path

TRACKER = "latest_checkpointed_iteration.txt"
TRUE_VOCABULARY = "true_vocab_size"
"""The argument in which a run leaves the number of tokens that exist for its checkpoints: Megatron
stores that of the padded rows."""
KEPT_SETTINGS = "hugging_face_settings"
"""The argument with those settings of a model's `config.json`, by their names in it, that no
argument of Megatron's keeps."""


@dataclass(frozen=True)
class StoredRun:
    """The run that a checkpoint comes from."""

    where: str
    """The flag that names the checkpoint, and its value."""
    arguments: Namespace
    """All arguments of that run, as Megatron validated them."""
    optimizer_format: str | None
    """How the state of a distributed optimizer is stored; None: it is not from one."""
    iteration: int = 0
    """Finished iterations."""
    restarts: bool = False
    """Whether a run that loads it counts from 0 again, whatever its flags."""


def stored_run(arguments: Namespace) -> StoredRun | None:
    """The run of the `torch_dist` checkpoint that `arguments`, Megatron's, say to load; None if
    they name none or none is there yet. Needs no process group.

    Raises:
        ValueError: for a checkpoint that is said to be there and is not, or cannot be read.
    """
    from megatron.training import checkpointing

    if arguments.ckpt_format not in (None, "torch_dist"):
        return None
    for flag, folder in (
        ("--load", arguments.load),
        ("--pretrained-checkpoint", arguments.pretrained_checkpoint),
    ):
        # Object stores are left to Megatron.
        if folder is None or "://" in folder:
            continue
        where = f"{flag} {folder}"
        if not _is_there(where, Path(folder), arguments.ckpt_step or None):
            continue
        try:
            with contextlib.redirect_stdout(io.StringIO()):
                state, _, release, _ = checkpointing._load_base_checkpoint(
                    folder, arguments, rank0=True
                )
        except Exception as failure:  # whatever a damaged file makes the readers raise
            raise ValueError(f"{where}: cannot be read: {failure}") from failure
        metadata = state.get("content_metadata") or {}
        return StoredRun(
            where,
            state.get("args", Namespace()),
            metadata.get("distrib_optim_sharding_type"),
            iteration=0 if release else state.get("iteration") or 0,
            restarts=release or flag == "--pretrained-checkpoint",
        )
    return None


def with_stored_arguments(arguments: Namespace) -> Namespace:
    """Parsed arguments with what Megatron's `--use-checkpoint-args` takes from the checkpoint."""
    from megatron.training.checkpointing import load_args_from_checkpoint

    with contextlib.redirect_stdout(io.StringIO()):
        load_args_from_checkpoint(arguments, load_arg="pretrained_checkpoint")
        load_args_from_checkpoint(arguments)
    return arguments


def _is_there(where: str, folder: Path, step: int | None) -> bool:
    """Whether `folder` has the checkpoint to load, in the format `torch_dist`.

    Args:
        where: the flag that names the folder, and its value, for messages.
        folder: what Megatron saved to.
        step: the iteration asked for; None: the one that the folder's tracker file names.
    """
    tracker = folder / TRACKER
    text = tracker_text(tracker).strip() if tracker.is_file() else ""
    if step is None and not tracker.is_file():
        return False
    if text == "release" and step is None:
        return (folder / "release" / "metadata.json").is_file()
    complete = _iterations(folder, "metadata.json")
    if tracker.is_file() and text != "release" and not text.isdecimal():
        raise ValueError(
            f"{where}: {TRACKER} in it names no iteration; nearest legal value: "
            f"{_nearest(complete, max(complete, default=0))}, written into that file"
        )
    wanted = int(text) if step is None else step
    if wanted in complete:
        return True
    if wanted in _iterations(folder, "mp_rank_0*"):
        return False
    asked = where if step is None else f"{where} --ckpt-step {step}"
    raise ValueError(
        f"{asked}: there is no complete checkpoint of iteration {wanted}; nearest legal value: "
        f"--ckpt-step {_nearest(complete, wanted)}"
    )


def tracker_text(tracker: Path) -> str:
    """What a tracker file says.

    Raises:
        ValueError: for a file that is no text.
    """
    try:
        return tracker.read_text(encoding="utf-8")
    except UnicodeDecodeError as failure:
        raise ValueError(
            f"{tracker}: names no iteration, it is no UTF-8 text; nearest legal value: the number "
            "of a complete one, written into that file"
        ) from failure


def _iterations(folder: Path, holding: str) -> list[int]:
    """The iterations of which `folder` has a checkpoint with a file or folder of that name."""
    names = [path.parent.name.removeprefix("iter_") for path in folder.glob(f"iter_*/{holding}")]
    return [int(name) for name in names if name.isdecimal()]


def _nearest(complete: list[int], wanted: int) -> str:
    if not complete:
        return "(none is complete)"
    return str(min(complete, key=lambda iteration: abs(iteration - wanted)))
