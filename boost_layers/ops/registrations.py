"""What torch must know of csrc's operators beside their kernels: the shapes of their results
(fake implementations, for `torch.compile` and the meta device) and the gradients of those that are
functions of their inputs alone.

The layers call the operators below autograd, in Functions of their own that know the collectives;
the formulas here are for programs that use an op by itself. Operators that write into an argument
have no gradient.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

_boost = torch.ops.boost


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _column(x: Tensor) -> Tensor:
    return x.new_empty(x.shape[0], 1, dtype=_wide(x.dtype))


@torch.library.register_fake("boost::sum_of_squares")
def _(x: Tensor) -> Tensor:
    return _column(x)


@torch.library.register_fake("boost::rms_stats")
def _(x: Tensor, slots: Tensor | None, tp_rank: int) -> Tensor:
    return _column(x)


@torch.library.register_fake("boost::residual_add_rms_stats")
def _(x: Tensor, delta: Tensor, slots: Tensor | None, tp_rank: int) -> Tensor:
    return _column(x)


@torch.library.register_fake("boost::read_statistics")
def _(block: Tensor) -> Tensor:
    return _column(block)


@torch.library.register_fake("boost::residual_gradient")
def _(dresidual: Tensor, x: Tensor, ds: Tensor) -> Tensor:
    return x.new_empty(x.shape)


@torch.library.register_fake("boost::latent_epilogue")
def _(
    h: Tensor,
    statistics: Tensor | None,
    gated: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    ranks: Sequence[int],
    activation: str,
    norm: str,
    hidden_size: int,
    eps: float,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    n, width = h.shape
    v = h.new_empty(0 if gated is None else n, width, dtype=dtype)
    return h.new_empty(n * width, dtype=dtype), v


@torch.library.register_fake("boost::latent_epilogue_backward")
def _(
    dz: Tensor,
    dv: Tensor | None,
    h: Tensor | None,
    v: Tensor | None,
    statistics: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    ranks: Sequence[int],
    activation: str,
    norm: str,
    hidden_size: int,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    value = h if v is None else v
    assert value is not None
    n, width = value.shape
    return (
        dz.new_empty(n, width, dtype=dz.dtype if h is None else h.dtype),
        dz.new_empty(0 if v is None else n, width),
        dz.new_empty(0 if statistics is None else n, 1, dtype=_wide(dz.dtype)),
        dz.new_empty(0 if weight is None else width),
        dz.new_empty(0 if bias is None else width),
    )


@torch.library.register_fake("boost::fold_gamma")
def _(gamma: Tensor, weights: Sequence[Tensor]) -> Tensor:
    return gamma.new_empty(sum(a.shape[0] for a in weights), gamma.shape[0])


@torch.library.register_fake("boost::fold_gamma_backward")
def _(m: Tensor, gamma: Tensor, weights: Sequence[Tensor]) -> tuple[list[Tensor], Tensor]:
    return [a.new_empty(a.shape) for a in weights], gamma.new_empty(gamma.shape)


@torch.library.register_fake("boost::fold_gamma_accumulate")
def _(m: Tensor, gamma: Tensor, weights: Sequence[Tensor], main_grads: Sequence[Tensor]) -> Tensor:
    return gamma.new_empty(gamma.shape)


@torch.library.register_fake("boost::up_projection")
def _(z: Tensor, weights: Sequence[Tensor]) -> Tensor:
    n = z.numel() // sum(b.shape[1] for b in weights)
    return z.new_empty(n * sum(b.shape[0] for b in weights))


@torch.library.register_fake("boost::up_projection_dgrad")
def _(dys: Sequence[Tensor], weights: Sequence[Tensor]) -> Tensor:
    return dys[0].new_empty(dys[0].shape[0] * sum(b.shape[1] for b in weights))


@torch.library.register_fake("boost::up_projection_wgrad")
def _(dys: Sequence[Tensor], z: Tensor, ranks: Sequence[int]) -> list[Tensor]:
    return [z.new_empty(dy.shape[1], rank) for dy, rank in zip(dys, ranks, strict=True)]


@torch.library.register_fake("boost::up_projection_accumulate")
def _(dys: Sequence[Tensor], z: Tensor, main_grads: Sequence[Tensor]) -> None:
    return None


@torch.library.register_fake("boost::down_projection")
def _(x: Tensor, weight: Tensor, out: Tensor) -> None:
    return None


@torch.library.register_fake("boost::down_projection_dgrad")
def _(dh: Tensor, weight: Tensor) -> Tensor:
    return dh.new_empty(dh.shape[0], weight.shape[1])


@torch.library.register_fake("boost::down_projection_add_dgrad")
def _(dx: Tensor, dh: Tensor, weight: Tensor) -> None:
    return None


@torch.library.register_fake("boost::down_projection_wgrad")
def _(dh: Tensor, x: Tensor, dtype: torch.dtype) -> Tensor:
    return x.new_empty(dh.shape[-1], x.shape[-1], dtype=dtype)


@torch.library.register_fake("boost::down_projection_accumulate")
def _(dh: Tensor, x: Tensor, main_grad: Tensor) -> None:
    return None


@torch.library.register_fake("boost::gated_product")
def _(gate: Tensor, up: Tensor, kind: str) -> Tensor:
    return gate.new_empty(gate.shape)


@torch.library.register_fake("boost::gated_product_backward")
def _(dm: Tensor, gate: Tensor, up: Tensor, kind: str) -> Tensor:
    return gate.new_empty(2, *gate.shape)


@torch.library.register_fake("boost::rotary_")
def _(tensors: Sequence[Tensor], cos: Tensor, sin: Tensor, interleaved: bool) -> None:
    return None


@torch.library.register_fake("boost::rotary_backward")
def _(grads: Sequence[Tensor], rotated: int, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    return grads[0].new_empty(sum(t.numel() for t in grads))


@torch.library.register_fake("boost::rms_norm")
def _(x: Tensor, gamma: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), _column(x)


@torch.library.register_fake("boost::rms_norm_backward")
def _(
    dy: Tensor, x: Tensor, gamma: Tensor, rho: Tensor, dresidual: Tensor | None
) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), gamma.new_empty(gamma.shape)


def _gradient(name: str, backward: Callable[..., Any], setup: Callable[..., None]) -> None:
    torch.library.register_autograd(f"boost::{name}", backward, setup_context=setup)


def _save_inputs(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    ctx.save_for_backward(*(i if isinstance(i, torch.Tensor) else None for i in inputs))
    ctx.inputs = [None if isinstance(i, torch.Tensor) else i for i in inputs]


def _read_inputs(ctx: Any) -> list[Any]:
    return [
        given if saved is None else saved
        for saved, given in zip(ctx.saved_tensors, ctx.inputs, strict=True)
    ]


def _residual_gradient_backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    _, x, ds = _read_inputs(ctx)
    wide = grad.to(ds.dtype)
    return grad, (2 * wide * ds).to(x.dtype), (2 * wide * x).sum(dim=1, keepdim=True)


def _latent_epilogue_setup(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    z, v = output
    # Through save_for_backward, so that hooks see it and nothing holds itself alive.
    _save_inputs(ctx, (*inputs, v), output)
    ctx.mark_non_differentiable(*([v] if inputs[2] is None else []))


def _latent_epilogue_backward(ctx: Any, dz: Tensor, dv: Tensor | None) -> tuple[Any, ...]:
    h, statistics, gated, weight, bias, *settings, _, v = _read_inputs(ctx)
    v = None if gated is None else v
    dh, dgated, ds, dweight, dbias = _boost.latent_epilogue_backward(
        dz.contiguous(), None if v is None else dv, h, v, statistics, weight, bias, *settings
    )
    # Every column of a token's statistics counts once in S.
    dstatistics = None if statistics is None else ds.to(statistics.dtype).expand_as(statistics)
    return (
        dh,
        dstatistics,
        None if gated is None else dgated,
        None if weight is None else dweight,
        None if bias is None else dbias,
        *[None] * (len(settings) + 1),
    )


def _up_projection_backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
    z, *weights = ctx.saved_tensors
    n = z.numel() // sum(b.shape[1] for b in weights)
    parts = dy.contiguous().split([n * b.shape[0] for b in weights])
    dys = [part.view(n, b.shape[0]) for part, b in zip(parts, weights, strict=True)]
    dweights = _boost.up_projection_wgrad(dys, z, [b.shape[1] for b in weights])
    return _boost.up_projection_dgrad(dys, weights), dweights


def _sum_of_squares_backward(ctx: Any, ds: Tensor) -> Tensor:
    (x,) = ctx.saved_tensors
    return _boost.residual_gradient(torch.zeros_like(x), x, ds)


def _fold_gamma_backward(ctx: Any, dfolded: Tensor) -> tuple[Any, ...]:
    gamma, *weights = ctx.saved_tensors
    dweights, dgamma = _boost.fold_gamma_backward(dfolded, gamma, weights)
    return dgamma, dweights


def _gated_product_backward(ctx: Any, dm: Tensor) -> tuple[Any, ...]:
    gate, up, kind = _read_inputs(ctx)
    return *_boost.gated_product_backward(dm, gate, up, kind).unbind(0), None


def _rms_norm_setup(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    x, gamma, _ = inputs
    y, rho = output
    ctx.save_for_backward(x, gamma, rho)
    ctx.mark_non_differentiable(rho)


def _rms_norm_backward(ctx: Any, dy: Tensor, _: Any) -> tuple[Any, ...]:
    return *_boost.rms_norm_backward(dy, *ctx.saved_tensors, None), None


def _save_list(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    first, rest = inputs
    ctx.save_for_backward(first, *rest)


_gradient("sum_of_squares", _sum_of_squares_backward, _save_inputs)
_gradient("residual_gradient", _residual_gradient_backward, _save_inputs)
_gradient("latent_epilogue", _latent_epilogue_backward, _latent_epilogue_setup)
_gradient("fold_gamma", _fold_gamma_backward, _save_list)
_gradient("up_projection", _up_projection_backward, _save_list)
_gradient("gated_product", _gated_product_backward, _save_inputs)
_gradient("rms_norm", _rms_norm_backward, _rms_norm_setup)
