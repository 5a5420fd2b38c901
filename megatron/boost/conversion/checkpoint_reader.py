"""The model in a Megatron checkpoint, read one tensor at a time, whole, whatever layout saved it.

No process group is needed, and nothing that stands in the checkpoint is executed: what is pickled
in it is read by an unpickler that knows data only.
"""

from __future__ import annotations

import io
import pickle
from argparse import Namespace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, ReadItem
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from megatron.boost.conversion.description import VOCABULARY_TENSORS, ModelDescription
from megatron.boost.conversion.megatron_arguments import (
    description_from_arguments,
    known_vocabulary,
)
from megatron.boost.conversion.names import (
    Entry,
    canonical_entries,
    megatron_entries,
    resolve,
)
from megatron.boost.conversion.tokenizer_files import (
    GENERATION,
    TOKENIZER_FOLDER,
    has_tokenizer,
)
from megatron.boost.preprocessing.inputs import why_not
from megatron.boost.stored_run import TRACKER, tracker_text

_COMMON = "common_state/shard_0_1"
_MEGATRONS_OWN = "linear_qkv.weight"


class CheckpointReader:
    """A `torch_dist` checkpoint of ours or of Megatron-LM's own dense layers.

    Args:
        folder: what `--save` named.
        step: the iteration to read; None: the latest.
        vocab_size: the tokens that exist, where the checkpoint does not say it rightly.

    Raises:
        ValueError: for a folder without a complete checkpoint, a missing or truncated file, a model
            that is no LLaMA, and tensors that are missing or have no place in it.
    """

    def __init__(self, folder: Path, step: int | None = None, vocab_size: int | None = None):
        self.root = Path(folder)
        self.folder = _folder_of(self.root, step)
        self._reader = _DataReader(self.folder)
        self.metadata = self._read_metadata()
        self._refuse_damaged_files()
        self._reader.set_up_storage_reader(self.metadata, True)
        self._tensors = {
            name: found
            for name, found in self.metadata.state_dict_metadata.items()
            if isinstance(found, TensorStorageMetadata)
        }
        common = self._common_state()
        if not isinstance(common.get("args"), Namespace):
            raise ValueError(f"{self.folder}: says nothing of the model, it holds no arguments")
        self.arguments: Namespace = common["args"]
        """All arguments of the run that saved it."""
        self.iteration = int(common.get("iteration") or 0)
        shapes = self._shapes()
        self.padded_vocab_size = shapes.get(VOCABULARY_TENSORS[0], (0,))[0]
        known = vocab_size or known_vocabulary(self.arguments, self.tokenizer)
        self.vocabulary_is_known = known is not None
        """Whether the number of tokens is known; else the padded rows count as tokens."""
        self.description: ModelDescription = description_from_arguments(
            self.arguments,
            vocab_size=known or self.padded_vocab_size,
            iteration=self.iteration,
            dtype=self._stored_dtype(),
        )
        self.entries = self._resolve(shapes)
        """Where each canonical tensor is, the vocabulary's rows counted without padding."""
        self._by_canonical = {name: each for each in self.entries for name in each.canonical}
        self._last: tuple[str, dict[str, Tensor]] = ("", {})

    def tensor(self, name: str) -> Tensor:
        """A whole tensor by canonical name, on the CPU, in the dtype that it is stored in and
        without the rows of tokens that do not exist."""
        entry = self._by_canonical[name]
        if entry.form == "gate over up":
            rows = entry.shape[0] // len(entry.canonical)
            return self._read(entry, entry.canonical.index(name) * rows, rows)
        if len(entry.canonical) == 1:
            return entry.split(self._read(entry, 0, entry.shape[0]))[name]
        # q, k and v are asked for one after the other.
        key = f"{entry.name} {entry.layer}"
        if self._last[0] != key:
            self._last = "", {}
            self._last = key, entry.split(self._read(entry, 0, entry.shape[0]))
        return self._last[1][name]

    def dtype(self, name: str) -> torch.dtype:
        """The dtype that a tensor is stored in, by canonical name."""
        stored: torch.dtype = self._tensors[self._by_canonical[name].name].properties.dtype
        return stored

    @property
    def tokenizer(self) -> Path | None:
        """The folder of the tokenizer that came with the checkpoint."""
        folder = self.root / TOKENIZER_FOLDER
        return folder if has_tokenizer(folder) else None

    @property
    def generation(self) -> Path | None:
        """The folder of the generation settings that came with the checkpoint."""
        folder = self.root / TOKENIZER_FOLDER
        return folder if (folder / GENERATION).is_file() else None

    @property
    def megatrons_own(self) -> bool:
        """Whether the layers are Megatron's own, `--low-rank-arch none`."""
        return any(name.endswith(_MEGATRONS_OWN) for name in self._tensors)

    def _shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape by name of the model's tensors, the optimizer's left out."""
        return {
            name: tuple(found.size)
            for name, found in self._tensors.items()
            if not name.startswith(("optimizer.", "chained_"))
        }

    def _stored_dtype(self) -> torch.dtype:
        found = self._tensors.get(VOCABULARY_TENSORS[0])
        return torch.float32 if found is None else found.properties.dtype

    def _resolve(self, shapes: dict[str, tuple[int, ...]]) -> list[Entry]:
        description = self.description
        if self.padded_vocab_size < description.vocab_size:
            raise ValueError(
                f"{self.folder}: the embedding has {self.padded_vocab_size} rows, and there are "
                f"{description.vocab_size} tokens"
            )
        for name in VOCABULARY_TENSORS:
            if name in shapes:
                shapes[name] = (description.vocab_size, *shapes[name][1:])
        if self.megatrons_own:
            stacked = not any(name.startswith("decoder.layers.0.") for name in shapes)
            entries = megatron_entries(description, stacked=stacked)
        else:
            entries = canonical_entries(description)
        try:
            return resolve(entries, shapes)
        except ValueError as refusal:
            raise ValueError(f"{self.folder}: {refusal}") from refusal

    def _read(self, entry: Entry, start: int, rows: int) -> Tensor:
        """Rows of an entry's tensor, of its layer alone where layers are stacked."""
        stored = self._tensors[entry.name]
        offsets, sizes = [start, *[0] * (len(entry.shape) - 1)], [rows, *entry.shape[1:]]
        if entry.layer is not None:
            offsets, sizes = [entry.layer, *offsets], [1, *sizes]
        target = torch.empty(sizes, dtype=stored.properties.dtype)
        chunk = ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))
        items = create_read_items_for_chunk_list(entry.name, stored, [chunk])
        if sum(torch.Size(item.lengths).numel() for item in items) != target.numel():
            raise ValueError(f"{self.folder}: {entry.name} is not whole")
        self._read_data(items, _Into(target))
        return target if entry.layer is None else target[0]

    def _read_data(self, items: list[ReadItem], into: DefaultLoadPlanner) -> None:
        """Read `items` into what `into` has for them."""
        try:
            self._reader.read_data(LoadPlan(items), into).wait()
        except (RuntimeError, AssertionError, pickle.UnpicklingError) as failure:
            what = items[0].storage_index.fqn
            reason = str(failure).partition("\n")[0]
            raise ValueError(f"{self.folder}: {what} is damaged ({reason})") from failure

    def _read_metadata(self) -> Metadata:
        path = self.folder / ".metadata"
        try:
            metadata = self._reader.read_metadata()
        except FileNotFoundError as failure:
            raise ValueError(f"{path}: is missing") from failure
        except (EOFError, pickle.UnpicklingError, AttributeError, TypeError) as failure:
            raise ValueError(f"{path}: is truncated or of another format") from failure
        if not isinstance(metadata, Metadata):
            raise ValueError(f"{path}: is of another format")
        return metadata

    def _refuse_damaged_files(self) -> None:
        """Raise ValueError for a data file that is missing or shorter than the metadata says."""
        ends: dict[str, int] = {}
        for stored in self.metadata.storage_data.values():
            end = stored.offset + stored.length
            ends[stored.relative_path] = max(end, ends.get(stored.relative_path, 0))
        for name, end in ends.items():
            path = self.folder / name
            if not path.is_file():
                raise ValueError(f"{path}: is missing")
            if path.stat().st_size < end:
                raise ValueError(
                    f"{path}: is truncated, {path.stat().st_size} bytes of at least {end}"
                )

    def _common_state(self) -> dict[str, Any]:
        legacy = self.folder / "common.pt"
        if legacy.is_file():
            state = _load_data_only(legacy)
        else:
            if _COMMON not in self.metadata.state_dict_metadata:
                raise ValueError(
                    f"{self.folder}: says nothing of the model, it has no common state"
                )
            into = _Bytes()
            index = MetadataIndex(_COMMON)
            origin = torch.Size((0,))
            item = ReadItem(LoadItemType.BYTE_IO, index, origin, index, origin, origin)
            self._read_data([item], into)
            state = _load_data_only(into.value)[0]
        return state if isinstance(state, dict) else {}


class _DataReader(FileSystemReader):
    """Reads the metadata without running code that stands in it."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        with (Path(self.path) / ".metadata").open("rb") as file:
            metadata: Metadata = _DataUnpickler(file).load()
        if getattr(metadata, "storage_meta", None) is None:
            metadata.storage_meta = StorageMeta()
        return metadata


class _Into(DefaultLoadPlanner):
    """A plan's target: one tensor that the items of the plan fill."""

    def __init__(self, target: Tensor):
        super().__init__()
        self.target = target

    def resolve_tensor(self, read_item: ReadItem) -> Tensor:
        part = self.target
        for axis, (start, length) in enumerate(
            zip(read_item.dest_offsets, read_item.lengths, strict=True)
        ):
            part = part.narrow(axis, start, length)
        return part

    def commit_tensor(self, read_item: ReadItem, tensor: Tensor) -> None:
        pass


class _Bytes(DefaultLoadPlanner):
    """A plan's target: an object, left as it is stored."""

    value: io.BytesIO

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        self.value = value


class _StandIn:
    """In place of an object whose class is not known to be data."""

    def __init__(self, *args: Any, **kwargs: Any):
        self.arguments = args

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def __call__(self, *args: Any, **kwargs: Any) -> _StandIn:
        return _StandIn(*args)

    def __setitem__(self, key: Any, value: Any) -> None:
        pass

    def append(self, value: Any) -> None:
        """As an item of a list of another class."""

    def extend(self, values: Any) -> None:
        """As items of a list of another class."""


class _DataUnpickler(pickle.Unpickler):
    """Unpickles data. Of all classes and functions that are not listed it makes stand-ins: neither
    are they imported nor called."""

    _LISTED = {
        ("argparse", "Namespace"),
        ("types", "SimpleNamespace"),
        ("collections", "OrderedDict"),
        ("collections", "defaultdict"),
        ("builtins", "set"),
        ("torch", "Size"),
        ("torch", "device"),
        ("torch.serialization", "_get_layout"),
        ("torch._utils", "_rebuild_tensor_v2"),
        ("torch._tensor", "_rebuild_from_type_v2"),
    }
    _OF_TORCH_CHECKPOINT = {
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorStorageMetadata",
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "TensorProperties",
        "_MEM_FORMAT_ENCODING",
        "_StorageInfo",
    }

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in self._LISTED:
            return super().find_class(module, name)
        if module.startswith("torch.distributed.checkpoint.") and name in self._OF_TORCH_CHECKPOINT:
            return super().find_class(module, name)
        if module == "torch" and (
            isinstance(getattr(torch, name, None), torch.dtype) or name.endswith("Storage")
        ):
            return super().find_class(module, name)
        return _StandIn


def _load_data_only(source: Path | io.BytesIO) -> Any:
    """What `torch.save` wrote, by `_DataUnpickler`."""
    reader = SimpleNamespace(
        __name__="data_only",
        Unpickler=_DataUnpickler,
        load=lambda file, **_: _DataUnpickler(file).load(),
    )
    try:
        return torch.load(source, map_location="cpu", pickle_module=reader, weights_only=False)
    except (RuntimeError, EOFError, TypeError, pickle.UnpicklingError) as failure:
        raise ValueError(f"the common state cannot be read: {failure}") from failure


def _folder_of(root: Path, step: int | None) -> Path:
    """The folder of one iteration in `root`, what `--save` named.

    Raises:
        ValueError: if it is not there or not complete.
    """
    if not root.is_dir():
        raise ValueError(f"{root}: {why_not(root, 'folder')}")
    complete = sorted(path.parent for path in root.glob("iter_*/metadata.json"))
    if (root / "release" / "metadata.json").is_file():
        complete.append(root / "release")
    if step is not None:
        folder = root / f"iter_{step:07d}"
    elif (root / "metadata.json").is_file():
        folder = root
    elif (root / TRACKER).is_file():
        latest = tracker_text(root / TRACKER).strip()
        if latest != "release" and not latest.isdecimal():
            raise ValueError(f"{root / TRACKER}: names no iteration")
        folder = root / (latest if latest == "release" else f"iter_{int(latest):07d}")
    else:
        raise ValueError(f"{root}: holds no checkpoint (there is no {TRACKER} in it)")
    if not (folder / "metadata.json").is_file():
        names = ", ".join(path.name for path in complete) or "none"
        raise ValueError(f"{folder}: there is no complete torch_dist checkpoint; complete: {names}")
    return folder
