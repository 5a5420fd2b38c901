"""Every flag of Megatron's is classified, and none that our layers would ignore is accepted."""

from __future__ import annotations

import dataclasses
import enum
from argparse import Action
from functools import cache
from typing import Any

import pytest
from megatron.core.transformer.transformer_config import TransformerConfig

from boost_layers.config import LowRankConfig
from boost_layers.rules import UNKNOWN, refused, rules
from boost_layers.transformer_features import TRANSFORMER_FIELDS, transformer_fields
from boost_layers.validation import validate_features
from megatron.boost.flags_page import pages
from megatron.boost.megatron_flags import (
    FLAGS,
    GROUPS,
    megatron_actions,
    megatron_parser,
    refuse_unsupported,
    rule_of,
)
from tests.support.single_layer import llama_config

COLA = LowRankConfig(arch="cola", rank=4)
LLAMA = "--normalization RMSNorm --swiglu --disable-bias-linear --position-embedding-type rope"
# Megatron has it where a package is installed that is not on the index.
OPTIONAL_GROUPS = {"kitchen"}


@cache
def actions() -> list[tuple[str, Action]]:
    """Every flag with the title of its group."""
    groups = megatron_actions(megatron_parser())
    return [(title, action) for title, found in groups.items() for action in found]


def test_every_flag_is_classified() -> None:
    assert len(actions()) > 800
    missing = [a.option_strings[0] for title, a in actions() if rule_of(a.dest, title) is UNKNOWN]
    assert missing == []


def test_every_field_of_the_transformer_is_classified() -> None:
    names = {field.name for field in dataclasses.fields(TransformerConfig)}
    assert names == set(TRANSFORMER_FIELDS)
    assert len(names) > 240


def test_the_tables_name_nothing_that_megatron_has_not() -> None:
    destinations = {action.dest for _, action in actions()}
    assert set(FLAGS) - destinations == set()
    assert set(GROUPS) - {title for title, _ in actions()} == OPTIONAL_GROUPS


def test_a_group_has_one_rule_only_where_no_flag_of_it_touches_the_layer() -> None:
    for title, action in actions():
        if title in GROUPS and GROUPS[title].outcome != "refused":
            assert GROUPS[title].outcome == "apart"
            assert rule_of(action.dest, title).outcome == "apart", action.dest


@pytest.mark.parametrize(
    "title",
    ["transformer configuration", "network size", "training", "experimental", "distributed init"],
)
def test_a_new_flag_beside_those_that_touch_the_layer_is_not_classified(title: str) -> None:
    parser = megatron_parser()
    (group,) = (group for group in parser._action_groups if group.title == title)
    group.add_argument("--brand-new-attention", action="store_true")
    (action,) = (a for a in parser._actions if a.dest == "brand_new_attention")

    assert rule_of(action.dest, title) is UNKNOWN
    argv = [*LLAMA.split(), "--brand-new-attention"]
    with pytest.raises(ValueError, match="^--brand-new-attention: not supported by"):
        refuse_unsupported(parser, parser.parse_args(argv), argv, "cola")


def test_a_new_flag_of_a_refused_group_is_refused() -> None:
    assert rule_of("moe_brand_new", "moe").outcome == "refused"


def test_a_name_has_one_rule() -> None:
    with pytest.raises(ValueError, match="^a has two rules$"):
        rules((refused("x"), "a b"), (refused("y"), "c a"))


def other_value(action: Action, legal: set[str]) -> list[str] | None:
    """What a user would type for a flag to have another value than its default and the legal
    ones; None where there is none."""
    if action.nargs == 0:
        return []
    if action.choices:
        choices = [getattr(choice, "name", str(choice)) for choice in action.choices]
        default = getattr(action.default, "name", str(action.default))
        others = [c for c in choices if c not in legal and c != default]
        return others[:1] or None
    converters = {int: "7", float: "0.375", str: "word", None: "word"}
    if action.type in converters:
        number = action.nargs if isinstance(action.nargs, int) else 1
        return [converters[action.type]] * number
    return {
        "window_size": ["4,0"],
        "window_attn_skip_freq": ["2"],
        "no_rope_freq": ["2"],
        "moe_layer_freq": ["2"],
        "linear_attention_freq": ["2"],
        "cuda_graph_modules": ["attn"],
        "cuda_graph_scope_deprecated": ["attn"],
        "inference_cuda_graph_scope": ["layer"],
    }[action.dest]


def refused_flags() -> list[tuple[str, Action]]:
    return [(t, a) for t, a in actions() if rule_of(a.dest, t).outcome == "refused"]


def test_each_flag_that_is_refused_is_refused_by_its_name() -> None:
    """With each of its names, given to a model that is accepted without it."""
    parser = megatron_parser()
    base = LLAMA.split()
    refuse_unsupported(parser, parser.parse_args(base), base, "cola")
    tried = 0
    for title, action in refused_flags():
        rule = rule_of(action.dest, title)
        legal = {str(value) for value in rule.legal or ()}
        value = other_value(action, legal)
        if action.dest in ("add_bias_linear", "swiglu") or value is None:
            continue
        for option in action.option_strings:
            if action.nargs == 0 and option.startswith("--no-") and not action.default:
                continue  # The negation of a flag that is off.
            argv = [*base, option, *value]
            with pytest.raises(ValueError) as caught:
                refuse_unsupported(parser, parser.parse_args(argv), argv, "cola")
            message = str(caught.value)
            assert message.startswith(option), (option, message)
            assert (
                f": not supported by --low-rank-arch cola; nearest legal value: {rule.proposal}"
                in (message)
            )
            tried += 1
    assert tried > 250


@pytest.mark.parametrize("left_out", ["--swiglu", "--disable-bias-linear", "--normalization"])
def test_what_a_llama_block_needs_is_asked_for(left_out: str) -> None:
    parser = megatron_parser()
    argv = LLAMA.split()
    begin = argv.index(left_out)
    del argv[begin : begin + (2 if left_out == "--normalization" else 1)]
    with pytest.raises(ValueError, match="nearest legal value: "):
        refuse_unsupported(parser, parser.parse_args(argv), argv, "cola")
    # A checkpoint may bring it.
    argv += ["--use-checkpoint-args"]
    refuse_unsupported(parser, parser.parse_args(argv), argv, "cola")


@pytest.mark.parametrize(
    "flags",
    [
        "--use-rotary-position-embeddings",
        "--position-embedding-type yarn --rotary-scaling-factor 4 --mscale 1.5",
        "--hidden-dropout 0 --attention-dropout 0.0",
        "--num-experts 0 --context-parallel-size 1 --cp-comm-type p2p",
        "--cpu-offloading-num-layers 0 --cuda-graph-impl none --softmax-type vanilla",
        "--transformer-impl local --rope-type rope --glu-linear-offset 0",
        "--tensor-model-parallel-size 2 --expert-tensor-parallel-size 2 "
        "--tensor-parallel-num-weight-shards 2",
        "--no-masked-softmax-fusion --no-rope-fusion --no-bias-swiglu-fusion "
        "--no-persist-layer-norm --no-gradient-accumulation-fusion --no-bias-dropout-fusion",
    ],
)
def test_legal_values_are_accepted(flags: str) -> None:
    parser = megatron_parser()
    argv = LLAMA.split()[:-2] + (
        [] if "rotary-position" in flags else ["--position-embedding-type", "rope"]
    )
    argv += flags.split()
    refuse_unsupported(parser, parser.parse_args(argv), argv, "cola")


def changed(name: str, default: Any) -> Any:
    """Another value for a field of `TransformerConfig`."""
    if isinstance(default, bool):
        return not default
    if isinstance(default, int | float):
        return default + 1
    if isinstance(default, enum.Enum):
        return next(member for member in type(default) if member is not default)
    return "something else"


def test_each_field_that_is_refused_is_refused_in_a_program() -> None:
    for name, rule in TRANSFORMER_FIELDS.items():
        if rule.outcome != "refused":
            continue
        config = llama_config()
        setattr(config, name, changed(name, getattr(config, name)))
        with pytest.raises(ValueError, match="not supported by --low-rank-arch cola; ") as caught:
            validate_features(COLA, config)
        assert str(caught.value).startswith("--") or name == "gated_linear_unit"


def test_a_field_of_a_later_release_may_only_have_its_default(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    @dataclasses.dataclass
    class Later:
        brand_new_attention: bool = False

    (field,) = dataclasses.fields(Later)
    known = transformer_fields()
    monkeypatch.setattr(
        "boost_layers.validation.transformer_fields", lambda: {**known, field.name: field}
    )
    config = llama_config()
    config.brand_new_attention = False
    validate_features(COLA, config)
    config.brand_new_attention = True
    with pytest.raises(ValueError, match="^--brand-new-attention: not supported by"):
        validate_features(COLA, config)


def test_the_documentation_is_what_the_tables_say() -> None:
    for path, text in pages().items():
        assert path.read_text(encoding="utf-8") == text, (
            f"{path.name} is out of date: python -m megatron.boost.flags_page"
        )


def test_the_page_names_every_flag() -> None:
    (text,) = (text for path, text in pages().items() if path.name == "megatron-flags.md")
    for title, action in actions():
        assert title in GROUPS or f"`{action.option_strings[0]}`" in text, action
