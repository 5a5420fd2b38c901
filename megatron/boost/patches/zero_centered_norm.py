"""The local implementation's norm refuses `--apply-layernorm-1p`, which Megatron's recipes have.

γ is then stored less one and starts at zero, so that weight decay pulls it to one. Transformer
Engine computes with 1 + γ in fp32; a bf16 sum would round what γ is about away.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from megatron.boost.patches import Patch
from megatron.boost.patches.replacement import replaced


class ZeroCenteredLayerNorm(nn.LayerNorm):
    """LayerNorm times 1 + `weight`, computed in fp32."""

    def forward(self, x: Tensor) -> Tensor:
        """`[s, b, d]` → the same shape and dtype."""
        y = F.layer_norm(
            x.float(), self.normalized_shape, 1 + self.weight.float(), self.bias.float(), self.eps
        )
        return y.to(x.dtype)


class ZeroCenteredRMSNorm(nn.RMSNorm):
    """RMSNorm times 1 + `weight`, computed in fp32."""

    def forward(self, x: Tensor) -> Tensor:
        """`[s, b, d]` → the same shape and dtype."""
        y = F.rms_norm(x.float(), self.normalized_shape, 1 + self.weight.float(), self.eps)
        return y.to(x.dtype)


_CENTERED: dict[type, type] = {
    nn.LayerNorm: ZeroCenteredLayerNorm,
    nn.RMSNorm: ZeroCenteredRMSNorm,
}


@contextlib.contextmanager
def _apply() -> Iterator[None]:
    from megatron.core.transformer.torch_norm import WrappedTorchNorm

    before = WrappedTorchNorm.__new__

    def build(cls: type, config: Any, *args: Any, **kwargs: Any) -> nn.Module:
        """Upstream's norm, with the zero-centred γ that `config` asks for."""
        if not config.layernorm_zero_centered_gamma:
            return before(cls, config, *args, **kwargs)
        accepted = copy.copy(config)
        accepted.layernorm_zero_centered_gamma = False
        norm: nn.Module = before(cls, accepted, *args, **kwargs)
        norm.__class__ = _CENTERED[type(norm)]
        nn.init.zeros_(norm.weight)  # type: ignore[arg-type]
        return norm

    with replaced(WrappedTorchNorm, "__new__", staticmethod(build)):
        yield


PATCH = Patch(
    name="zero_centered_norm",
    reason="the norm of the local implementation refuses --apply-layernorm-1p",
    needs="always",
    apply=_apply,
)
