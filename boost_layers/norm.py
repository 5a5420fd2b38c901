"""RMSNorm: its weight, the plain norm of a whole token, and the one before the head.

The online and the synchronised norm of BTP layers live where their all-reduce is, in the
down-projection (`boost_layers.projection.btp`); they take their γ from `NormWeight`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from boost_layers import ops
from boost_layers.mappings import as_tokens, hidden_to_sequence
from boost_layers.parameters import ShardedWeights, parameter_device

if TYPE_CHECKING:
    import torch.distributed as dist
    from megatron.core.transformer.transformer_config import TransformerConfig


class NormWeight(ShardedWeights):
    """γ of an RMSNorm: `[d/T]` where the residual stream is sharded along hidden, else `[d]`."""

    weight: nn.Parameter

    def __init__(
        self,
        config: TransformerConfig,
        hidden_size: int,
        tp_group: dist.ProcessGroup,
        *,
        sharded: bool,
        sequence_parallel: bool = False,
    ):
        super().__init__(config, tp_group)
        ones = torch.ones(hidden_size, device=parameter_device(config))
        self.add_parameter("weight", ones, 0 if sharded else None)
        if sequence_parallel:
            # Megatron sums the gradients of flagged parameters over the TP group.
            self.weight.sequence_parallel = True  # type: ignore[attr-defined]

    def forward(self) -> Tensor:
        """γ, this rank's shard."""
        return self.weight


class _ResidualRMSNorm(torch.autograd.Function):
    """RMSNorm, beside the residual branch."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, gamma: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        tokens = as_tokens(x)
        normed, rho = ops.rms_norm(tokens, gamma, eps)
        ctx.save_for_backward(x, gamma, rho)
        return x.view_as(x), normed.view(x.shape)

    @staticmethod
    def backward(ctx: Any, dresidual: Tensor, dnormed: Tensor) -> tuple[Tensor, Tensor, None]:
        x, gamma, rho = ctx.saved_tensors
        dx, dgamma = ops.rms_norm_backward(
            as_tokens(dnormed), as_tokens(x), gamma, rho, as_tokens(dresidual)
        )
        return dx.view(x.shape), dgamma, None


def residual_rms_norm(x: Tensor, gamma: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """x itself, for the residual branch, and γ∘x/ρ: `[…, d]`, `[d]` → `[…, d]` twice. No
    collective. Both gradients of x are added up in this function's backward."""
    return _ResidualRMSNorm.apply(x, gamma, eps)


class FinalNorm(nn.Module):
    """The norm between the last layer and the head, which takes `[s/T, b, d]` sharded along the
    sequence (or `[s, b, d]` whole, without sequence parallelism).

    After BTP layers the input is `[s, b, d/T]` in the guise of `[s/T, b, d]`; one all-to-all turns
    it back first.
    """

    def __init__(
        self,
        config: TransformerConfig,
        hidden_size: int,
        eps: float,
        *,
        tp_group: dist.ProcessGroup,
        hidden_sharded: bool,
    ):
        super().__init__()
        norm = NormWeight(
            config,
            hidden_size,
            tp_group,
            sharded=False,
            sequence_parallel=config.sequence_parallel,
        )
        self.weight = norm.weight
        self.eps = eps
        self.tp_group = tp_group
        self.hidden_sharded = hidden_sharded

    def forward(self, x: Tensor) -> Tensor:
        """`[s/T, b, d]` → `[s/T, b, d]`; one all-to-all if the layers shard hidden."""
        if self.hidden_sharded and self.tp_group.size() > 1:
            s_local, b, d = x.shape
            tp_size = self.tp_group.size()
            x = hidden_to_sequence(x.view(s_local * tp_size, b, d // tp_size), self.tp_group)
        return residual_rms_norm(x, self.weight, self.eps)[1]
