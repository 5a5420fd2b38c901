"""Scoring windows with a model of transformers, alone or shared out over data-parallel ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F

from megatron.boost.evaluation.folders import require_hugging_face
from megatron.boost.evaluation.windows import batches

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from megatron.boost.evaluation.tokens import TokenStream
    from megatron.boost.evaluation.windows import Window


def read_config(folder: Path, trust_remote_code: bool) -> Any:
    """The configuration in a Hugging Face folder; loads no weights.

    Args:
        folder: of `--hf`.
        trust_remote_code: whether code that the folder brings may be run.

    Raises:
        ValueError: if that is no such folder, or it brings code that is not trusted.
    """
    from transformers import AutoConfig
    from transformers.configuration_utils import PretrainedConfig

    where = f"--hf {folder}"
    require_hugging_face(folder)
    try:
        values, _ = PretrainedConfig.get_config_dict(str(folder), local_files_only=True)
        if "auto_map" in values and not trust_remote_code:
            files = sorted(file.name for file in folder.glob("*.py"))
            raise ValueError(
                f"{where}: brings code of its own ({', '.join(files) or 'elsewhere'}); nearest "
                "legal value: add --trust-remote-code, once you have read it"
            )
        return AutoConfig.from_pretrained(
            folder, trust_remote_code=trust_remote_code, local_files_only=True
        )
    except ValueError as refusal:
        if str(refusal).startswith(where):
            raise
        raise ValueError(f"{where}: {refusal}") from refusal
    except OSError as failure:
        raise ValueError(f"{where}: {failure}") from failure


def load_folder(
    folder: Path, *, dtype: torch.dtype | None, device: torch.device, trust_remote_code: bool
) -> PreTrainedModel:
    """The model in a Hugging Face folder, for inference.

    Args:
        folder: of `--hf`.
        dtype: of the weights; None: as they are stored.
        device: where to.
        trust_remote_code: whether code that the folder brings may be run.

    Raises:
        ValueError: if there is no causal language model, or some of its weights are missing.
    """
    from transformers import AutoModelForCausalLM

    read_config(folder, trust_remote_code)
    where = f"--hf {folder}"
    with quiet_transformers():
        try:
            model, report = AutoModelForCausalLM.from_pretrained(
                folder,
                dtype=dtype if dtype is not None else "auto",
                trust_remote_code=trust_remote_code,
                local_files_only=True,
                output_loading_info=True,
            )
        except Exception as failure:  # safetensors and pickle have errors of their own
            raise ValueError(f"{where}: cannot be loaded: {failure}") from failure
    missing = sorted(report["missing_keys"]) + sorted(map(str, report["mismatched_keys"]))
    if missing:
        # transformers would draw these at random, and only warn.
        raise ValueError(
            f"{where}: lacks {len(missing)} of the model's tensors, {missing[0]} first"
        )
    loaded: PreTrainedModel = model.to(device)
    return loaded.eval()


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Context without transformers' progress bars and warnings."""
    from transformers.utils import logging

    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()


@torch.inference_mode()
def nats_of_windows(
    model: PreTrainedModel,
    stream: TokenStream,
    windows: Sequence[Window],
    rows: int,
    on_window: Callable[[int], None] = lambda count: None,
) -> tuple[float, int]:
    """The sum of −ln p over the scored tokens of windows, and their number.

    Args:
        model: a causal language model, on its device.
        stream: the tokens that the windows are cut from.
        windows: those to score.
        rows: windows in a batch; logits `[rows, s, V]` are held in fp32.
        on_window: told after each batch how many windows it had.
    """
    total, tokens = 0.0, 0
    for batch in batches(windows, stream, rows, None):
        # Padding stands behind the tokens, which do not see what follows: no mask is needed.
        logits = model(input_ids=batch.tokens.to(model.device), use_cache=False).logits
        labels = batch.labels.to(logits.device)
        losses = F.cross_entropy(logits.float().flatten(0, 1), labels.flatten(), reduction="none")
        counted = batch.scored.flatten().to(losses.device)
        total += losses[counted].double().sum().item()
        tokens += int(batch.scored.sum())
        on_window(len(batch.tokens))
    return total, tokens
