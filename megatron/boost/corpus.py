"""The demo's corpus: the Python standard library's own source, with a tokenizer trained on it.

Every machine that runs this has the text already, so nothing is downloaded. Files, not documents
cut from them, are split into train and validation: no text of a validation file is trained on.
"""

import hashlib
import json
import os
import platform
import shutil
import sysconfig
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

from megatron.boost.preprocessing.encoding import EncodingSettings
from megatron.boost.preprocessing.pipeline import preprocess

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

END_OF_DOCUMENT = "<|endoftext|>"
PADDING = "<|padding|>"

# No library source: installed packages, tests (many are broken on purpose), generated text.
_EXCLUDED_FOLDERS = {
    "site-packages",
    "dist-packages",
    "test",
    "tests",
    "idle_test",
    "lib2to3",
    "pydoc_data",
    "__pycache__",
}
_EXCLUDED_PREFIXES = ("config-", "_sysconfigdata")

_LAYOUT_VERSION = 1
_SUMMARY = "corpus.json"


@dataclass(frozen=True)
class Source:
    """One source file: its path below the library's folder, and its text."""

    path: str
    text: str


@dataclass(frozen=True)
class Corpus:
    """A prepared corpus, in the words of Megatron's flags."""

    train_data_path: str
    """For `--train-data-path`."""
    validation_data_path: str
    """For `--valid-data-path`."""
    tokenizer_model: str
    """For `--tokenizer-model`."""
    vocabulary_size: int
    train_files: int
    validation_files: int
    train_tokens: int
    validation_tokens: int


def library_sources(root: Path | None = None) -> list[Source]:
    """The .py files below `root` (default: the running interpreter's library), sorted by path.

    Left out: installed packages, tests, generated files, empty files and those that are not UTF-8.
    """
    root = Path(sysconfig.get_path("stdlib")) if root is None else root
    sources = []
    for file in root.rglob("*.py"):
        path = file.relative_to(root)
        if _EXCLUDED_FOLDERS.intersection(path.parts):
            continue
        if any(part.startswith(_EXCLUDED_PREFIXES) for part in path.parts):
            continue
        try:
            text = file.read_bytes().decode("utf-8")
        except UnicodeDecodeError:
            continue
        if text:
            sources.append(Source(path.as_posix(), text))
    return sorted(sources, key=lambda source: source.path)


def is_validation(path: str, percent: int) -> bool:
    """Whether the file of this relative path belongs to validation: about `percent` of all do.

    Depends on the path alone, so files that come or go do not move any other.
    """
    digest = hashlib.sha256(path.encode()).digest()
    return int.from_bytes(digest[:8]) % 100 < percent


def train_tokenizer(texts: Iterable[str], vocabulary_size: int) -> "PreTrainedTokenizerFast":
    """Train a byte-level BPE of exactly `vocabulary_size` tokens, the same one every time.

    Any text survives encoding and decoding unchanged. Token 0 ends a document, token 1 is padding;
    a padding token of its own keeps Megatron from masking the end of a document out of the loss.
    Raises `ValueError` when the size leaves no room for the bytes or `texts` for that many tokens.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    special = [END_OF_DOCUMENT, PADDING]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    smallest = len(special) + len(alphabet)
    if vocabulary_size < smallest:
        raise ValueError(
            f"vocabulary size {vocabulary_size}: a byte-level vocabulary has at least "
            f"{smallest} tokens"
        )
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary_size,
        special_tokens=special,
        initial_alphabet=alphabet,
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    if tokenizer.get_vocab_size() != vocabulary_size:
        raise ValueError(
            f"vocabulary size {vocabulary_size}: the text gives only "
            f"{tokenizer.get_vocab_size()} tokens"
        )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=END_OF_DOCUMENT,
        pad_token=PADDING,
        clean_up_tokenization_spaces=False,
    )


def prepare_corpus(
    cache: Path,
    *,
    vocabulary_size: int = 4096,
    validation_percent: int = 10,
    root: Path | None = None,
    on_stage: Callable[[str], None] = lambda stage: None,
) -> Corpus:
    """Return the corpus from `cache`, making it first if it is not there.

    Its folder is named by a hash of everything that decides its content: the interpreter's version,
    the files, the settings and the versions of the tokenizer libraries. It is made under a
    temporary name and renamed when whole. `on_stage` is told, in words, what is being done.
    """
    sources = library_sources(root)
    validation = [file for file in sources if is_validation(file.path, validation_percent)]
    train = [file for file in sources if not is_validation(file.path, validation_percent)]
    if not train or not validation:
        raise ValueError(
            f"a corpus needs files to train and files to validate on; found {len(train)} and "
            f"{len(validation)}"
        )
    folder = cache / f"corpus-{_key(sources, vocabulary_size, validation_percent)}"
    if not (folder / _SUMMARY).is_file():
        partial = cache / f"{folder.name}.{os.getpid()}.partial"
        try:
            _build(partial, train, validation, vocabulary_size, on_stage)
            _rename_unless_there(partial, folder)
        finally:
            shutil.rmtree(partial, ignore_errors=True)
    counts = json.loads((folder / _SUMMARY).read_text(encoding="utf-8"))
    return Corpus(
        train_data_path=str(folder / "train_text_document"),
        validation_data_path=str(folder / "validation_text_document"),
        tokenizer_model=str(folder / "tokenizer"),
        **counts,
    )


@dataclass(frozen=True)
class _Counts:
    vocabulary_size: int
    train_files: int
    validation_files: int
    train_tokens: int
    validation_tokens: int


def _build(
    folder: Path,
    train: Sequence[Source],
    validation: Sequence[Source],
    vocabulary_size: int,
    on_stage: Callable[[str], None],
) -> None:
    folder.mkdir(parents=True)
    on_stage(f"training a tokenizer of {vocabulary_size} tokens on {len(train)} files")
    tokenizer = train_tokenizer((source.text for source in train), vocabulary_size)
    tokenizer.save_pretrained(folder / "tokenizer")
    settings = EncodingSettings(str(folder / "tokenizer"), append_eod=True)
    tokens = {}
    for name, sources in (("train", train), ("validation", validation)):
        on_stage(f"tokenising the {name} files ({len(sources)})")
        documents = folder / f"{name}.jsonl"
        with documents.open("w", encoding="utf-8") as file:
            file.writelines(json.dumps(asdict(source)) + "\n" for source in sources)
        tokens[name] = preprocess([documents], str(folder / name), settings).tokens["text"]
    counts = _Counts(
        vocabulary_size, len(train), len(validation), tokens["train"], tokens["validation"]
    )
    (folder / _SUMMARY).write_text(json.dumps(asdict(counts), indent=2) + "\n", encoding="utf-8")


def _rename_unless_there(partial: Path, folder: Path) -> None:
    try:
        partial.rename(folder)
    except OSError:
        # Somebody else finished the same corpus first; theirs is as good.
        if not (folder / _SUMMARY).is_file():
            raise


def _key(sources: Sequence[Source], vocabulary_size: int, validation_percent: int) -> str:
    text = hashlib.sha256()
    for source in sources:
        text.update(f"{source.path}\0{len(source.text)}\0{source.text}".encode())
    settings = {
        "layout": _LAYOUT_VERSION,
        "python": platform.python_version(),
        "text": text.hexdigest(),
        "vocabulary_size": vocabulary_size,
        "validation_percent": validation_percent,
        "tokenizers": version("tokenizers"),
        "transformers": version("transformers"),
    }
    return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:16]
