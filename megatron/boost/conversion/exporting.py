"""A Megatron checkpoint as a Hugging Face folder, or as a transformers model in memory."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from boost_layers.config import LowRankConfig
from megatron.boost.conversion import modeling
from megatron.boost.conversion.checkpoint_reader import CheckpointReader
from megatron.boost.conversion.description import ModelDescription
from megatron.boost.conversion.hf_config import hf_from_description
from megatron.boost.conversion.hf_folder import new_hf_folder
from megatron.boost.conversion.megatron_arguments import known_vocabulary
from megatron.boost.conversion.names import Entry, hf_entries
from megatron.boost.conversion.output_folder import refuse_occupied
from megatron.boost.conversion.progress import Progress, silent, without_bars
from megatron.boost.conversion.tokenizer_files import (
    GENERATION,
    copy_tokenizer,
    has_tokenizer,
    refuse_unusable,
    special_tokens,
)

if TYPE_CHECKING:
    from transformers import PreTrainedModel

MODELING_FILES = ("configuration_boost.py", "modeling_boost.py")


@dataclass(frozen=True)
class Export:
    """What an export will write, found possible and not begun."""

    reader: CheckpointReader
    description: ModelDescription
    """Of the result."""
    merged: bool
    dtype: torch.dtype | None
    """What floating-point tensors are turned into; None: each keeps its own."""
    tokenizer: Path | None

    @cached_property
    def entries(self) -> list[Entry]:
        """The tensors of the result."""
        return hf_entries(self.description)

    @cached_property
    def _stored(self) -> frozenset[str]:
        """The canonical tensors of the checkpoint."""
        return frozenset(self.reader.description.tensors())

    def sources(self, entry: Entry) -> list[str]:
        """The canonical tensors of the checkpoint that a tensor of the result is made of."""
        (name,) = entry.canonical
        if name in self._stored:
            return [name]
        stem = name.removesuffix(".weight")
        return [f"{stem}.B", f"{stem}.A"]

    def dtype_of(self, entry: Entry) -> torch.dtype:
        """The dtype of a tensor of the result."""
        return self.dtype or self.reader.dtype(self.sources(entry)[0])

    @property
    def exact(self) -> bool:
        """Whether the result computes what the checkpoint does, up to fp32's rounding: no tensor
        loses digits."""
        for entry in self.entries:
            target, sources = self.dtype_of(entry), self.sources(entry)
            if len(sources) > 1 and target.itemsize < 4:
                return False
            if torch.promote_types(self.reader.dtype(sources[0]), target) != target:
                return False
        return True

    def tensor(self, entry: Entry) -> Tensor:
        """A tensor of the result, on the CPU. Factors are multiplied in fp32 or wider.

        Raises:
            ValueError: for a number that is infinite in the result's dtype only.
        """
        parts = [self.reader.tensor(name) for name in self.sources(entry)]
        whole = parts[0]
        if len(parts) > 1:
            wide = torch.promote_types(parts[0].dtype, torch.float32)
            whole = parts[0].to(wide) @ parts[1].to(wide)
        result = whole.to(self.dtype_of(entry))
        if result.dtype != whole.dtype:
            lost = whole.isfinite() & result.isinf()
            if lost.any():
                name = str(result.dtype).removeprefix("torch.")
                raise ValueError(
                    f"--dtype {name}: {float(whole[lost][0]):g} in {entry.name} is infinite in it; "
                    "nearest legal value: bfloat16 or float32"
                )
        return result

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """The result's tensors by name, one at a time."""
        for entry in self.entries:
            yield entry.name, self.tensor(entry)


def plan_export(
    load: Path,
    *,
    step: int | None = None,
    merge: bool = False,
    dtype: torch.dtype | None = None,
    tokenizer: Path | None = None,
    vocab_size: int | None = None,
) -> Export:
    """Read what a checkpoint holds and decide what becomes of it.

    Args:
        load: the folder that `--save` named.
        step: the iteration; None: the latest.
        merge: whether factors are multiplied back into full-rank weights.
        dtype: see `Export.dtype`.
        tokenizer: a folder with the tokenizer; None: the one that came with the checkpoint, else
            the one that its run was started with, else none.
        vocab_size: the tokens that exist, where neither checkpoint nor tokenizer says it.

    Raises:
        ValueError: for a checkpoint that cannot be read or is no LLaMA, for factors that are not
            there or cannot be merged, a folder without a usable tokenizer, and another number of
            tokens than the known one.
    """
    if tokenizer is not None:
        refuse_unusable(tokenizer)
    reader = CheckpointReader(load, step)
    if vocab_size is not None:
        _refuse_other_vocabulary(reader, vocab_size)
        reader = CheckpointReader(load, step, vocab_size)
    if merge and not reader.description.low_rank.low_rank:
        raise ValueError(
            f"--merge: the model in {load} has no factors; nearest legal value: leave --merge out"
        )
    found = tokenizer or reader.tokenizer or _tokenizer_of_run(reader)
    description = _with_special_tokens(reader, found or reader.generation)
    if dtype is not None:
        description = replace(description, dtype=dtype)
    if merge:
        description = merged_description(description)
    if not description.low_rank.low_rank and description.hidden_size % description.num_heads:
        raise ValueError(
            f"{load}: transformers' LLaMA wants a hidden size ({description.hidden_size}) that is "
            f"a multiple of the heads ({description.num_heads})"
        )
    return Export(reader, description, merge, dtype, found)


def _refuse_other_vocabulary(reader: CheckpointReader, vocab_size: int) -> None:
    """Raise ValueError for a `--vocab-size` that the checkpoint or its tokenizer contradicts."""
    known = known_vocabulary(reader.arguments, reader.tokenizer)
    if known is not None and known != vocab_size:
        raise ValueError(
            f"--vocab-size {vocab_size}: the model in {reader.root} has {known} tokens, by what is "
            f"stored with it; nearest legal value: {known}, or leave it out"
        )


def _with_special_tokens(reader: CheckpointReader, folder: Path | None) -> ModelDescription:
    """The model with the ids that its own configuration had, and where that had none, those of the
    generation settings or the tokenizer in `folder`."""
    description = reader.description
    names = ("bos_token_id", "eos_token_id", "pad_token_id")
    stated = {name: getattr(description, name) for name in names}
    known = any(value is not None for value in stated.values())
    if folder is None:
        return description
    ids = special_tokens(folder, generation_only=known)
    eos = ids.get("eos_token_id")
    if isinstance(eos, list):
        ids["eos_token_id"] = tuple(eos)
    merged: dict[str, Any] = {
        name: ids.get(name) if value is None else value for name, value in stated.items()
    }
    return replace(description, **merged)


def merged_description(description: ModelDescription) -> ModelDescription:
    """The plain LLaMA that a low-rank model is when its factors are multiplied.

    Raises:
        ValueError: where there is none, since something is computed between the factors, or gate
            and up are joined by a plain product.
    """
    low_rank = description.low_rank
    if not description.identity_activation:
        between = "a latent crossing" if low_rank.crossing else f"φ = {low_rank.activation}"
        raise ValueError(
            f"--merge: B·A is the projection only where nothing is between the factors, and "
            f"--low-rank-arch {low_rank.arch} has {between}; nearest legal value: leave --merge out"
        )
    if low_rank.mlp_kind != "swiglu":
        raise ValueError(
            f"--merge: LLaMA's MLP is SiLU(gate)·up, and this model's is {low_rank.mlp_kind}; "
            "nearest legal value: leave --merge out"
        )
    return replace(description, low_rank=LowRankConfig(arch="dense"), activation_amount=1.0)


def write_export(
    export: Export,
    hf: Path,
    *,
    max_shard_size: int,
    check: Callable[[Path], None] | None = None,
    progress: Progress = silent,
) -> int:
    """Write the folder `hf`, which is there only when all of it is.

    Args:
        export: what `plan_export` gave.
        hf: a folder that is not there yet, or empty.
        max_shard_size: bytes of a file of weights.
        check: called with the whole folder before it gets its name; what it raises ends the export.
        progress: told of every tensor.

    Returns:
        bytes of tensors written.

    Raises:
        ValueError: if `hf` is occupied.
    """
    refuse_occupied(hf)
    total = sum(
        torch.Size(entry.shape).numel() * export.dtype_of(entry).itemsize
        for entry in export.entries
    )
    with new_hf_folder(hf, max_shard_size) as writer, progress("export", total) as advance:
        config = hf_from_description(export.description)
        writer.add_json("config.json", config)
        if export.description.low_rank.low_rank:
            for name in MODELING_FILES:
                shutil.copyfile(Path(modeling.__path__[0]) / name, writer.folder / name)
        files = export.tokenizer or export.reader.generation
        copied = copy_tokenizer(files, writer.folder) if files else []
        if GENERATION not in copied:
            writer.add_json(GENERATION, _generation(config))
        for name, tensor in export.tensors():
            writer.add(name, tensor)
            advance(tensor.numel() * tensor.element_size())
            del tensor
        writer.finish()
        if check is not None:
            check(writer.folder)
    return writer.total_bytes


def load_as_transformers(
    load: Path,
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | str = "cpu",
    step: int | None = None,
) -> PreTrainedModel:
    """A checkpoint as a transformers model in memory: `LlamaForCausalLM`, or `BoostForCausalLM`
    where it is low-rank. In evaluation mode.

    Args:
        load: the folder that `--save` named.
        dtype: of all weights; None: the embedding's.
        device: where the model shall be.
        step: the iteration; None: the latest.

    Raises:
        ValueError: as `plan_export`.
    """
    export = plan_export(load, step=step)
    export = replace(export, dtype=dtype or export.description.dtype)
    model = transformers_model(export.description, dict(export.tensors()), export.dtype, device)
    folder = export.tokenizer or export.reader.generation
    if folder is not None and (folder / GENERATION).is_file():
        from transformers import GenerationConfig

        model.generation_config = GenerationConfig.from_pretrained(folder)
    return model


def transformers_model(
    description: ModelDescription,
    tensors: dict[str, Tensor],
    dtype: torch.dtype | None,
    device: torch.device | str = "cpu",
) -> PreTrainedModel:
    """A transformers model of given weights.

    Args:
        description: the model.
        tensors: by the names of `hf_entries`; they become the model's own.
        dtype: of all weights.
        device: where the model shall be.
    """
    from transformers import LlamaConfig, LlamaForCausalLM

    from megatron.boost.conversion.modeling.configuration_boost import BoostConfig
    from megatron.boost.conversion.modeling.modeling_boost import BoostForCausalLM

    config = hf_from_description(description)
    # Where the classes are is known here.
    for name in ("auto_map", "architectures", "model_type"):
        config.pop(name, None)
    low_rank = description.low_rank.low_rank
    kind, config_kind = (
        (BoostForCausalLM, BoostConfig) if low_rank else (LlamaForCausalLM, LlamaConfig)
    )
    with without_bars():
        model, loading = kind.from_pretrained(
            None,
            config=config_kind(**config),
            state_dict=tensors,
            dtype=dtype or description.dtype,
            output_loading_info=True,
        )
    for fault in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        assert not loading[fault], f"{fault}: {loading[fault]}"
    return model.to(device).eval()


def _tokenizer_of_run(reader: CheckpointReader) -> Path | None:
    """The tokenizer's folder that the run was given, if it is one of Hugging Face's on this
    machine."""
    if getattr(reader.arguments, "tokenizer_type", None) != "HuggingFaceTokenizer":
        return None
    model = getattr(reader.arguments, "tokenizer_model", None)
    return Path(model) if model and has_tokenizer(Path(model)) else None


def _generation(config: dict[str, Any]) -> dict[str, Any]:
    names = ("bos_token_id", "eos_token_id", "pad_token_id")
    return {name: config[name] for name in names if config[name] is not None}
