"""The command line's flags are the fields of two dataclasses: names, choices, defaults, help."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from argparse import ArgumentParser
from pathlib import Path
from typing import Any

import pytest

from boost_layers.config import LowRankConfig
from megatron.boost.arguments import LaunchConfig, add_boost_flags
from megatron.boost.flags import add_flags, config_from, flags_of

REPOSITORY = Path(__file__).parents[2]

# Rows of the interface's table: the default and, where the value is one of a few, the choices.
INTERFACE: dict[str, tuple[Any, tuple[str, ...]]] = {
    "--device": ("auto", ("auto", "cuda", "cpu")),
    "--low-rank-arch": ("none", ("none", "dense", "cola", "svd", "lax")),
    "--low-rank-tp": ("btp", ("btp", "vanilla")),
    "--low-rank-ratio": (0.25, ()),
    "--low-rank-rank": (None, ()),
    "--low-rank-attn-rank": (None, ()),
    "--low-rank-mlp-rank": (None, ()),
    "--low-rank-ranks": (None, ()),
    "--low-rank-layers": (None, ()),
    "--lax-base": ("cola", ("cola", "svd")),
    "--lax-gate": ("tensor", ("identity", "linear", "tensor")),
    "--lax-norm": ("layernorm", ("none", "layernorm", "rmsnorm")),
    "--low-rank-recompute": (False, ()),
    # Beyond the interface: options of the one above.
    "--low-rank-recompute-residual": (False, ()),
    "--low-rank-recompute-shard": (False, ()),
    "--low-rank-act": ("auto", ("auto", "silu", "gelu", "identity")),
    "--low-rank-act-anneal": (0, ()),
    "--low-rank-mlp": ("auto", ("auto", "swiglu", "product")),
    "--low-rank-norm": ("online", ("online", "sync")),
    "--no-low-rank-grouping": (True, ()),
    "--low-rank-vanilla-attention": ("sliced", ("sliced", "replicated")),
    "--low-rank-comm-report": (None, ()),
    "--low-rank-log-latents-interval": (0, ()),
    "--core-attention": ("auto", ("auto", "te", "sdpa", "local")),
    "--verbose": (False, ()),
}
# They come with the issues that build them: a flag is never accepted and ignored.
LATER = ("--low-rank-overlap",)


def parser() -> ArgumentParser:
    return add_boost_flags(ArgumentParser(allow_abbrev=False))


def test_the_flags_are_those_of_the_interface() -> None:
    flags = {flag.name: flag for cls in (LowRankConfig, LaunchConfig) for flag in flags_of(cls)}

    assert {name: (flag.default, flag.choices) for name, flag in flags.items()} == INTERFACE


@pytest.mark.parametrize("name", LATER)
def test_flags_of_later_issues_do_not_exist(name: str) -> None:
    with pytest.raises(ValueError, match=f"^{name}: no such flag; the nearest is --"):
        parser().parse_args([name, "2"])


@pytest.mark.parametrize("cls", [LowRankConfig, LaunchConfig])
def test_without_flags_a_config_has_its_defaults(cls: type) -> None:
    assert config_from(parser().parse_args([]), cls) == cls()


@pytest.mark.parametrize("cls", [LowRankConfig, LaunchConfig])
def test_every_field_is_set_by_its_flag_alone(cls: type) -> None:
    others = {"rank": 7, "attn_rank": 7, "mlp_rank": 7, "ratio": 0.5, "comm_report": "file.json"}
    others |= {"log_latents_interval": 7}
    others |= {"ranks": "q=7,down=9", "layers": "1-2", "act_anneal": 7}
    # Settings that mean nothing alone are refused without what they belong to.
    needs = {
        "act_anneal": {"low_rank_arch": "cola"},
        "lax_base": {"low_rank_arch": "lax"},
        "lax_gate": {"low_rank_arch": "lax"},
        "lax_norm": {"low_rank_arch": "lax"},
        "recompute": {"low_rank_arch": "cola"},
        "recompute_residual": {"low_rank_arch": "cola", "low_rank_recompute": True},
        "recompute_shard": {"low_rank_arch": "cola", "low_rank_recompute": True},
    }
    for flag in flags_of(cls):
        value: Any
        if flag.kind is bool:
            words, value = [flag.name], not flag.default
        else:
            value = others.get(flag.field) or flag.choices[-1]
            words = [flag.name, str(value)]
        arguments, without = parser().parse_args(words), parser().parse_args([])
        for needed in (arguments, without):
            vars(needed).update(needs.get(flag.field, {}))
        config, default = config_from(arguments, cls), config_from(without, cls)
        assert dataclasses.asdict(config) == {**dataclasses.asdict(default), flag.field: value}


def test_a_default_typed_out_is_the_default() -> None:
    for cls in (LowRankConfig, LaunchConfig):
        for flag in flags_of(cls):
            if flag.default is not None and flag.kind is not bool:
                arguments = parser().parse_args([f"{flag.name}={flag.default}"])
                assert config_from(arguments, cls) == cls()


def test_the_report_takes_a_file_or_none() -> None:
    def report(*words: str) -> Any:
        return config_from(parser().parse_args(words), LaunchConfig).comm_report

    assert report() is None
    assert report("--low-rank-comm-report") == ""
    assert report("--low-rank-comm-report", "--verbose") == ""
    assert report("--low-rank-comm-report", "a.json") == "a.json"


def test_help_is_the_fields_docstrings() -> None:
    text = " ".join(parser().format_help().split())
    for cls in (LowRankConfig, LaunchConfig):
        for flag in flags_of(cls):
            assert len(flag.help) > 30
            # argparse may break a line after a hyphen.
            assert flag.help.replace(" ", "") in text.replace(" ", "")
    assert "(default: 0.25)" in text


def test_a_docstring_with_a_percent_sign_is_printed_as_it_is() -> None:
    printed = ArgumentParser()
    add_flags(printed, WithPercent, "group")
    assert "keep 90% of it (default: 0.9)" in printed.format_help()


@dataclasses.dataclass
class WithPercent:
    share: float = dataclasses.field(default=0.9, metadata={"flag": "--share"})
    """keep 90% of it"""


@pytest.mark.slow
def test_the_script_prints_megatrons_help_and_ours() -> None:
    run = subprocess.run(
        [sys.executable, "pretrain_gpt.py", "--help"],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert run.returncode == 0
    assert run.stderr == ""
    assert "--num-layers" in run.stdout
    for name in INTERFACE:
        assert name in run.stdout
