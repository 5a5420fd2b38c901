"""The ops whose results have a row for each token, with arguments."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from boost_layers import ops
from tests.support.op_cases import (
    normal,
    wide,
)


def token_ops(n: int, k: int, device: str, dtype: torch.dtype) -> dict[str, TokenOp]:
    """Ops whose results have a row for each token, by name."""

    def t(*shape: int, seed: int = 0, dtype: torch.dtype = dtype) -> Tensor:
        return normal(*shape, dtype=dtype, device=device, seed=seed)

    def latents(z: Tensor) -> list[Tensor]:
        return [part.view(n, -1) for part in z.split([n * r for r in ranks])]

    def epilogue(h: Tensor, s: Tensor, gated: Tensor) -> list[Tensor]:
        settings = {"statistics": s, "hidden_size": 40, "eps": 1e-3, "gated": gated}
        found = []
        for norm, w, b in norms:
            for activation in ("silu", "gelu", "identity"):
                z, v = ops.latent_epilogue(
                    h, ranks, activation, norm=norm, weight=w, bias=b, **settings
                )
                assert v is not None
                found += [*latents(z), v]
        return found

    def epilogue_backward(
        dz0: Tensor, dz1: Tensor, h: Tensor, s: Tensor, v: Tensor, dv: Tensor
    ) -> list[Tensor]:
        dz = torch.cat((dz0.flatten(), dz1.flatten()))
        settings = {"h": h, "statistics": s, "hidden_size": 40, "eps": 1e-3, "v": v, "dv": dv}
        found = []
        for norm, w, b in norms:
            for activation in ("silu", "gelu", "identity"):
                dh, whole, ds, *_ = ops.latent_epilogue_backward(
                    dz, ranks, activation, norm=norm, weight=w, bias=b, **settings
                )
                assert whole is not None and ds is not None
                found += [dh, whole, ds]
        return found

    def down(x: Tensor) -> list[Tensor]:
        out = x.new_empty(n, 5)
        ops.down_projection(x, weight, out)
        return [out]

    def rotary(q: Tensor, cos: Tensor, sin: Tensor) -> list[Tensor]:
        found = []
        for interleaved in (True, False):
            heads = q.clone().view(n, 1, 1, k)
            ops.rotary_([heads], cos, sin, interleaved=interleaved)
            back = ops.rotary_backward([q.view(n, 1, 1, k)], 1, cos, sin, interleaved=interleaved)
            found += [heads.view(n, k), back[0].view(n, k)]
        return found

    def residual_add(x: Tensor, delta: Tensor) -> list[Tensor]:
        x, slots = x.clone(), x.new_empty(n, 6, dtype=torch.bfloat16)
        return [ops.residual_add_rms_stats(x, delta, slots, 1), x, slots[:, 3:]]

    ranks, gamma, beta, weight = [k - 3, 3], t(k), t(k, seed=1), t(5, k)
    norms = (("none", None, None), ("rmsnorm", gamma, None), ("layernorm", gamma, beta))
    ups = [t(4, k - 3), t(2, 3)]
    x, other, third = t(n, k), t(n, k, seed=1), t(n, k, seed=2)
    s = t(n, 1, dtype=wide(dtype)).abs() + 1
    dz = t(n, k - 3), t(n, 3)
    turn = t(n, k - k % 2), t(n, k - k % 2, seed=1)
    return {
        "rms_stats": TokenOp(lambda x: [ops.rms_stats(x)], [x]),
        "residual_add": TokenOp(residual_add, [x, other]),
        "read_statistics": TokenOp(
            lambda b: [ops.read_statistics(b)], [t(n, 6, dtype=torch.bfloat16)]
        ),
        "residual_gradient": TokenOp(lambda *a: [ops.residual_gradient(*a)], [x, other, s]),
        "epilogue": TokenOp(epilogue, [x, s, other], roots=1),
        "epilogue_backward": TokenOp(epilogue_backward, [*dz, x, s, other, third], roots=3),
        "up_projection": TokenOp(
            lambda *z: ops.up_projection(torch.cat([p.flatten() for p in z]), ups), [*dz]
        ),
        "up_dgrad": TokenOp(
            lambda *dys: latents(ops.up_projection_dgrad(dys, ups)), [t(n, 4), t(n, 2)]
        ),
        "down_projection": TokenOp(down, [x]),
        "down_dgrad": TokenOp(
            lambda dh, dx: [ops.down_projection_dgrad(dh, weight, dx.clone())], [t(n, 5), x]
        ),
        "swiglu": TokenOp(lambda *a: [ops.gated_product(*a, "swiglu")], [x, other]),
        "product": TokenOp(lambda *a: [ops.gated_product(*a, "product")], [x, other]),
        "swiglu_backward": TokenOp(
            lambda *a: [*ops.gated_product_backward(*a, "swiglu")], [x, other, third]
        ),
        "product_backward": TokenOp(
            lambda *a: [*ops.gated_product_backward(*a, "product")], [x, other, third]
        ),
        "rotary": TokenOp(rotary, [x, *turn]),
        "rms_norm": TokenOp(lambda x: [*ops.rms_norm(x, gamma, 1e-3)], [x]),
        "rms_norm_backward": TokenOp(
            lambda dy, x, r, d: [ops.rms_norm_backward(dy, x, gamma, r, d)[0]],
            [x, other, s, third],
            roots=2,
        ),
    }


@dataclass
class TokenOp:
    function: Callable[..., list[Tensor]]
    tokens: list[Tensor]
    roots: int | None = None
    """Which of `tokens` divides, so that its Inf makes zeros."""

    def __call__(self, *tokens: Tensor) -> list[Tensor]:
        return list(self.function(*(tokens or self.tokens)))


TOKEN_OPS = list(token_ops(2, 5, "cpu", torch.float32))
