"""The weights of a Hugging Face folder, read one tensor at a time and written shard by shard."""

from __future__ import annotations

import json
import pickle
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from megatron.boost.conversion.output_folder import new_folder
from megatron.boost.preprocessing.inputs import why_not

_SAFE = "model.safetensors"
_PICKLED = "pytorch_model.bin"
_SAFE_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


class TensorInfo(NamedTuple):
    """A tensor that has not been read."""

    file: str
    shape: tuple[int, ...]
    dtype: torch.dtype


class HfReader:
    """The `config.json` and the tensors of a Hugging Face folder.

    On construction the headers of all files are read and compared with the index, no tensor.

    Args:
        folder: what transformers' `save_pretrained` wrote.
        trust_pickle: whether `.bin` files may be read. They are unpickled without running code
            where that is enough, and in full where it is not.

    Raises:
        ValueError: for a folder without a configuration or weights, a missing or truncated shard,
            and an index that does not say what the shards hold.
    """

    def __init__(self, folder: Path, trust_pickle: bool = False):
        self.folder = Path(folder)
        self.trust_pickle = trust_pickle
        self.config = self._read_config()
        self.files, index = self._find_files()
        self._opened: tuple[str, Mapping[str, Tensor]] | None = None
        self.tensors: dict[str, TensorInfo] = {}
        """By name, in the files' order."""
        for file in self.files:
            for name, info in self._header(file).items():
                if name in self.tensors:
                    raise ValueError(
                        f"{self.folder}: {name} is in {self.tensors[name].file} and in {file}"
                    )
                self.tensors[name] = info
        if index is not None:
            self._compare(index)

    def tensor(self, name: str) -> Tensor:
        """One tensor, on the CPU, in the dtype that it is stored in."""
        info = self.tensors[name]
        if info.file.endswith(".safetensors"):
            # Opened anew: pages of a mapped file count as this process's memory until it is closed.
            with safe_open(self.folder / info.file, framework="pt") as opened:
                found: Tensor = opened.get_tensor(name)
                return found
        return self._unpickled(info.file)[name]

    def _read_config(self) -> dict[str, Any]:
        path = self.folder / "config.json"
        if not self.folder.is_dir():
            raise ValueError(f"{self.folder}: {why_not(self.folder, 'folder')}")
        if not path.is_file():
            raise ValueError(f"{self.folder}: has no config.json, so it is no Hugging Face model")
        return _json_object(path)

    def _find_files(self) -> tuple[list[str], dict[str, str] | None]:
        """The files with weights, and the index's file by tensor name where there is an index."""
        kinds = ((_SAFE, True), (_PICKLED, self.trust_pickle))
        for single, allowed in kinds:
            if allowed and (self.folder / single).is_file():
                return [single], None
            path = self.folder / f"{single}.index.json"
            if allowed and path.is_file():
                weight_map = _json_object(path).get("weight_map")
                if not isinstance(weight_map, dict) or not weight_map:
                    raise ValueError(f"{path}: has no weight_map")
                files = sorted(set(weight_map.values()))
                for file in files:
                    if Path(file).name != file:
                        raise ValueError(f"{path}: {file} is not the name of a file beside it")
                    if not (self.folder / file).is_file():
                        raise ValueError(f"{self.folder}: the shard {file} is missing")
                return files, weight_map
        pickled = sorted(path.name for path in self.folder.glob("*.bin"))
        if pickled and not self.trust_pickle:
            raise ValueError(
                f"{self.folder}: its weights are pickled ({pickled[0]}), which can run code; "
                "nearest legal value: --trust-pickle, if you trust where they come from"
            )
        loose = sorted(path.name for path in self.folder.glob("*.safetensors"))
        if loose:
            raise ValueError(f"{self.folder}: has {loose[0]} but neither {_SAFE} nor its index")
        raise ValueError(f"{self.folder}: has no weights ({_SAFE} or {_SAFE}.index.json)")

    def _header(self, file: str) -> dict[str, TensorInfo]:
        if not file.endswith(".safetensors"):
            return {
                name: TensorInfo(file, tuple(tensor.shape), tensor.dtype)
                for name, tensor in self._unpickled(file).items()
            }
        try:
            with safe_open(self.folder / file, framework="pt") as opened:
                # What safetensors opens is no mapping: it has keys, and cannot be iterated over.
                header = {name: opened.get_slice(name) for name in opened.keys()}
                return {
                    name: TensorInfo(file, tuple(part.get_shape()), self._dtype(part.get_dtype()))
                    for name, part in header.items()
                }
        except SafetensorError as failure:
            raise ValueError(
                f"{self.folder / file}: is truncated or no safetensors file ({failure})"
            ) from failure

    def _dtype(self, name: str) -> torch.dtype:
        if name not in _SAFE_DTYPES:
            raise ValueError(f"{self.folder}: tensors of dtype {name} cannot be converted")
        return _SAFE_DTYPES[name]

    def _unpickled(self, file: str) -> Mapping[str, Tensor]:
        """The tensors of a `.bin` file, mapped into memory where its format allows that."""
        if self._opened is not None and self._opened[0] == file:
            return self._opened[1]
        path = self.folder / file
        try:
            loaded = self._load(path)
        except (RuntimeError, EOFError, OSError, pickle.UnpicklingError) as failure:
            reason = str(failure).partition("\n")[0]
            raise ValueError(f"{path}: is truncated or no torch file ({reason})") from failure
        if not isinstance(loaded, Mapping):
            raise ValueError(f"{path}: holds a {type(loaded).__name__} instead of tensors by name")
        tensors = {str(name): value for name, value in loaded.items() if torch.is_tensor(value)}
        self._opened = file, tensors
        return tensors

    @staticmethod
    def _load(path: Path) -> Any:
        # The format of before torch 1.6 is no zip archive and cannot be mapped.
        mapped = _is_zip(path)
        try:
            return torch.load(path, map_location="cpu", mmap=mapped, weights_only=True)
        except pickle.UnpicklingError:
            return torch.load(path, map_location="cpu", mmap=mapped, weights_only=False)

    def _compare(self, index: Mapping[str, str]) -> None:
        """Raise ValueError unless the index says exactly what the shards hold."""
        for name, file in index.items():
            if name not in self.tensors:
                raise ValueError(f"{self.folder}: the index lists {name}, which no shard holds")
            if self.tensors[name].file != file:
                raise ValueError(
                    f"{self.folder}: the index says that {name} is in {file}, and it is in "
                    f"{self.tensors[name].file}"
                )
        for name, info in self.tensors.items():
            if name not in index:
                raise ValueError(
                    f"{self.folder}: {info.file} holds {name}, which the index does not list"
                )


class HfWriter:
    """Writes a Hugging Face folder: tensors as they come, one shard in memory at a time.

    Made by `new_hf_folder`. The index, where more than one shard is needed, is made of what was
    written.

    Args:
        folder: an empty folder.
        max_shard_size: bytes after which a shard is closed; a larger tensor has one to itself.
    """

    def __init__(self, folder: Path, max_shard_size: int):
        self.folder = folder
        self.max_shard_size = max_shard_size
        self.total_bytes = 0
        self._shard: dict[str, Tensor] = {}
        self._shard_bytes = 0
        self._shards: list[list[str]] = []
        self._finished = False

    def add(self, name: str, tensor: Tensor) -> None:
        """Take a tensor into the current shard, whose storage must not be changed afterwards."""
        size = tensor.numel() * tensor.element_size()
        if self._shard and self._shard_bytes + size > self.max_shard_size:
            self._close_shard()
        # A view of something larger would keep that in memory.
        whole = tensor.untyped_storage().nbytes() == size and tensor.is_contiguous()
        self._shard[name] = tensor if whole else tensor.clone(memory_format=torch.contiguous_format)
        self._shard_bytes += size
        self.total_bytes += size

    def add_json(self, name: str, value: Mapping[str, Any]) -> None:
        """Write a file as transformers writes its JSON files."""
        text = json.dumps(value, indent=2, sort_keys=True, ensure_ascii=False)
        (self.folder / name).write_text(text + "\n", encoding="utf-8")

    def finish(self) -> None:
        """Close the last shard, give all of them their names and write the index; once."""
        if self._finished:
            return
        self._finished = True
        if self._shard:
            self._close_shard()
        count = len(self._shards)
        if count == 1:
            self._shard_path(1).rename(self.folder / _SAFE)
            return
        weight_map: dict[str, str] = {}
        for number, names in enumerate(self._shards, start=1):
            file = f"model-{number:05d}-of-{count:05d}.safetensors"
            self._shard_path(number).rename(self.folder / file)
            weight_map |= dict.fromkeys(names, file)
        index = {"metadata": {"total_size": self.total_bytes}, "weight_map": weight_map}
        self.add_json(f"{_SAFE}.index.json", index)

    def _close_shard(self) -> None:
        self._shards.append(list(self._shard))
        save_file(self._shard, self._shard_path(len(self._shards)), metadata={"format": "pt"})
        self._shard, self._shard_bytes = {}, 0

    def _shard_path(self, number: int) -> Path:
        return self.folder / f"shard-{number}.partial"


@contextmanager
def new_hf_folder(folder: Path, max_shard_size: int) -> Iterator[HfWriter]:
    """Context with the writer of a new folder, which is there only when all of it is.

    Raises:
        ValueError: if `folder` is occupied.
    """
    with new_folder(folder) as partial:
        writer = HfWriter(partial, max_shard_size)
        yield writer
        writer.finish()


def _is_zip(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(2) == b"PK"


def _json_object(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as failure:
        raise ValueError(f"{path}: is no JSON ({failure})") from failure
    if not isinstance(value, dict):
        raise ValueError(f"{path}: holds no JSON object")
    return value
