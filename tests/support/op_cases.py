"""What the tests of the ops share: numbers, layouts, tolerances, formulas, and arguments for every
operator of csrc.

The formulas are dense, in fp64 and without a line of the references, so that autograd of them is
independent of the gradients that are written by hand.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

LATENT_NORM_EPS = 1e-6
HALVES = (torch.bfloat16, torch.float16)
DTYPES = (torch.float64, torch.float32, *HALVES)
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-6}
BORDER = 7.0
"""What stands around a tensor that an op writes into."""


def normal(
    *shape: int, dtype: torch.dtype = torch.float64, device: str = "cpu", seed: int = 0
) -> Tensor:
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(device, dtype)


def wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def exact(x: Tensor) -> Tensor:
    """A copy of the same numbers in fp64, on the CPU."""
    return x.detach().to("cpu", torch.float64, copy=True)


def leaf(x: Tensor) -> Tensor:
    return x.detach().clone().requires_grad_()


def contiguous(x: Tensor) -> Tensor:
    return x.contiguous()


def in_wider_rows(x: Tensor) -> Tensor:
    """The same numbers as a slice of a tensor that is wider by three columns before, two behind."""
    around = x.new_full((*x.shape[:-1], x.shape[-1] + 5), BORDER)
    inner = around[..., 3:-2]
    inner.copy_(x)
    return inner


def transposed(x: Tensor) -> Tensor:
    return x.transpose(-1, -2).contiguous().transpose(-1, -2)


def every_second(x: Tensor) -> Tensor:
    around = x.new_full((*x.shape[:-1], 2 * x.shape[-1]), math.nan)
    around[..., ::2] = x
    return around[..., ::2]


def batch_first(x: Tensor) -> Tensor:
    """`[s, b, k]` in the memory order of `[b, s, k]`."""
    return x.transpose(0, 1).contiguous().transpose(0, 1)


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    f.__name__: f for f in (contiguous, in_wider_rows, transposed, every_second)
}


def border_is_untouched(inner: Tensor) -> bool:
    """Whether everything but `inner`, made by `in_wider_rows`, is as it was."""
    base = inner._base
    assert base is not None
    around = base.clone()
    around[..., 3:-2] = BORDER
    return bool((around == BORDER).all())


def ulp(x: Tensor, dtype: torch.dtype) -> Tensor:
    """The unit in the last place that a number of the size of x has in `dtype`."""
    digits, smallest = (8, -133) if dtype == torch.bfloat16 else (11, -24)
    _, exponent = torch.frexp(x)
    return torch.ldexp(torch.ones_like(x), (exponent - digits).clamp(min=smallest))


def assert_close(
    value: Tensor, expected: Tensor, *, terms: Tensor | float = 0.0, rounding: float = 0.0
) -> None:
    """`value` agrees with the fp64 `expected` as well as its dtype lets it.

    In fp32 and fp64, row by row in the norm: 1e-6 and 1e-12 of the row, or of the size of the
    `terms` that cancel in it. In bf16 and fp16 every element is within a unit in the last place of
    the exact result, give or take the fp32 arithmetic's 1e-6 of the row. `rounding` adds a share of
    the row for what is documented to be rounded on the way.
    """
    assert value.shape == expected.shape
    value, dtype = exact(value), value.dtype
    row = expected.norm(dim=-1, keepdim=True).maximum(torch.as_tensor(terms).double())
    slack = (TOLERANCE.get(dtype, 1e-6) + rounding) * row
    if dtype in HALVES:
        beyond = (value - expected).abs() - ulp(expected, dtype) - slack
    else:
        beyond = (value - expected).norm(dim=-1, keepdim=True) - slack
    assert not beyond.isnan().any()
    worst = beyond.max().item() if beyond.numel() else 0.0
    assert (beyond <= 0).all(), f"{dtype}: {worst} beyond what is allowed, of {row.max()}"


def assert_product(value: Tensor, a: Tensor, b: Tensor, *, rounding: float = 0.0) -> None:
    """`value` is a·b."""
    a, b = exact(a), exact(b)
    terms = (a.abs() @ b.abs()).norm(dim=-1, keepdim=True)
    assert_close(value, a @ b, terms=terms, rounding=rounding)


def silu(u: Tensor) -> Tensor:
    return u * torch.sigmoid(u)


def gelu(u: Tensor) -> Tensor:
    return u * torch.erfc(-u / math.sqrt(2)) / 2


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": silu,
    "gelu": gelu,
    "identity": lambda u: u,
}
GATED: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "swiglu": lambda gate, up: silu(gate) * up,
    "product": lambda gate, up: gate * up,
}


def rms_normed(x: Tensor, gamma: Tensor, eps: float) -> Tensor:
    return gamma * x / (x.square().mean(dim=-1, keepdim=True) + eps).sqrt()


def layer_normed(x: Tensor, gamma: Tensor, beta: Tensor, eps: float) -> Tensor:
    centred = x - x.mean(dim=-1, keepdim=True)
    return rms_normed(centred, gamma, eps) + beta


def slots_of(sums: Tensor, tp_size: int) -> Tensor:
    """An all-reduced block of statistics: bf16 slots `[n, 3·T]` of `[n, T]` integers below 2²⁴."""
    hi = sums.bfloat16()
    mid = (sums - hi).bfloat16()
    lo = (sums - hi - mid).bfloat16()
    assert torch.equal(hi.double() + mid.double() + lo.double(), sums)
    return torch.stack((hi, mid, lo), dim=-1).view(-1, 3 * tp_size)


@dataclass(frozen=True)
class Epilogue:
    """Which of the latent epilogue's parts are there."""

    ranks: tuple[int, ...]
    activation: str = "identity"
    norm: str = "none"
    statistics: int | None = None
    """Ranks whose slots are read; 0, and in fp64: the sum itself."""
    gated: bool = False
    wide_h: bool = False
    n: int = 3

    def __str__(self) -> str:
        parts = [f"n{self.n}", "+".join(map(str, self.ranks)), self.activation]
        parts += [self.norm] if self.norm != "none" else []
        parts += [] if self.statistics is None else [f"T{self.statistics}"]
        parts += [word for word in ("gated", "wide_h") if getattr(self, word)]
        return "-".join(parts)


class EpilogueNumbers:
    """The tensors of a case, and what the formula makes of them in fp64.

    `hidden_size` and ε as the op takes them; a token's S, an integer, is about hidden_size.
    """

    hidden_size = 40
    eps = 1e-3

    def __init__(
        self,
        case: Epilogue,
        dtype: torch.dtype,
        device: str = "cpu",
        layout: Callable[[Tensor], Tensor] = contiguous,
    ) -> None:
        self.case = case
        n, width = case.n, sum(case.ranks)

        def placed(x: Tensor, dtype: torch.dtype = dtype) -> Tensor:
            return layout(x.to(device, dtype))

        self.h = placed(2 * normal(n, width), wide(dtype) if case.wide_h else dtype)
        self.gated = placed(normal(n, width, seed=1)) if case.gated else None
        self.dz = normal(n * width, seed=2).to(device, dtype)
        self.dv = placed(normal(n, width, seed=3)) if case.gated else None
        self.weight = self.bias = self.statistics = None
        if case.norm != "none":
            self.weight = (1 + normal(width, seed=4) / 4).to(device, dtype)
        if case.norm == "layernorm":
            self.bias = normal(width, seed=5).to(device, dtype)
        self.sum = None
        if case.statistics is not None:
            sums = (20 + 80 * normal(n, max(case.statistics, 1), seed=6).abs()).round()
            self.sum = sums.sum(dim=1, keepdim=True)
            if case.statistics == 0 or dtype == torch.float64:
                self.statistics = placed(self.sum, wide(dtype))
            else:
                self.statistics = placed(slots_of(sums, case.statistics), torch.bfloat16)

    @property
    def settings(self) -> dict[str, Any]:
        """What the op and its backward take alike."""
        return {
            "statistics": self.statistics,
            "hidden_size": self.hidden_size,
            "eps": self.eps,
            "norm": self.case.norm,
            "weight": self.weight,
            "bias": self.bias,
        }

    def formula(self, v: Tensor | None = None) -> Formula:
        """With `v`, what the op returned for it, the rest follows from it as rounded there."""
        return Formula(self, v)


class Formula:
    """z, v and their gradients from those of the given dz and dv, in fp64."""

    def __init__(self, numbers: EpilogueNumbers, given_v: Tensor | None) -> None:
        case = numbers.case
        given = [numbers.h, numbers.gated, numbers.sum, numbers.weight, numbers.bias]
        leaves = [None if t is None else leaf(exact(t)) for t in given]
        h, gated, s, weight, bias = leaves
        assert h is not None
        rho = torch.ones(1, dtype=torch.float64)
        if s is not None:
            rho = (s / numbers.hidden_size + numbers.eps).sqrt()
        v = h / rho if gated is None else h / rho + gated
        if given_v is not None:
            v = v + (exact(given_v) - v).detach()
        members = []
        start = 0
        smallest_sigma = torch.ones(case.n, 1, dtype=torch.float64)
        for rank in case.ranks:
            part, columns = v[:, start : start + rank], slice(start, start + rank)
            start += rank
            if case.norm == "rmsnorm":
                assert weight is not None
                y = rms_normed(part, weight[columns], LATENT_NORM_EPS)
                sigma = part.square().mean(dim=1, keepdim=True).sqrt()
            elif case.norm == "layernorm":
                assert weight is not None and bias is not None
                y = layer_normed(part, weight[columns], bias[columns], LATENT_NORM_EPS)
                sigma = (part - part.mean(dim=1, keepdim=True)).square().mean(1, True).sqrt()
            else:
                y, sigma = part, smallest_sigma
            smallest_sigma = smallest_sigma.minimum(sigma.detach().clamp(min=1e-3))
            members.append(ACTIVATIONS[case.activation](y))
        self.z = torch.cat([m.flatten() for m in members]).detach()
        self.members = [m.detach() for m in members]
        self.v = v.detach()

        dz = [
            part.view(m.shape)
            for part, m in zip(
                exact(numbers.dz).split([m.numel() for m in members]), members, strict=True
            )
        ]
        outputs, gradients = members, dz
        if numbers.dv is not None:
            outputs, gradients = [*members, v], [*dz, exact(numbers.dv)]
        there = [t for t in leaves if t is not None]
        found = iter(torch.autograd.grad(outputs, there, gradients))
        self.dh, self.dv, self.ds, self.dweight, self.dbias = (
            None if t is None else next(found) for t in leaves
        )
        # Of the size of these are the terms that cancel in dv, dh and dS.
        self.dv_terms = 2 * torch.cat(dz, dim=1).norm(dim=1, keepdim=True) / smallest_sigma
        self.dh_terms = (self.dv_terms / rho).detach()
        self.dbias_terms = self.dv_terms.sum()
        self.dweight_terms = (self.dv_terms * self.v.norm(dim=1, keepdim=True)).sum()
        self.ds_terms = (
            self.dv_terms * h.norm(dim=1, keepdim=True) / (2 * rho**3 * numbers.hidden_size)
        ).detach()


EPILOGUES = [
    Epilogue((1,), n=1),
    Epilogue((3,), "silu"),
    Epilogue((130,), "gelu", n=1),
    Epilogue((5,), "silu", statistics=0, n=0),
    Epilogue((17,), "silu", statistics=0, wide_h=True, n=17),
    Epilogue((33, 33), "identity", statistics=1),
    Epilogue((130, 17, 1), "silu", statistics=2, n=33),
    Epilogue((8, 3, 3), "gelu", statistics=4, wide_h=True),
    Epilogue((33,), "identity", gated=True, n=17),
    Epilogue((16, 5), "silu", statistics=0, gated=True),
    Epilogue((3, 17, 33), "gelu", statistics=2, gated=True, wide_h=True),
    Epilogue((33, 17), "identity", "rmsnorm"),
    Epilogue((1, 1), "silu", "rmsnorm", statistics=1, n=1),
    Epilogue((1,), "identity", "layernorm"),
    Epilogue((130, 3), "gelu", "layernorm", statistics=0),
    Epilogue((16, 17, 33), "silu", "layernorm", statistics=2, gated=True, n=17),
    Epilogue((17, 64), "silu", "rmsnorm", statistics=0, gated=True, wide_h=True, n=17),
    Epilogue((3, 5), "identity", "layernorm", gated=True),
    Epilogue((5, 4), "silu", "layernorm", statistics=1, gated=True, n=0),
]


def rotation(s: int, p: int, interleaved: bool) -> tuple[Tensor, Tensor]:
    """Angles `[s, p/2]`, and as `[s, p]` in the order of the rotated elements."""
    angles = 3 * normal(s, p // 2, seed=5)
    if interleaved:
        return angles, torch.stack((angles, angles), dim=-1).flatten(1)
    return angles, torch.cat((angles, angles), dim=1)


Arguments = dict[str, Any]


def operator_samples(device: str = "cpu", dtype: torch.dtype = torch.float32) -> list[Sample]:
    """For every operator of `torch.ops.boost`, by the names of its schema, arguments it takes."""

    def t(*shape: int, seed: int = 0, dtype: torch.dtype = dtype) -> Tensor:
        return normal(*shape, dtype=dtype, device=device, seed=seed)

    def slots(*shape: int) -> Tensor:
        return t(*shape, dtype=torch.bfloat16).abs()

    x, delta = t(4, 5), t(4, 5, seed=1)
    s, message = t(4, 1, dtype=wide(dtype)).abs(), slots(4, 6)
    plain: Arguments = {
        "h": t(4, 8),
        "statistics": None,
        "gated": None,
        "weight": None,
        "bias": None,
        "ranks": [5, 3],
        "activation": "silu",
        "norm": "none",
        "hidden_size": 40,
        "eps": 1e-3,
        "dtype": dtype,
    }
    lax = plain | {
        "statistics": s,
        "gated": t(4, 8, seed=1),
        "weight": t(8),
        "bias": t(8, seed=1),
        "activation": "gelu",
        "norm": "layernorm",
    }
    back = {k: v for k, v in plain.items() if k not in ("gated", "dtype")}
    back |= {"dz": t(32), "dv": None, "v": None}
    lax_back = back | {k: lax[k] for k in ("statistics", "weight", "bias", "activation", "norm")}
    lax_back |= {"dv": t(4, 8, seed=2), "v": t(4, 8, seed=3)}
    gamma, downs = t(5), [t(3, 5), t(2, 5)]
    ups, z, dys = [t(6, 3), t(4, 2)], t(20), [t(4, 6), t(4, 4)]
    heads = [t(4, 2, 3, 6), t(4, 2, 1, 6), t(4, 2, 1, 6, seed=1)]
    turn = {"cos": t(4, 4), "sin": t(4, 4, seed=1), "interleaved": False}
    rho = t(4, 1, dtype=wide(dtype)).abs()
    up_main = [torch.zeros_like(b, dtype=wide(dtype)) for b in ups]
    down_main = [torch.zeros_like(a, dtype=wide(dtype)) for a in downs]
    given = {
        "sum_of_squares": [{"x": x}, {"x": transposed(x)}],
        "rms_stats": [
            {"x": x, "slots": message, "tp_rank": 1},
            {"x": in_wider_rows(x), "slots": torch.zeros_like(s), "tp_rank": 0},
        ],
        "residual_add_rms_stats": [
            {"x": x, "delta": delta, "slots": message, "tp_rank": 1},
            {"x": in_wider_rows(x), "delta": delta, "slots": None, "tp_rank": 0},
        ],
        "read_statistics": [{"block": message}, {"block": in_wider_rows(s)}],
        "residual_gradient": [{"dresidual": delta, "x": x, "ds": s}],
        "latent_epilogue": [plain, plain | {"statistics": message}, lax],
        "latent_epilogue_backward": [back, lax_back, lax_back | {"statistics": None, "h": None}],
        "fold_gamma": [{"gamma": gamma, "weights": downs}],
        "fold_gamma_backward": [{"m": t(5, 5), "gamma": gamma, "weights": downs}],
        "fold_gamma_accumulate": [
            {"m": t(5, 5), "gamma": gamma, "weights": downs, "main_grads": down_main}
        ],
        "up_projection": [{"z": z, "weights": ups}],
        "up_projection_dgrad": [{"dys": dys, "weights": ups}],
        "up_projection_wgrad": [{"dys": dys, "z": z, "ranks": [3, 2]}],
        "up_projection_accumulate": [{"dys": dys, "z": z, "main_grads": up_main}],
        "down_projection": [
            {"x": x, "weight": t(3, 5), "out": in_wider_rows(t(4, 3))},
            {"x": batch_first(t(4, 2, 5)), "weight": t(3, 5), "out": t(4, 2, 3)},
        ],
        "down_projection_dgrad": [{"dh": t(4, 3), "weight": t(3, 5)}],
        "down_projection_add_dgrad": [{"dx": in_wider_rows(x), "dh": t(4, 3), "weight": t(3, 5)}],
        "down_projection_wgrad": [
            {"dh": t(4, 3), "x": x, "dtype": dtype},
            {"dh": t(4, 2, 3), "x": batch_first(t(4, 2, 5)), "dtype": wide(dtype)},
        ],
        "down_projection_accumulate": [
            {"dh": t(4, 3), "x": x, "main_grad": t(3, 5, dtype=wide(dtype))}
        ],
        "gated_product": [{"gate": x, "up": delta, "kind": k} for k in GATED],
        "gated_product_backward": [
            {"dm": x - delta, "gate": x, "up": transposed(delta), "kind": k} for k in GATED
        ],
        "rotary_": [{"tensors": heads[:2], **turn}],
        "rotary_backward": [
            {"grads": [heads[0].transpose(0, 1).contiguous().transpose(0, 1), *heads[1:]]}
            | {"rotated": 2, **turn}
        ],
        "rms_norm": [{"x": x, "gamma": gamma, "eps": 1e-3}],
        "rms_norm_backward": [
            {"dy": delta, "x": x, "gamma": gamma, "rho": rho, "dresidual": None},
            {"dy": delta, "x": x, "gamma": gamma, "rho": rho, "dresidual": transposed(x)},
        ],
    }
    return [
        Sample(name, f"{name}-{i}" if len(each) > 1 else name, arguments)
        for name, each in given.items()
        for i, arguments in enumerate(each)
    ]


@dataclass
class Sample:
    operator: str
    label: str
    arguments: Arguments

    def __str__(self) -> str:
        return self.label

    def with_tensors(self, change: Callable[[str, Tensor], Tensor]) -> Arguments:
        """The arguments, with every tensor of them as `change(name, tensor)` makes it."""

        def changed(name: str, value: Any) -> Any:
            if isinstance(value, Tensor):
                return change(name, value)
            if isinstance(value, list) and value and isinstance(value[0], Tensor):
                return [change(name, each) for each in value]
            return value

        return {name: changed(name, value) for name, value in self.arguments.items()}

    def tensor_names(self) -> Sequence[str]:
        found: list[str] = []
        self.with_tensors(lambda name, t: (found.append(name), t)[1])
        return list(dict.fromkeys(found))


def operator(name: str) -> Any:
    return getattr(torch.ops.boost, name).default
