"""A Megatron checkpoint of weights alone, written one layer at a time.

It is what Megatron calls a release: loaded with `--load DIR`, training starts at iteration 0 with a
fresh optimizer, at any TP and PP.
"""

from __future__ import annotations

import io
import json
import queue
import re
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.checkpoint import FileSystemWriter, SavePlan, SavePlanner
from torch.distributed.checkpoint.default_planner import create_default_global_save_plan
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import (
    BytesIOWriteData,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)

from megatron.boost.conversion.description import ModelDescription
from megatron.boost.conversion.names import Entry, canonical_entries, megatron_entries
from megatron.boost.stored_run import TRACKER

_COMMON = "common_state/shard_0_1"
_WITH_EXTRA_STATE = (
    "self_attention.linear_qkv",
    "self_attention.linear_proj",
    "mlp.linear_fc1",
    "mlp.linear_fc2",
)


class _Part(NamedTuple):
    """A part of a tensor in the checkpoint, and how it is made."""

    entry: Entry
    offset: tuple[int, ...]
    shape: tuple[int, ...]
    dtype: torch.dtype
    make: Callable[[], Tensor]


def checkpoint_entries(description: ModelDescription, *, megatrons_own: bool) -> list[Entry]:
    """The tensors of a checkpoint and what they hold.

    Args:
        description: the model.
        megatrons_own: whether it is stored in Megatron's own layers, `--low-rank-arch none`.
    """
    return megatron_entries(description) if megatrons_own else canonical_entries(description)


def write_checkpoint(
    folder: Path,
    entries: Sequence[Entry],
    tensor: Callable[[str], Tensor],
    dtypes: Mapping[str, torch.dtype],
    arguments: Namespace,
) -> None:
    """Write a release checkpoint into `folder`, which is there and empty.

    Args:
        folder: what `--load` will name.
        entries: what `checkpoint_entries` gave.
        tensor: makes a canonical tensor, on the CPU; called once for each, in the entries' order.
        dtypes: the dtype of each canonical tensor.
        arguments: what `arguments_from_description` gave.
    """
    release = folder / "release"
    release.mkdir()
    parts = [part for entry in entries for part in _parts(entry, tensor, dtypes)]
    state = {
        "args": arguments,
        "checkpoint_version": 3.0,
        "iteration": 0,
        "content_metadata": {"singleton_local_shards": False, "chained_optim_avoid_prefix": True},
    }
    objects = {_COMMON: _saved([state])}
    layers = {entry.layers for entry in entries} - {None}
    for count in layers:
        # Megatron's linear layers have a state besides their weights, which is empty here.
        for layer in range(count or 0):
            for module in _WITH_EXTRA_STATE:
                key = f"decoder.layers.{module}._extra_state/shard_{layer}_{count}"
                objects[key] = _saved([None])
    _write_data(release, parts, objects)
    backend = {"sharded_backend": "torch_dist", "sharded_backend_version": 1}
    (release / "metadata.json").write_text(json.dumps(backend))
    (folder / TRACKER).write_text("release")


def _parts(
    entry: Entry, tensor: Callable[[str], Tensor], dtypes: Mapping[str, torch.dtype]
) -> Iterator[_Part]:
    """The parts that a tensor is written in: gate and up apart, as Megatron does, else one."""
    kinds = {dtypes[name] for name in entry.canonical}
    if len(kinds) > 1:
        raise ValueError(
            f"{entry.name}: is made of tensors of different dtypes "
            f"({', '.join(f'{name} {dtypes[name]}' for name in entry.canonical)})"
        )
    (dtype,) = kinds
    members = [entry.canonical]
    if entry.form == "gate over up":
        members = [(name,) for name in entry.canonical]
    rows = entry.shape[0] // len(members)
    for number, names in enumerate(members):
        offset, shape = (number * rows, *[0] * (len(entry.shape) - 1)), (rows, *entry.shape[1:])
        if entry.layer is not None:
            offset, shape = (entry.layer, *offset), (1, *shape)

        def make(names: tuple[str, ...] = names, shape: tuple[int, ...] = shape) -> Tensor:
            made = [tensor(name) for name in names]
            whole = entry.join(made) if len(members) == 1 else made[0]
            assert whole.shape == shape[-whole.dim() :], f"{names}: {whole.shape}, not {shape}"
            return whole.contiguous().view(shape)

        yield _Part(entry, offset, shape, dtype, make)


def _write_data(folder: Path, parts: Sequence[_Part], objects: Mapping[str, io.BytesIO]) -> None:
    """Write parts and objects, and the metadata that says where they are.

    The steps are those of `torch.distributed.checkpoint.save`, which would turn an error of a
    tensor's maker into one of its own.
    """
    planner, writer = _MakingPlanner(parts, objects), _ByLayer(folder)
    writer.set_up_storage_writer(True)
    plans, metadata = planner.create_global_plan([planner.create_local_plan()])
    (plan,) = writer.prepare_global_plan([writer.prepare_local_plan(plans[0])])
    writes = writer.write_data(planner.finish_plan(plan), planner)
    writer.finish(metadata, [writes.value()])


class _MakingPlanner(SavePlanner):
    """Makes each tensor when it is written, and not before."""

    def __init__(self, parts: Sequence[_Part], objects: Mapping[str, io.BytesIO]):
        self.parts = {(part.entry.name, part.offset): part for part in parts}
        self.objects = objects

    def set_up_planner(self, *args: Any, **kwargs: Any) -> None:
        """There is no state to plan with."""

    def create_local_plan(self) -> SavePlan:
        items = [
            WriteItem(
                index=MetadataIndex(key),
                type=WriteItemType.BYTE_IO,
                bytes_io_data=BytesIOWriteData(value.getbuffer().nbytes),
            )
            for key, value in self.objects.items()
        ]
        return SavePlan(items + [_write_item(part) for part in self.parts.values()])

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        plans, metadata = create_default_global_save_plan(all_plans)
        return plans, metadata

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        return new_plan

    def resolve_data(self, write_item: WriteItem) -> Tensor | io.BytesIO:
        index = write_item.index
        if write_item.type == WriteItemType.BYTE_IO:
            return self.objects[index.fqn]
        assert index.offset is not None
        part = self.parts[index.fqn, tuple(index.offset)]
        tensor = part.make()
        assert tensor.dtype == part.dtype, f"{index.fqn}: {tensor.dtype}, not {part.dtype}"
        return tensor


class _ByLayer(FileSystemWriter):
    """One file for each layer: torch keeps what it has written of a file until that is closed."""

    def __init__(self, folder: Path):
        super().__init__(folder, single_file_per_rank=True, per_thread_copy_ahead=0)

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Any:
        by_layer: dict[str, list[WriteItem]] = {}
        for item in plan.items:
            by_layer.setdefault(_layer_of(item), []).append(item)
        files: queue.Queue = queue.Queue()
        for number, items in enumerate(by_layer.values()):
            name = f"{plan.storage_data.prefix}{number}.distcp"
            files.put((self.fs.concat_path(self.path, name), name, items))
        return self._write_data(planner, files)


def _write_item(part: _Part) -> WriteItem:
    """The plan for one part."""
    offset = torch.Size(part.offset)
    return WriteItem(
        index=MetadataIndex(part.entry.name, offset),
        type=WriteItemType.SHARD,
        tensor_data=TensorWriteData(
            chunk=ChunkStorageMetadata(offset, torch.Size(part.shape)),
            properties=TensorProperties(dtype=part.dtype),
            size=torch.Size(part.entry.stored_shape),
        ),
    )


def _layer_of(item: WriteItem) -> str:
    """The file that an item belongs to: its layer, or its own name outside the layers."""
    name, data = item.index.fqn, item.tensor_data
    if data is None:
        return "objects"
    found = re.match(r"decoder\.layers\.(\d+)\.", name)
    if found is not None:
        return found[1]
    if name.startswith("decoder.layers."):
        return str(data.chunk.offsets[0])
    return name


def _saved(value: object) -> io.BytesIO:
    """As Megatron stores what is no tensor."""
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer
