"""A Hugging Face folder as a Megatron checkpoint.

`open_source` reads what a folder holds, a plan says how each tensor of the checkpoint is made of
it, and `write_import` makes them while it writes. A plan for a low-rank model of a dense source is
an `ImportPlan` with other makers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor

from megatron.boost.conversion.checkpoint_writer import checkpoint_entries, write_checkpoint
from megatron.boost.conversion.description import EMBEDDING, ModelDescription
from megatron.boost.conversion.factorisation_settings import annealing_steps
from megatron.boost.conversion.hf_config import Family, description_from_hf, family_of
from megatron.boost.conversion.hf_folder import HfReader
from megatron.boost.conversion.megatron_arguments import arguments_from_description
from megatron.boost.conversion.names import (
    Entry,
    cola_entries,
    cola_m_entries,
    hf_entries,
    resolve,
)
from megatron.boost.conversion.output_folder import new_folder, refuse_occupied
from megatron.boost.conversion.progress import Progress, silent
from megatron.boost.conversion.tokenizer_files import (
    TOKENIZER_FOLDER,
    copy_tokenizer,
    has_tokenizer,
)

_TABLES = {
    "llama": hf_entries,
    "boost": hf_entries,
    "cola": cola_entries,
    "cola-m": cola_m_entries,
}
_HEAD = "lm_head.weight"
_EMBEDDING = "model.embed_tokens.weight"
# A buffer that transformers saved before 4.32; it is made of the configuration.
_BUFFER = "rotary_emb.inv_freq"


class HfSource:
    """The model in a Hugging Face folder, by canonical names."""

    def __init__(self, reader: HfReader):
        self.reader = reader
        self.family: Family = family_of(reader.config)
        present = {name: info.shape for name, info in reader.tensors.items()}
        self.family = _told_apart(self.family, present)
        described = description_from_hf(reader.config)
        self.ignored = [name for name in present if name.endswith(_BUFFER)]
        if described.tied and _HEAD in present:
            self._require_same_head()
            self.ignored.append(_HEAD)
        try:
            self.entries: list[Entry] = resolve(
                _TABLES[self.family](described), present, self.ignored
            )
        except ValueError as refusal:
            raise ValueError(f"{reader.folder}: {refusal}") from refusal
        self._by_canonical = {entry.canonical[0]: entry for entry in self.entries}
        self.description: ModelDescription = replace(described, dtype=self.dtype(EMBEDDING))
        """The model, with the dtype that its embedding is really stored in."""

    def entry(self, name: str) -> Entry:
        """Where a canonical tensor is."""
        return self._by_canonical[name]

    def dtype(self, name: str) -> torch.dtype:
        """The dtype of a canonical tensor."""
        return self.reader.tensors[self._by_canonical[name].name].dtype

    def tensor(self, name: str) -> Tensor:
        """One canonical tensor, on the CPU, in the dtype that it is stored in."""
        entry = self._by_canonical[name]
        return entry.split(self.reader.tensor(entry.name))[name]

    def _require_same_head(self) -> None:
        """A tied model may be saved with its head, which must be the embedding then."""
        if _EMBEDDING in self.reader.tensors and not torch.equal(
            self.reader.tensor(_HEAD), self.reader.tensor(_EMBEDDING)
        ):
            raise ValueError(
                f"{self.reader.folder}: config.json says tie_word_embeddings, and {_HEAD} differs "
                f"from {_EMBEDDING}"
            )


@dataclass(frozen=True, kw_only=True)
class ImportPlan:
    """How a checkpoint is made of a source."""

    source: HfSource
    description: ModelDescription
    """Of the result."""
    make: Mapping[str, Callable[[], Tensor]]
    """By canonical name of the result: makes the tensor, on the CPU; called once, in the model's
    order, except that tensors of one of Megatron's fused ones are asked for together."""
    dtypes: Mapping[str, torch.dtype]
    """By canonical name of the result."""
    made_of: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """By canonical name of the result: the canonical tensors of the source that it is made of;
    those that are missing here are the source's of the same name."""
    megatrons_own: bool = False
    """Whether the result is in Megatron's own layers, `--low-rank-arch none`."""
    act_anneal: int = 0
    """The steps over which φ grows, `--low-rank-act-anneal`."""

    @property
    def exact(self) -> bool:
        """Whether the result computes what the source does."""
        return self.description.low_rank == self.source.description.low_rank

    @cached_property
    def entries(self) -> list[Entry]:
        """The tensors of the checkpoint."""
        return checkpoint_entries(self.description, megatrons_own=self.megatrons_own)

    def sources(self, name: str) -> tuple[str, ...]:
        """The canonical tensors of the source that one of the result is made of."""
        return self.made_of.get(name, (name,))


def open_source(folder: Path, trust_pickle: bool = False) -> HfSource:
    """Read what a Hugging Face folder holds, no tensor.

    Raises:
        ValueError: for a folder that is damaged, a model that cannot be run, and tensors that are
            missing or have no place in it.
    """
    return HfSource(HfReader(folder, trust_pickle))


def exact_plan(
    source: HfSource, arch: str | None = None, act_anneal: int | None = None
) -> ImportPlan:
    """The plan by which every tensor stays as it is.

    Args:
        source: a dense LLaMA, or a low-rank model in its own layers.
        arch: "none" or "dense", whose layers a dense LLaMA goes into; None: Megatron's own, except
            where only ours compute the model.
        act_anneal: the steps over which φ grows, of a model that was exported before it did.

    Raises:
        ValueError: for layers that cannot compute the model.
    """
    description = source.description
    rope = description.rope
    # Megatron 0.19 builds its own model with a factor of 8 whatever the flag says.
    only_ours = rope.kind == "llama3" and rope.factor != 8.0
    if description.low_rank.low_rank and arch not in (None, description.low_rank.arch):
        raise ValueError(
            f"--low-rank-arch {arch}: {source.reader.folder} holds a "
            f"{description.low_rank.arch} model; nearest legal value: leave it out"
        )
    if only_ours and arch == "none":
        raise ValueError(
            f"--low-rank-arch none: Megatron 0.19's own layers ignore a rope_scaling factor of "
            f"{rope.factor:g}; nearest legal value: dense"
        )
    own = not description.low_rank.low_rank and not only_ours and arch in (None, "none")
    names = description.tensors()
    return ImportPlan(
        source=source,
        description=description,
        make={name: _maker(source, name) for name in names},
        dtypes={name: source.dtype(name) for name in names},
        megatrons_own=own,
        act_anneal=annealing_steps(description, act_anneal),
    )


def write_import(
    plan: ImportPlan,
    save: Path,
    *,
    check: Callable[[Path], None] | None = None,
    progress: Progress = silent,
) -> int:
    """Write the checkpoint `save`, which is there only when all of it is.

    Args:
        plan: how its tensors are made.
        save: a folder that is not there yet, or empty.
        check: called with the whole folder before it gets its name; what it raises ends the import.
        progress: told of every tensor.

    Returns:
        bytes of tensors written.

    Raises:
        ValueError: if `save` is occupied, and what a maker raises.
    """
    refuse_occupied(save)
    tokenizer = save.absolute() / TOKENIZER_FOLDER
    sizes = {
        name: torch.Size(shape).numel() * plan.dtypes[name].itemsize
        for name, shape in plan.description.tensors().items()
    }
    total = sum(sizes.values())
    with new_folder(save) as partial, progress("import", total) as advance:
        copy_tokenizer(plan.source.reader.folder, partial / TOKENIZER_FOLDER)

        def tensor(name: str) -> Tensor:
            made = plan.make[name]()
            advance(sizes[name])
            return made

        write_checkpoint(
            partial,
            plan.entries,
            tensor,
            plan.dtypes,
            arguments_from_description(
                plan.description,
                megatrons_own=plan.megatrons_own,
                act_anneal=plan.act_anneal,
                tokenizer=tokenizer if has_tokenizer(partial / TOKENIZER_FOLDER) else None,
            ),
        )
        if check is not None:
            check(partial)
    return total


def _maker(source: HfSource, name: str) -> Callable[[], Tensor]:
    return lambda: source.tensor(name)


def _told_apart(family: Family, present: Mapping[str, object]) -> Family:
    """CoLA-M's configurations may name CoLA's architecture: the tensors decide."""
    if family in ("cola", "cola-m"):
        split = any(".pre_attn." in name or ".post_attn." in name for name in present)
        return "cola-m" if split else "cola"
    return family
