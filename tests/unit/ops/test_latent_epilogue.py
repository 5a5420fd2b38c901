"""Kernel 2: the latent epilogue."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from boost_layers import ops
from tests.support.op_cases import (
    EPILOGUES,
    Epilogue,
    EpilogueNumbers,
    assert_close,
    wide,
)
from tests.support.served import (
    FLOATS,
    LAID_OUT,
    Served,
)


def epilogue(numbers: EpilogueNumbers) -> tuple[Tensor, Tensor | None]:
    case = numbers.case
    return ops.latent_epilogue(
        numbers.h,
        case.ranks,
        case.activation,
        gated=numbers.gated,
        dtype=numbers.dz.dtype,
        **numbers.settings,
    )


def check_epilogue(numbers: EpilogueNumbers) -> Tensor | None:
    z, v = epilogue(numbers)
    if numbers.gated is None:
        assert v is None
    else:
        assert v is not None
        assert_close(v, numbers.formula().v)
    assert z.dtype == numbers.dz.dtype and z.is_contiguous()
    members = numbers.formula(v).members
    parts = z.split([m.numel() for m in members])
    for part, member in zip(parts, members, strict=True):
        assert_close(part.view(member.shape), member)
    return v


def check_epilogue_backward(numbers: EpilogueNumbers, v: Tensor | None) -> None:
    case = numbers.case
    dh, dv, ds, dweight, dbias = ops.latent_epilogue_backward(
        numbers.dz,
        case.ranks,
        case.activation,
        h=numbers.h if v is None or case.statistics is not None else None,
        v=v,
        dv=numbers.dv,
        **numbers.settings,
    )
    formula = numbers.formula(v)
    assert formula.dh is not None
    h_dtype = numbers.h.dtype if v is None or case.statistics is not None else numbers.dz.dtype
    assert dh.dtype == h_dtype
    assert_close(dh, formula.dh, terms=formula.dh_terms)
    assert (dv is None) == (v is None)
    if dv is not None:
        assert formula.dv is not None and dv.dtype == numbers.dz.dtype
        assert_close(dv, formula.dv, terms=formula.dv_terms)
    for gradient, expected, terms in (
        (ds, formula.ds, formula.ds_terms),
        (dweight, formula.dweight, formula.dweight_terms),
        (dbias, formula.dbias, formula.dbias_terms),
    ):
        assert (gradient is None) == (expected is None)
        if gradient is not None and expected is not None:
            assert_close(gradient, expected, terms=terms)
    if ds is not None:
        assert ds.dtype == wide(numbers.dz.dtype)


@FLOATS
@pytest.mark.parametrize("case", EPILOGUES, ids=str)
def test_latent_epilogue(served: Served, case: Epilogue, dtype: torch.dtype) -> None:
    numbers = EpilogueNumbers(case, dtype, served.device)
    given = numbers.h.clone()
    check_epilogue_backward(numbers, check_epilogue(numbers))
    assert torch.equal(numbers.h, given)


@LAID_OUT
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_latent_epilogue_of_any_layout(
    served: Served, dtype: torch.dtype, layout: Callable[[Tensor], Tensor]
) -> None:
    case = Epilogue((17, 5, 33), "silu", "layernorm", statistics=2, gated=True)
    numbers = EpilogueNumbers(case, dtype, served.device, layout)
    v = check_epilogue(numbers)
    assert v is not None
    check_epilogue_backward(numbers, layout(v))


def test_the_latents_may_stand_between_others_in_the_message(served: Served) -> None:
    """h and its statistics as callers have them: columns of one reduced message."""
    case = Epilogue((17,), "silu", statistics=2, n=9)
    numbers = EpilogueNumbers(case, torch.bfloat16, served.device)
    assert numbers.statistics is not None
    message = torch.cat((numbers.h, numbers.h, numbers.statistics), dim=1)
    apart = epilogue(numbers)[0]
    numbers.h, numbers.statistics = message[:, 17:34], message[:, 34:]
    assert torch.equal(epilogue(numbers)[0], apart)
