"""What csrc refuses, by name."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from boost_layers import ops
from tests.support.op_cases import (
    LATENT_NORM_EPS,
    Sample,
    operator,
    operator_samples,
)
from tests.support.served import (
    no_csrc,
    skip_if_not_there,
)


def bad(sample: Sample, name: str, kind: str) -> dict[str, Any]:
    """The sample with its argument `name` (of a list, the last one) spoiled."""
    spoil: dict[str, Callable[[Tensor], Tensor]] = {
        "dtype": lambda t: t.to(torch.int32),
        "dimensions": lambda t: t[None, None].contiguous(),
        "device": lambda t: t.to("cpu" if t.is_cuda else "cuda"),
    }
    arguments = dict(sample.arguments)
    given = arguments[name]
    if isinstance(given, list):
        arguments[name] = [*given[:-1], spoil[kind](given[-1])]
    else:
        arguments[name] = spoil[kind](given)
    return arguments


def refusals(device: str) -> list[tuple[Sample, str]]:
    """Every operator with each of its tensors once."""
    found = {}
    for sample in operator_samples(device):
        for name in sample.tensor_names():
            found[sample.operator, name] = (sample, name)
    return list(found.values())


CPU_REFUSALS = [f"{sample.operator}-{name}" for sample, name in refusals("cpu")]


def assert_refused(operator_name: str, arguments: dict[str, Any], argument: str) -> None:
    with pytest.raises(ValueError) as refused:
        operator(operator_name)(**arguments)
    message = str(refused.value).splitlines()[0]
    assert message.startswith(f"{operator_name}: "), message
    words = {"tensors": "tensors?|heads?", "grads": "tensors?"}
    assert re.search(rf"\b({words.get(argument, argument)})\b", message), message


@pytest.mark.parametrize("kind", ["dtype", "dimensions"])
@pytest.mark.parametrize("which", range(len(CPU_REFUSALS)), ids=CPU_REFUSALS)
def test_what_does_not_fit_is_refused_by_name(csrc_device: str, which: int, kind: str) -> None:
    sample, name = refusals(csrc_device)[which]
    with pytest.raises(ValueError) as refused:
        operator(sample.operator)(**bad(sample, name, kind))
    message = str(refused.value).splitlines()[0]
    assert message.startswith(f"{sample.operator}: "), message
    # Where two disagree, either may be named.
    names = "|".join(["tensor", *sample.arguments])
    assert re.search(rf"\b({names})\b", message), message


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_tensors_elsewhere_are_refused() -> None:
    skip_if_not_there("csrc", "cuda")
    for sample, name in refusals("cuda"):
        alone = len(sample.tensor_names()) == 1 and not isinstance(sample.arguments[name], list)
        if alone:
            continue  # Nothing to disagree with.
        with pytest.raises(ValueError, match=f"^{sample.operator}: .* must be on "):
            operator(sample.operator)(**bad(sample, name, "device"))


def t(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.ones(shape, dtype=dtype)


MISFITS: list[tuple[str, str, dict[str, Any]]] = [
    ("sum_of_squares", "x", {"x": t(4)}),
    ("rms_stats", "slots", {"slots": t(3, 6, dtype=torch.bfloat16)}),
    ("rms_stats", "slots", {"slots": t(4, 5, dtype=torch.bfloat16)}),
    ("rms_stats", "slots", {"slots": t(4, 2), "tp_rank": 0}),
    ("rms_stats", "slots", {"slots": t(4, 1, dtype=torch.float16), "tp_rank": 0}),
    ("rms_stats", "slots", {"slots": t(6, 4, dtype=torch.bfloat16).t()}),
    ("rms_stats", "tp_rank", {"tp_rank": 2}),
    ("rms_stats", "tp_rank", {"tp_rank": -1}),
    ("residual_add_rms_stats", "delta", {"delta": t(4, 6)}),
    ("residual_add_rms_stats", "delta", {"delta": t(4, 5, dtype=torch.float64)}),
    ("residual_add_rms_stats", "x", {"x": t(5, 4).t()}),
    ("read_statistics", "block", {"block": t(4, 4, dtype=torch.bfloat16)}),
    ("read_statistics", "block", {"block": t(4, 0, dtype=torch.bfloat16)}),
    ("read_statistics", "block", {"block": t(4, 1, dtype=torch.float16)}),
    ("read_statistics", "block", {"block": t(4, 2)}),
    ("residual_gradient", "x", {"x": t(4, 6)}),
    ("residual_gradient", "ds", {"ds": t(4)}),
    ("residual_gradient", "ds", {"ds": t(4, 1, dtype=torch.float64)}),
    ("latent_epilogue", "ranks", {"ranks": [5, 2]}),
    ("latent_epilogue", "ranks", {"ranks": []}),
    ("latent_epilogue", "ranks", {"ranks": [2, 2, 2, 2]}),
    ("latent_epilogue", "activation", {"activation": "relu"}),
    ("latent_epilogue", "norm", {"norm": "batchnorm"}),
    ("latent_epilogue", "weight", {"norm": "rmsnorm"}),
    ("latent_epilogue", "weight", {"weight": t(8)}),
    ("latent_epilogue", "weight", {"weight": t(7), "norm": "rmsnorm"}),
    ("latent_epilogue", "bias", {"weight": t(8), "norm": "layernorm"}),
    ("latent_epilogue", "bias", {"weight": t(8), "bias": t(8), "norm": "rmsnorm"}),
    ("latent_epilogue", "gated", {"gated": t(4, 7)}),
    ("latent_epilogue", "gated", {"gated": t(4, 8, dtype=torch.bfloat16)}),
    ("latent_epilogue", "statistics", {"statistics": t(3, 1)}),
    ("latent_epilogue", "statistics", {"statistics": t(4, 1, dtype=torch.bfloat16)}),
    ("latent_epilogue", "statistics", {"statistics": t(4, 4, dtype=torch.bfloat16)}),
    ("latent_epilogue", "statistics", {"statistics": t(4, 3)}),
    ("latent_epilogue", "h", {"h": t(4, 8, dtype=torch.bfloat16)}),
    ("latent_epilogue", "h", {"h": t(4, 8, dtype=torch.float64)}),
    ("latent_epilogue_backward", "h", {"h": None}),
    ("latent_epilogue_backward", "dz", {"dz": t(31)}),
    ("latent_epilogue_backward", "h", {"h": t(4, 8, dtype=torch.float64)}),
    ("latent_epilogue_backward", "h", {"v": t(4, 8), "h": t(2, 8), "statistics": t(4, 1)}),
    ("latent_epilogue_backward", "h", {"h": None, "v": t(4, 8), "statistics": t(4, 1)}),
    ("latent_epilogue_backward", "dv", {"dv": t(4, 7)}),
    ("latent_epilogue_backward", "v", {"v": t(4, 8, dtype=torch.bfloat16)}),
    ("fold_gamma", "weights", {"weights": []}),
    ("fold_gamma", "weights", {"weights": [t(1, 5)] * 4}),
    ("fold_gamma", "weights", {"weights": [t(3, 5), t(2, 4)]}),
    ("fold_gamma", "gamma", {"gamma": t(1, 5)}),
    ("fold_gamma_backward", "m", {"m": t(4, 5)}),
    ("fold_gamma_backward", "m", {"m": t(5, 5, dtype=torch.float16)}),
    ("fold_gamma_accumulate", "main_grads", {"main_grads": [t(3, 5)]}),
    ("fold_gamma_accumulate", "main_grads", {"main_grads": [t(3, 5), t(5, 2).t()]}),
    ("fold_gamma_accumulate", "main_grads", {"main_grads": [t(3, 5), t(3, 5)]}),
    ("fold_gamma_accumulate", "main_grads", {"main_grads": [t(3, 5), t(2, 5).bfloat16()]}),
    ("up_projection", "z", {"z": t(21)}),
    ("up_projection", "z", {"z": t(4, 5)}),
    ("up_projection", "weights", {"weights": []}),
    ("up_projection_dgrad", "dys", {"dys": [t(4, 6)]}),
    ("up_projection_dgrad", "dys", {"dys": []}),
    ("up_projection_dgrad", "dys", {"dys": [t(4, 6), t(3, 4)]}),
    ("up_projection_dgrad", "dys", {"dys": [t(4, 6), t(4, 5)]}),
    ("up_projection_wgrad", "z", {"z": t(19)}),
    ("up_projection_wgrad", "dys", {"dys": [t(4, 6), t(3, 4)]}),
    ("up_projection_accumulate", "main_grads", {"main_grads": [t(6, 3)]}),
    ("up_projection_accumulate", "main_grads", {"main_grads": [t(6, 3), t(5, 2)]}),
    ("up_projection_accumulate", "main_grads", {"main_grads": [t(6, 3), t(4, 2).half()]}),
    (
        "up_projection_accumulate",
        "main_grads",
        {"dys": [t(4, 6).bfloat16(), t(4, 4).bfloat16()], "z": t(20).bfloat16()}
        | {"main_grads": [t(6, 3), t(4, 2).bfloat16()]},
    ),
    ("down_projection", "out", {"out": t(4, 4)}),
    ("down_projection", "out", {"out": t(4, 3, dtype=torch.float16)}),
    ("down_projection", "weight", {"weight": t(3, 6)}),
    ("down_projection_dgrad", "weight", {"weight": t(4, 5)}),
    ("down_projection_add_dgrad", "dx", {"dx": t(4, 6)}),
    ("down_projection_add_dgrad", "dx", {"dx": t(4, 5, dtype=torch.float64)}),
    ("down_projection_wgrad", "dh", {"dh": t(3, 3)}),
    ("down_projection_wgrad", "dh", {"dh": t(4, 3, dtype=torch.float64)}),
    ("down_projection_wgrad", "dtype", {"dtype": torch.int64}),
    ("down_projection_accumulate", "main_grad", {"main_grad": t(3, 6)}),
    ("down_projection_accumulate", "main_grad", {"main_grad": t(3, 5).half()}),
    ("gated_product", "up", {"up": t(4, 6)}),
    ("gated_product", "kind", {"kind": "geglu"}),
    ("gated_product_backward", "dm", {"dm": t(3, 5)}),
    ("gated_product_backward", "kind", {"kind": "geglu"}),
    ("rotary_", "cos", {"cos": t(3, 4)}),
    ("rotary_", "cos", {"cos": t(4, 8), "sin": t(4, 8)}),
    ("rotary_", "cos", {"cos": t(4, 3), "sin": t(4, 3)}),
    ("rotary_", "sin", {"sin": t(4, 2)}),
    ("rotary_", "tensors", {"tensors": [t(4, 2, 3, 6), t(4, 2, 1, 5)]}),
    ("rotary_", "tensors", {"tensors": [t(4, 2, 6, 3).transpose(2, 3)]}),
    ("rotary_backward", "grads", {"grads": [t(4, 2, 6), t(4, 2, 6)]}),
    ("rms_norm", "gamma", {"gamma": t(4)}),
    ("rms_norm", "gamma", {"gamma": t(5, dtype=torch.float64)}),
    ("rms_norm_backward", "dy", {"dy": t(4, 6)}),
    ("rms_norm_backward", "rho", {"rho": t(4)}),
    ("rms_norm_backward", "rho", {"rho": t(4, 1, dtype=torch.float64)}),
    ("rms_norm_backward", "dresidual", {"dresidual": t(3, 5)}),
    # What once divided by zero or read a null pointer.
    ("up_projection", "weights", {"z": t(0), "weights": [t(3, 0)]}),
    ("up_projection_wgrad", "ranks", {"ranks": []}),
    ("fold_gamma_accumulate", "weights", {"weights": [], "main_grads": []}),
    ("latent_epilogue", "ranks", {"ranks": [10, -2]}),
    ("latent_epilogue_backward", "ranks", {"ranks": [10, -2]}),
]


def first_sample(name: str) -> Sample:
    return next(s for s in operator_samples() if s.operator == name)


@pytest.mark.skipif(no_csrc is not None, reason=f"csrc: {no_csrc}")
@pytest.mark.parametrize(
    ("name", "argument", "change"),
    MISFITS,
    ids=[f"{name}-{argument}-{i}" for i, (name, argument, _) in enumerate(MISFITS)],
)
def test_misfits_are_refused_by_name(name: str, argument: str, change: dict[str, Any]) -> None:
    assert_refused(name, first_sample(name).arguments | change, argument)


def test_lax_norms_eps_is_the_one_of_the_formulas() -> None:
    assert ops.LATENT_NORM_EPS == LATENT_NORM_EPS
