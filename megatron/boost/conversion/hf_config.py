"""`config.json` of a Hugging Face folder, to and from a `ModelDescription`.

Read are LLaMA's as transformers 4 and 5 write them, CoLA's and CoLA-M's, and our own. What Megatron
would compute otherwise is refused by name; a setting that is not known is not guessed at.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping
from typing import Any, Literal

import torch

from boost_layers.config import PROJECTIONS, LowRankConfig
from megatron.boost.conversion.description import ModelDescription, RopeSettings

Family = Literal["llama", "cola", "cola-m", "boost"]

ARCHITECTURES: dict[str, Family] = {
    "LlamaForCausalLM": "llama",
    "ColaForCausalLM": "cola",
    "ColaMForCausalLM": "cola-m",
    "BoostForCausalLM": "boost",
}
_MODEL_TYPES: dict[str, Family] = {"llama": "llama", "cola": "cola", "boost": "boost"}

# Megatron 0.19 has these numbers in its code.
_LLAMA3_FIXED = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position": 8192}

# Settings that would change the function, and the only value that the layers have.
_FIXED: dict[str, tuple[Any, ...]] = {
    "attention_bias": (False, None),
    "mlp_bias": (False, None),
    "partial_rotary_factor": (1.0, None),
    "quantization_config": (None,),
    "sliding_window": (None,),
}
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def family_of(config: Mapping[str, Any]) -> Family:
    """Whose names and settings a configuration has.

    Raises:
        ValueError: for another architecture, with the nearest one that is known.
    """
    architectures = config.get("architectures") or [None]
    if not isinstance(architectures, list):
        raise ValueError(
            f"config.json: architectures {architectures!r}: is not a list of names; "
            f"nearest legal value: {[str(architectures)]}"
        )
    named = architectures[0]
    if named is not None and named not in ARCHITECTURES:
        near = difflib.get_close_matches(str(named), ARCHITECTURES, n=1, cutoff=0.0)[0]
        raise ValueError(
            f"architecture {named}: is not one that can be converted "
            f"({', '.join(ARCHITECTURES)}); the nearest is {near}"
        )
    kind = config.get("model_type")
    if named == "LlamaForCausalLM" and kind not in ("llama", None):
        raise ValueError(
            f"config.json: model_type {kind}: does not go with architecture {named}; "
            "nearest legal value: llama"
        )
    if named is not None:
        return ARCHITECTURES[named]
    if kind not in _MODEL_TYPES:
        near = difflib.get_close_matches(str(kind), _MODEL_TYPES, n=1, cutoff=0.0)[0]
        raise ValueError(
            f"model_type {kind}: is not one that can be converted ({', '.join(_MODEL_TYPES)}); "
            f"the nearest is {near}"
        )
    return _MODEL_TYPES[kind]


def description_from_hf(config: Mapping[str, Any]) -> ModelDescription:
    """The model that `config`, the contents of a `config.json`, describes.

    Raises:
        ValueError: for a size that is missing, and for what the layers do not compute.
    """
    family = family_of(config)
    for name, legal in _FIXED.items():
        if config.get(name) not in legal:
            raise ValueError(
                f"config.json: {name} {config[name]}: is not supported; "
                f"nearest legal value: {legal[0]}"
            )
    heads = _size(config, "num_attention_heads")
    hidden = _size(config, "hidden_size")
    kv_heads = _size(config, "num_key_value_heads", heads)
    if heads % kv_heads:
        raise ValueError(
            f"config.json: num_key_value_heads {kv_heads}: does not divide num_attention_heads "
            f"{heads}"
        )
    # CoLA's code makes k and v as wide as q whatever the configuration says.
    kv_heads = heads if family in ("cola", "cola-m") else kv_heads
    head_dim = _size(config, "head_dim", max(1, hidden // heads))
    if head_dim % 2:
        given = config.get("head_dim") is not None
        name, value = ("head_dim", head_dim) if given else ("hidden_size", hidden)
        raise ValueError(
            f"config.json: {name} {value}: makes {heads} heads of {head_dim} channels, which RoPE "
            f"turns in pairs; nearest legal value: {(head_dim + 1) * (1 if given else heads)}"
        )
    eos = _token(config, "eos_token_id", several=True)
    return ModelDescription(
        vocab_size=_size(config, "vocab_size"),
        hidden_size=hidden,
        ffn_hidden_size=_size(config, "intermediate_size"),
        num_layers=_size(config, "num_hidden_layers"),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        max_positions=_size(config, "max_position_embeddings", 2048),
        norm_eps=_number(config, "rms_norm_eps", 1e-6),
        tied=bool(config.get("tie_word_embeddings", False)),
        dtype=dtype_named(config.get("dtype") or config.get("torch_dtype") or "float32"),
        rope=_rope(config),
        low_rank=_low_rank(family, config),
        activation_amount=_number(config, "activation_amount", 1.0),
        bos_token_id=_token(config, "bos_token_id"),
        eos_token_id=tuple(eos) if isinstance(eos, list) else eos,
        pad_token_id=_token(config, "pad_token_id"),
        initializer_range=_number(config, "initializer_range", 0.02),
    )


def hf_from_description(description: ModelDescription) -> dict[str, Any]:
    """The `config.json` of a model: LLaMA's for a dense one, else that of the modelling files in
    `megatron.boost.conversion.modeling`. RoPE and dtype stand in it as transformers 4 and as
    transformers 5 spell them."""
    low_rank = description.low_rank.low_rank
    dtype = str(description.dtype).removeprefix("torch.")
    eos = description.eos_token_id
    config: dict[str, Any] = {
        "architectures": ["BoostForCausalLM" if low_rank else "LlamaForCausalLM"],
        "model_type": "boost" if low_rank else "llama",
        "vocab_size": description.vocab_size,
        "hidden_size": description.hidden_size,
        "intermediate_size": description.ffn_hidden_size,
        "num_hidden_layers": description.num_layers,
        "num_attention_heads": description.num_heads,
        "num_key_value_heads": description.num_kv_heads,
        "head_dim": description.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": description.max_positions,
        "rms_norm_eps": description.norm_eps,
        "tie_word_embeddings": description.tied,
        "attention_bias": False,
        "mlp_bias": False,
        "attention_dropout": 0.0,
        "initializer_range": description.initializer_range,
        "use_cache": True,
        "bos_token_id": description.bos_token_id,
        "eos_token_id": list(eos) if isinstance(eos, tuple) else eos,
        "pad_token_id": description.pad_token_id,
        "dtype": dtype,
        "torch_dtype": dtype,
        **_rope_keys(description.rope),
    }
    if low_rank:
        config |= _boost_keys(description)
    return config


def dtype_named(name: str) -> torch.dtype:
    """The dtype that a configuration or a flag names.

    Raises:
        ValueError: for one that is neither float32, bfloat16 nor float16.
    """
    found = _DTYPES.get(str(name).removeprefix("torch."))
    if found is None:
        raise ValueError(f"dtype {name}: legal values are {', '.join(_DTYPES)}")
    return found


def _size(config: Mapping[str, Any], name: str, default: int | None = None) -> int:
    """A size; `default` where it is missing or null."""
    value = config.get(name)
    value = default if value is None else value
    if type(value) is not int or value < 1:
        raise ValueError(f"config.json: {name} {value}: is not a positive whole number")
    return value


def _number(config: Mapping[str, Any], name: str, default: float | None = None) -> float:
    """A number of zero or more; `default` where it is missing or null."""
    value = config.get(name)
    value = default if value is None else value
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
        raise ValueError(f"config.json: {name} {value!r}: is not a number of zero or more")
    return float(value)


def _token(config: Mapping[str, Any], name: str, *, several: bool = False) -> Any:
    """The id of a special token, None, or with `several` a list of ids."""
    value = config.get(name)
    ids = value if several and isinstance(value, list) else [value]
    for each in ids:
        if value is not None and (type(each) is not int or each < -1):
            kind = "a token's id or a list of them" if several else "a token's id"
            raise ValueError(f"config.json: {name} {value!r}: is not {kind}")
    return value


def _rope(config: Mapping[str, Any]) -> RopeSettings:
    """RoPE from `rope_parameters` (transformers 5) or `rope_theta` and `rope_scaling` (4)."""
    key = "rope_parameters" if config.get("rope_parameters") else "rope_scaling"
    parameters = config.get(key) or {}
    if not isinstance(parameters, Mapping):
        raise ValueError(f"config.json: {key} {parameters!r}: is not an object of settings")
    holds = parameters if parameters.get("rope_theta") is not None else config
    theta = _number(holds, "rope_theta", 10000.0)
    if theta < 1:
        raise ValueError(f"config.json: rope_theta {theta}: nearest legal value: 10000")
    kind = parameters.get("rope_type") or parameters.get("type") or "default"
    if parameters.get("partial_rotary_factor", 1.0) != 1.0:
        raise ValueError(
            f"config.json: partial_rotary_factor {parameters['partial_rotary_factor']}: is not "
            "supported; nearest legal value: 1.0"
        )
    if theta != int(theta):
        raise ValueError(
            f"config.json: rope_theta {theta}: Megatron 0.19's --rotary-base is a whole number; "
            f"nearest legal value: {round(theta)}"
        )
    if kind == "default":
        return RopeSettings(theta=float(theta))
    if kind == "llama3" and parameters.get("factor") is None:
        raise ValueError(f"config.json: {key} of rope_type llama3: has no factor")
    factor = _number(parameters, "factor", 1.0)
    if kind == "linear":
        if factor != int(factor):
            raise ValueError(
                f"config.json: linear rope_scaling of factor {factor}: Megatron 0.19's "
                "--rotary-seq-len-interpolation-factor is a whole number; "
                f"nearest legal value: {max(1, round(factor))}"
            )
        return RopeSettings(theta=float(theta), kind="linear", factor=factor)
    if kind != "llama3":
        raise ValueError(
            f"config.json: rope_type {kind}: Megatron 0.19 cannot run it; "
            "legal values are default, linear, llama3"
        )
    fixed = {
        "low_freq_factor": parameters.get("low_freq_factor", 1.0),
        "high_freq_factor": parameters.get("high_freq_factor", 4.0),
        "original_max_position": parameters.get("original_max_position_embeddings", 8192),
    }
    for name, value in fixed.items():
        if value != _LLAMA3_FIXED[name]:
            raise ValueError(
                f"config.json: llama3 rope_scaling with {name} {value}: Megatron 0.19 runs "
                f"{_LLAMA3_FIXED[name]:g} only"
            )
    return RopeSettings(theta=float(theta), kind="llama3", factor=factor)


def _rope_keys(rope: RopeSettings) -> dict[str, Any]:
    scaling: dict[str, Any] = {"rope_type": rope.kind}
    if rope.kind != "default":
        scaling["factor"] = rope.factor
    if rope.kind == "llama3":
        scaling |= {
            "low_freq_factor": rope.low_freq_factor,
            "high_freq_factor": rope.high_freq_factor,
            "original_max_position_embeddings": rope.original_max_position,
        }
    return {
        "rope_theta": rope.theta,
        "rope_scaling": scaling if rope.kind != "default" else None,
        "rope_parameters": {"rope_theta": rope.theta, **scaling},
    }


def _low_rank(family: Family, config: Mapping[str, Any]) -> LowRankConfig:
    act = {"swish": "silu"}.get(config.get("hidden_act", "silu"), config.get("hidden_act", "silu"))
    if family in ("cola", "cola-m"):
        # The reference code takes hidden_act for φ too, whatever lr_act_type says.
        product = config.get("only_lr_act", True)
        if act not in ("silu", "gelu") or (act != "silu" and not product):
            raise ValueError(
                f"config.json: hidden_act {act}: is not supported; nearest legal value: silu"
            )
        return LowRankConfig(
            arch="cola",
            rank=_size(config, "rank"),
            act=act,
            mlp="product" if product else "swiglu",
        )
    if act != "silu":
        raise ValueError(
            f"config.json: hidden_act {act}: is not supported; nearest legal value: silu"
        )
    if family == "llama":
        return LowRankConfig(arch="dense")
    ranks = config["low_rank_ranks"]
    layers = config.get("low_rank_layers")
    settings = {
        "arch": config["low_rank_arch"],
        "act": config["low_rank_act"],
        "mlp": config["low_rank_mlp"],
        "ranks": ",".join(f"{name}={ranks[f'{name}_proj']}" for name in _short_names()),
        "layers": None if layers is None else f"{layers[0]}-{layers[1]}",
    }
    if settings["arch"] == "lax":
        settings |= {name: config[name] for name in ("lax_base", "lax_gate", "lax_norm")}
    return LowRankConfig(**settings)


def _boost_keys(description: ModelDescription) -> dict[str, Any]:
    """What our modelling files need beside LLaMA's settings."""
    low_rank = description.low_rank
    last = low_rank.last_layer
    keys: dict[str, Any] = {
        "low_rank_arch": low_rank.arch,
        "low_rank_act": low_rank.activation,
        "low_rank_mlp": low_rank.mlp_kind,
        "low_rank_ranks": {name: description.rank_of(name) for name in PROJECTIONS},
        "low_rank_layers": None if last is None else [low_rank.first_layer, last],
        "activation_amount": description.activation_amount,
        "auto_map": {
            "AutoConfig": "configuration_boost.BoostConfig",
            "AutoModelForCausalLM": "modeling_boost.BoostForCausalLM",
        },
    }
    if low_rank.crossing:
        keys |= {name: getattr(low_rank, name) for name in ("lax_base", "lax_gate", "lax_norm")}
    return keys


def _short_names() -> list[str]:
    return [projection.removesuffix("_proj") for projection in PROJECTIONS]
