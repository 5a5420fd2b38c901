"""The demo's corpus: which files, which split, which tokenizer, and its cache."""

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from megatron.core.datasets.indexed_dataset import IndexedDataset
from megatron.core.tokenizers import MegatronTokenizer

from megatron.boost import corpus
from megatron.boost.corpus import is_validation, library_sources, prepare_corpus, train_tokenizer
from tests.support.small_tokenizer import TEXT

REPOSITORY = Path(__file__).parents[2]


@pytest.fixture
def library(tmp_path):
    """A small library of 40 modules, whose names fall on both sides of the split."""
    root = tmp_path / "library"
    root.mkdir()
    for number in range(40):
        (root / f"module_{number}.py").write_text(f"# {number}\n{TEXT}\n")
    return root


def test_sources_are_the_librarys_own_readable_files(tmp_path):
    wanted = {"abc.py": "a = 1\n", "json/decoder.py": "b = 'ü'\n"}
    unwanted = {
        "site-packages/numpy/core.py": b"x",
        "test/test_abc.py": b"x",
        "lib2to3/pgen.py": b"x",
        "config-3.12-x86_64/python-config.py": b"x",
        "_sysconfigdata_linux.py": b"x",
        "latin.py": "ü".encode("latin-1"),
        "json/__init__.py": b"",
        "abc.txt": b"x",
    }
    for name, content in unwanted.items() | {n: t.encode() for n, t in wanted.items()}.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(content)

    assert {source.path: source.text for source in library_sources(tmp_path)} == wanted


def test_this_interpreters_library_is_large_enough_and_sorted():
    sources = library_sources()

    paths = [source.path for source in sources]
    assert paths == sorted(paths)
    assert {"argparse.py", "json/decoder.py"} <= set(paths)
    assert sum(len(source.text) for source in sources) > 5_000_000
    validation = [source for source in sources if is_validation(source.path, 10)]
    assert sum(len(source.text) for source in validation) > 300_000


def test_split_is_a_fixed_function_of_the_path():
    names = [f"package/module_{number}.py" for number in range(5000)]

    share = sum(is_validation(name, 10) for name in names) / len(names)

    assert share == pytest.approx(0.10, abs=0.02)
    # The split of a path must never change, or cached results would stop being comparable.
    assert [name for name in names[:20] if is_validation(name, 10)] == [
        "package/module_6.py",
        "package/module_7.py",
    ]


def test_tokenizer_is_the_same_in_every_process(tmp_path):
    train_tokenizer([TEXT, "def f():\n    pass\n"], 300).save_pretrained(tmp_path / "here")
    script = (
        "import sys; from megatron.boost.corpus import train_tokenizer; "
        f"train_tokenizer([{TEXT!r}, 'def f():\\n    pass\\n'], 300).save_pretrained(sys.argv[1])"
    )
    environment = os.environ | {"PYTHONHASHSEED": "7", "TOKENIZERS_PARALLELISM": "false"}
    subprocess.run(
        [sys.executable, "-c", script, tmp_path / "there"],
        cwd=REPOSITORY,
        env=environment,
        check=True,
    )

    for name in ("tokenizer.json", "tokenizer_config.json"):
        here, there = ((tmp_path / side / name).read_bytes() for side in ("here", "there"))
        assert hashlib.sha256(here).digest() == hashlib.sha256(there).digest()


@pytest.mark.parametrize("size", [257, 2000])
def test_a_vocabulary_that_cannot_be_had_is_refused(size):
    with pytest.raises(ValueError, match=f"vocabulary size {size}"):
        train_tokenizer([TEXT], size)


def test_megatron_loads_the_tokenizer_without_a_network(tmp_path, library, monkeypatch):
    made = prepare_corpus(tmp_path, vocabulary_size=280, validation_percent=30, root=library)

    def refuse(*args, **kwargs):
        raise AssertionError("a connection was tried")

    monkeypatch.setattr("socket.socket.connect", refuse)
    monkeypatch.setattr("socket.getaddrinfo", refuse)
    tokenizer = MegatronTokenizer.from_pretrained(made.tokenizer_model, {"library": "huggingface"})

    assert (tokenizer.vocab_size, tokenizer.eod, tokenizer.pad) == (280, 0, 1)
    text = "class Ü:\n\tdef f(self) -> '😀':  # two  blanks\r\n"
    assert tokenizer.detokenize(tokenizer.tokenize(text)) == text


def test_data_sets_hold_the_files_of_each_side(tmp_path, library):
    made = prepare_corpus(tmp_path, vocabulary_size=280, validation_percent=30, root=library)

    tokenizer = MegatronTokenizer.from_pretrained(made.tokenizer_model, {"library": "huggingface"})
    sources = library_sources(library)
    for path, validation in ((made.train_data_path, False), (made.validation_data_path, True)):
        expected = [
            source.text for source in sources if is_validation(source.path, 30) == validation
        ]
        dataset = IndexedDataset(path)
        documents = [ids.tolist() for ids in dataset]
        assert [ids[-1] for ids in documents] == [tokenizer.eod] * len(expected)
        assert [tokenizer.detokenize(ids[:-1]) for ids in documents] == expected
    assert made.train_files + made.validation_files == 40
    assert made.train_tokens == sum(IndexedDataset(made.train_data_path).sequence_lengths)


def test_corpus_is_made_once_and_again_when_anything_changes(tmp_path, library):
    def prepare(**settings):
        stages = []
        made = prepare_corpus(
            tmp_path / "cache",
            root=library,
            on_stage=stages.append,
            **{"vocabulary_size": 280, "validation_percent": 30} | settings,
        )
        return made, stages

    first, stages = prepare()
    assert len(stages) == 3
    again, stages = prepare()
    assert again == first
    assert stages == []
    other_split, _ = prepare(validation_percent=50)
    other_size, _ = prepare(vocabulary_size=270)
    (library / "module_0.py").write_text("changed")
    other_text, _ = prepare()
    paths = {made.train_data_path for made in (first, other_split, other_size, other_text)}
    assert len(paths) == 4
    assert len(list((tmp_path / "cache").iterdir())) == 4


def test_an_interrupted_build_leaves_nothing_behind(tmp_path, library, monkeypatch):
    def interrupt(*args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr(corpus, "preprocess", interrupt)
    with pytest.raises(KeyboardInterrupt):
        prepare_corpus(tmp_path / "cache", vocabulary_size=280, root=library)

    assert list((tmp_path / "cache").iterdir()) == []


def test_another_process_may_finish_first(tmp_path, library, monkeypatch):
    build = corpus._build

    def build_twice(folder, *arguments):
        build(folder, *arguments)
        final = folder.with_name(folder.name.split(".")[0])
        build(final, *arguments)

    monkeypatch.setattr(corpus, "_build", build_twice)
    made = prepare_corpus(tmp_path, vocabulary_size=280, validation_percent=30, root=library)

    assert json.loads((Path(made.tokenizer_model).parent / "corpus.json").read_text())
    assert len(list(tmp_path.glob("corpus-*"))) == 1


def test_a_library_with_one_side_empty_is_refused(tmp_path):
    (tmp_path / "only.py").write_text("x = 1\n")

    with pytest.raises(ValueError, match="files to validate on"):
        prepare_corpus(tmp_path / "cache", root=tmp_path)
