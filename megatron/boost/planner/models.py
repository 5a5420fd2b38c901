"""The models that `tools/plan.py --model` names, and those it reads from a file."""

from __future__ import annotations

import difflib
import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from boost_layers.config import LowRankConfig
from megatron.boost.accounting.sizes import Model
from megatron.boost.recipes.table import table_rows

if TYPE_CHECKING:
    from megatron.boost.conversion.description import ModelDescription

_LLAMA2_VOCABULARY = 32000
_ROWS_PER_RANK = 128
"""Megatron's `--make-vocab-size-divisible-by`, for each tensor-parallel rank."""


@dataclass(frozen=True)
class Size:
    """A LLaMA-2 model."""

    hidden: int
    ffn: int
    heads: int
    layers: int
    rank: int
    """That the published runs have."""


SIZES = {name: Size(*map(int, numbers)) for name, *numbers, _ in table_rows("model")}
"""Those of the recipes."""


def model_of_size(size: Size, low_rank: LowRankConfig, *, tied: bool) -> Model:
    """A LLaMA-2 model, its vocabulary not padded yet."""
    return Model(
        hidden_size=size.hidden,
        ffn_hidden_size=size.ffn,
        num_attention_heads=size.heads,
        num_query_groups=size.heads,
        kv_channels=size.hidden // size.heads,
        num_layers=size.layers,
        vocab_size=_LLAMA2_VOCABULARY,
        padded_vocab_size=_LLAMA2_VOCABULARY,
        tied=tied,
        low_rank=low_rank,
    )


def load_model(name: str, low_rank: LowRankConfig) -> Model:
    """A size by its name, untied as the recipes are; or the `config.json` of a Hugging Face LLaMA,
    or the folder that it lies in.

    Raises:
        ValueError: for a name that is neither, and a configuration that is not LLaMA's.
    """
    if name in SIZES:
        return model_of_size(SIZES[name], low_rank, tied=False)
    description = _description(name)
    return Model(
        hidden_size=description.hidden_size,
        ffn_hidden_size=description.ffn_hidden_size,
        num_attention_heads=description.num_heads,
        num_query_groups=description.num_kv_heads,
        kv_channels=description.head_dim,
        num_layers=description.num_layers,
        vocab_size=description.vocab_size,
        padded_vocab_size=description.vocab_size,
        tied=description.tied,
        low_rank=low_rank,
    )


def function_flags(name: str) -> tuple[str, ...]:
    """The training flags for what costs nothing but makes another model: norm and rotary embedding
    of a configuration; none for a size, whose recipe decides."""
    if name in SIZES:
        return ()
    description = _description(name)
    rope = description.rope
    flags = ["--norm-epsilon", f"{description.norm_eps:g}", "--rotary-base", f"{rope.theta:.0f}"]
    if rope.kind == "linear":
        flags += ["--rotary-seq-len-interpolation-factor", f"{rope.factor:.0f}"]
    if rope.kind == "llama3":
        flags += ["--use-rope-scaling", "--rope-scaling-factor", f"{rope.factor:g}"]
    return tuple(flags)


def _description(name: str) -> ModelDescription:
    path = Path(name) / "config.json" if Path(name).is_dir() else Path(name)
    if not path.is_file():
        near = difflib.get_close_matches(name.upper(), SIZES, n=1, cutoff=0.0)[0]
        raise ValueError(
            f"--model {name}: neither one of {', '.join(SIZES)} nor a config.json of Hugging Face; "
            f"nearest legal value: {near}"
        )
    # Not at the top: it takes torch and transformers' names with it.
    from megatron.boost.conversion.hf_config import description_from_hf

    try:
        config = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(config, dict):
            raise ValueError(f"{path} holds no JSON object")
        return description_from_hf(config)
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"--model {name}: {path} is no JSON: {error}") from None
    except ValueError as error:
        raise ValueError(f"--model {name}: {error}") from None


def padded(model: Model, tensor_parallel: int) -> Model:
    """The model with its vocabulary padded as Megatron does, to a multiple of 128·T."""
    rows = _ROWS_PER_RANK * tensor_parallel
    return replace(model, padded_vocab_size=-(-model.vocab_size // rows) * rows)
