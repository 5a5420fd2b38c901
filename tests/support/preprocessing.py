"""What the tests of preprocessing share: texts, input files, and Megatron's own output for them."""

import gzip
import json
from collections.abc import Iterable
from pathlib import Path

import zstandard
from megatron.core.datasets.indexed_dataset import DType, IndexedDataset, IndexedDatasetBuilder
from megatron.core.tokenizers import MegatronTokenizer

TEXTS = [
    "the quick brown fox",
    "def f(x):\n\treturn x  # tabs,  blanks\r\n\n",
    "ünïcödé — 漢字 😀",
    " ",
    "the lazy dog " * 200,
]


def json_lines(texts: Iterable[str], key: str = "text") -> bytes:
    """One document a line."""
    return "".join(json.dumps({key: text}) + "\n" for text in texts).encode()


def write_jsonl(path: Path, texts: Iterable[str], key: str = "text") -> Path:
    """Write one document a line to `path`; returns it."""
    path.write_bytes(json_lines(texts, key))
    return path


def write_compressed(path: Path, content: bytes) -> Path:
    """Write `content` as the suffix of `path` says: in two members or frames, or as it is."""
    compress = {".gz": gzip.compress, ".zst": zstandard.compress}.get(path.suffix, bytes)
    half = len(content) // 2
    path.write_bytes(compress(content[:half]) + compress(content[half:]))
    return path


def megatron_tokenizer(folder: str | Path) -> MegatronTokenizer:
    """The tokenizer as Megatron loads it."""
    return MegatronTokenizer.from_pretrained(str(folder), {"library": "huggingface"})


def megatron_bytes(
    folder: Path, tokenizer_model: str | Path, texts: Iterable[str], *, append_eod: bool = False
) -> dict[str, bytes]:
    """`.bin` and `.idx` that Megatron's tokenizer and builder make of `texts`, one by one."""
    tokenizer = megatron_tokenizer(tokenizer_model)
    dtype = DType.optimal_dtype(tokenizer.vocab_size)
    builder = IndexedDatasetBuilder(str(folder / "megatron.bin"), dtype=dtype)
    for text in texts:
        ids = tokenizer.tokenize(text)
        if append_eod:
            ids.append(tokenizer.eod)
        builder.add_document(ids, [len(ids)])
    builder.finalize(str(folder / "megatron.idx"))
    return {suffix: (folder / f"megatron{suffix}").read_bytes() for suffix in (".bin", ".idx")}


def bytes_of(prefix: str | Path) -> dict[str, bytes]:
    """`.bin` and `.idx` of the data set at `prefix`."""
    return {suffix: Path(f"{prefix}{suffix}").read_bytes() for suffix in (".bin", ".idx")}


def documents_of(prefix: str | Path) -> list[list[int]]:
    """The ids that Megatron reads from the data set at `prefix`."""
    # Copied while the data set lives: it unmaps the file under its arrays when it goes.
    dataset = IndexedDataset(str(prefix))
    return [ids.tolist() for ids in dataset]


def files_of(folder: Path) -> list[str]:
    """The names of what is in `folder`."""
    return sorted(path.name for path in folder.iterdir())
