"""Which tensor of another format is which of ours: one table a format, read in both directions.

A table is a list of `Entry`, each of one tensor of the other format and the canonical tensors that
it holds. Importing splits it, exporting joins it, and `--dry-run` prints it.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from boost_layers.config import ATTENTION_PROJECTIONS
from megatron.boost.conversion.description import (
    EMBEDDING,
    FINAL_NORM,
    HEAD,
    ModelDescription,
)

Form = Literal["same", "transposed", "qkv by group", "gate over up"]


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One tensor of another format and what it holds."""

    name: str
    """In the other format."""
    canonical: tuple[str, ...]
    form: Form = "same"
    shape: tuple[int, ...]
    """Of the tensor in the other format, of this layer alone where layers are stacked."""
    layer: int | None = None
    """Its place along the first axis of a tensor in which all layers are stacked."""
    layers: int | None = None
    """How many layers are stacked."""
    also: tuple[str, ...] = ()
    """Other names that the tensor may have instead."""
    groups: int = 1
    """KV heads, for "qkv by group"."""
    heads_per_group: int = 1
    """Query heads of each KV head, for "qkv by group"."""

    @property
    def stored_shape(self) -> tuple[int, ...]:
        """The shape of the whole tensor in the other format."""
        return self.shape if self.layers is None else (self.layers, *self.shape)

    def split(self, tensor: Tensor) -> dict[str, Tensor]:
        """The canonical tensors in one of the other format (of one layer); views where possible."""
        if self.form == "transposed":
            return {self.canonical[0]: tensor.t().contiguous()}
        if self.form == "gate over up":
            return dict(zip(self.canonical, tensor.chunk(2), strict=True))
        if self.form == "qkv by group":
            grouped = tensor.unflatten(0, (self.groups, self.heads_per_group + 2, -1))
            parts = grouped.split([self.heads_per_group, 1, 1], dim=1)
            whole = [part.flatten(0, 2).contiguous() for part in parts]
            return dict(zip(self.canonical, whole, strict=True))
        return {self.canonical[0]: tensor}

    def join(self, tensors: Sequence[Tensor]) -> Tensor:
        """The tensor of the other format (of one layer) from the canonical ones, in order."""
        if self.form == "transposed":
            return tensors[0].t().contiguous()
        if self.form == "gate over up":
            return torch.cat(list(tensors))
        if self.form == "qkv by group":
            parts = [part.unflatten(0, (self.groups, -1)) for part in tensors]
            return torch.cat(parts, dim=1).flatten(0, 1)
        return tensors[0]


def canonical_entries(description: ModelDescription) -> list[Entry]:
    """Our own checkpoints: every tensor under its canonical name."""
    return [
        Entry(name=name, canonical=(name,), shape=shape)
        for name, shape in description.tensors().items()
    ]


def hf_entries(description: ModelDescription) -> list[Entry]:
    """LLaMA's names in Hugging Face folders; low-rank models have theirs with `A`, `B` and LaX's
    `gate_…` and `norm_…` in place of `weight`."""
    return [
        Entry(name=_hf_name(name), canonical=(name,), shape=shape)
        for name, shape in description.tensors().items()
    ]


def cola_entries(description: ModelDescription) -> list[Entry]:
    """The names of CoLA's reference code, whose factors are transposed against ours."""

    def name(layer: int, projection: str, factor: str) -> str:
        module = "self_attn" if projection in ATTENTION_PROJECTIONS else "mlp"
        return f"model.layers.{layer}.{module}.{projection}.cola_{factor.lower()}"

    return _cola_entries(description, name)


def cola_m_entries(description: ModelDescription) -> list[Entry]:
    """The names of CoLA-M's reference code: CoLA's tensors where its checkpoints are cut, so that
    down's B stands in the next layer."""
    before = {
        "q_proj": "pre_attn",
        "k_proj": "pre_attn",
        "v_proj": "pre_attn",
        "o_proj": "self_attn",
        "gate_proj": "pre_mlp",
        "up_proj": "pre_mlp",
        "down_proj": "self_mlp",
    }
    after = {
        "q_proj": "self_attn",
        "k_proj": "self_attn",
        "v_proj": "self_attn",
        "o_proj": "post_attn",
        "gate_proj": "self_mlp",
        "up_proj": "self_mlp",
    }

    def name(layer: int, projection: str, factor: str) -> str:
        if factor == "A":
            return f"model.layers.{layer}.{before[projection]}.pre_{projection}.cola_a"
        if projection != "down_proj":
            return f"model.layers.{layer}.{after[projection]}.post_{projection}.cola_b"
        last = layer == description.num_layers - 1
        where = f"{layer}.post_mlp" if last else f"{layer + 1}.last_layer_post_mlp"
        return f"model.layers.{where}.post_down_proj.cola_b"

    entries = []
    for entry in _cola_entries(description, name):
        # Whether the norms stand in the module after them is not settled by the description that
        # these names are taken from.
        for norm, module in (
            ("input_layernorm", "pre_attn"),
            ("post_attention_layernorm", "pre_mlp"),
        ):
            if f".{norm}." in entry.name:
                entry = replace(entry, also=(entry.name.replace(norm, f"{module}.{norm}"),))
        entries.append(entry)
    return entries


def megatron_entries(description: ModelDescription, *, stacked: bool = True) -> list[Entry]:
    """Megatron's own dense layers in a `torch_dist` checkpoint: q, k and v interleaved by KV group
    in one tensor, gate over up in another, norms under Transformer Engine's names.

    Args:
        stacked: whether all layers stand in one tensor of each name, which is Megatron's default.
    """
    entries = [_vocabulary_entry(description, EMBEDDING)]
    for layer in range(description.num_layers):
        prefix = "decoder.layers" if stacked else f"decoder.layers.{layer}"
        ours = f"decoder.layers.{layer}"
        where = (layer, description.num_layers) if stacked else (None, None)
        shapes = description.layer_tensors(layer)

        def entry(
            name: str,
            *canonical: str,
            form: Form = "same",
            also: tuple[str, ...] = (),
            prefix: str = prefix,
            ours: str = ours,
            where: tuple[int | None, int | None] = where,
            shapes: Mapping[str, tuple[int, ...]] = shapes,
        ) -> Entry:
            members = tuple(f"{ours}.{part}.weight" for part in canonical)
            rows = sum(shapes[member][0] for member in members)
            return Entry(
                name=f"{prefix}.{name}",
                canonical=members,
                form=form,
                shape=(rows, *shapes[members[0]][1:]),
                layer=where[0],
                layers=where[1],
                also=tuple(f"{prefix}.{other}" for other in also),
                groups=description.num_kv_heads,
                heads_per_group=description.num_heads // description.num_kv_heads,
            )

        qkv = [f"self_attention.{name}" for name in ("q_proj", "k_proj", "v_proj")]
        entries += [
            entry(
                "self_attention.linear_qkv.layer_norm_weight",
                "input_layernorm",
                also=("input_layernorm.weight",),
            ),
            entry("self_attention.linear_qkv.weight", *qkv, form="qkv by group"),
            entry("self_attention.linear_proj.weight", "self_attention.o_proj"),
            entry(
                "mlp.linear_fc1.layer_norm_weight",
                "pre_mlp_layernorm",
                also=("pre_mlp_layernorm.weight",),
            ),
            entry("mlp.linear_fc1.weight", "mlp.gate_proj", "mlp.up_proj", form="gate over up"),
            entry("mlp.linear_fc2.weight", "mlp.down_proj"),
        ]
    entries.append(
        Entry(name=FINAL_NORM, canonical=(FINAL_NORM,), shape=(description.hidden_size,))
    )
    if not description.tied:
        entries.append(_vocabulary_entry(description, HEAD))
    return entries


def resolve(
    entries: Iterable[Entry], present: Mapping[str, tuple[int, ...]], ignore: Iterable[str] = ()
) -> list[Entry]:
    """The entries with the name by which each is present.

    Args:
        entries: a format's table.
        present: shape by name of the tensors that are there, of whole tensors.
        ignore: names that may be there and mean nothing.

    Raises:
        ValueError: for a tensor that is missing, one too many, and one of another shape.
    """
    found, used = [], set(ignore)
    for entry in entries:
        names = [name for name in (entry.name, *entry.also) if name in present]
        if not names:
            near = difflib.get_close_matches(entry.name, present, n=1)
            hint = f" (there is {near[0]})" if near else ""
            raise ValueError(f"{entry.name}: the tensor is missing{hint}")
        if tuple(present[names[0]]) != entry.stored_shape:
            raise ValueError(
                f"{names[0]}: has the shape {list(present[names[0]])} where the configuration "
                f"says {list(entry.stored_shape)}"
            )
        used.add(names[0])
        found.append(replace(entry, name=names[0], also=()))
    for name in present:
        if name not in used:
            raise ValueError(f"{name}: the tensor has no place in the model")
    return found


def _cola_entries(
    description: ModelDescription, name_of: Callable[[int, str, str], str]
) -> list[Entry]:
    entries = []
    for entry in hf_entries(description):
        (canonical,) = entry.canonical
        parts = canonical.split(".")
        if parts[-1] in ("A", "B"):
            name = name_of(int(parts[2]), parts[4], parts[5])
            shape = (entry.shape[1], entry.shape[0])
            entry = replace(entry, name=name, shape=shape, form="transposed")
        entries.append(entry)
    return entries


def _hf_name(canonical: str) -> str:
    ends = {
        EMBEDDING: "model.embed_tokens.weight",
        FINAL_NORM: "model.norm.weight",
        HEAD: "lm_head.weight",
    }
    if canonical in ends:
        return ends[canonical]
    return (
        canonical.replace("decoder.layers.", "model.layers.")
        .replace(".self_attention.", ".self_attn.")
        .replace(".pre_mlp_layernorm.", ".post_attention_layernorm.")
    )


def _vocabulary_entry(description: ModelDescription, name: str) -> Entry:
    shape = (description.vocab_size, description.hidden_size)
    return Entry(name=name, canonical=(name,), shape=shape)
