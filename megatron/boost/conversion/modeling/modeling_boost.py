"""A low-rank LLaMA in transformers: LLaMA with y = B·φ(A·x) in place of its linear layers.

Everything but the projections is transformers' own LLaMA, so that caches, attention back-ends,
generation and training are its too. In LaX models a layer's latents cross over into the next: they
go from layer to layer as further columns of the hidden states.
"""

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.models.llama.modeling_llama import (
    LlamaDecoderLayer,
    LlamaForCausalLM,
    LlamaModel,
    LlamaPreTrainedModel,
)

from .configuration_boost import PROJECTIONS, BoostConfig

LATENT_NORM_EPS = 1e-6


def activate(z: Tensor, kind: str, amount: float) -> Tensor:
    """(1 − amount)·z + amount·φ(z)."""
    if kind == "identity" or amount == 0.0:
        return z
    grown = F.silu(z) if kind == "silu" else F.gelu(z)
    return grown if amount == 1.0 else torch.lerp(z, grown, amount)


def most_balanced(rank: int) -> tuple[int, int]:
    """p and q with p·q = rank, p ≤ q, and the least difference."""
    left = next(p for p in range(math.isqrt(rank), 0, -1) if rank % p == 0)
    return left, rank // left


class LowRankLinear(nn.Module):
    """y `[…, out]` = B·φ(A·x), x `[…, in]`; where latents cross over, B·φ(Norm(A·x + G(z)))
    with z `[…, rank]` the latent of the same projection in the layer before."""

    def __init__(self, config: BoostConfig, size_in: int, size_out: int, rank: int, crosses: bool):
        super().__init__()
        self.act, self.amount = config.low_rank_act, config.activation_amount
        self.crosses = crosses
        self.gate_kind = config.lax_gate if crosses else None
        self.norm_kind = config.lax_norm if crosses else "none"
        self.A = nn.Parameter(torch.empty(rank, size_in))
        self.B = nn.Parameter(torch.empty(size_out, rank))
        if self.gate_kind == "tensor":
            left, right = most_balanced(rank)
            self.gate_left = nn.Parameter(torch.empty(left, left))
            self.gate_right = nn.Parameter(torch.empty(right, right))
        elif self.gate_kind == "linear":
            self.gate_weight = nn.Parameter(torch.empty(rank, rank))
            self.gate_bias = nn.Parameter(torch.empty(rank))
        if self.norm_kind != "none":
            self.norm_weight = nn.Parameter(torch.empty(rank))
        if self.norm_kind == "layernorm":
            self.norm_bias = nn.Parameter(torch.empty(rank))
        # The latents before and of this layer, during its forward only.
        self.previous: Tensor | None = None
        self.latent: Tensor | None = None

    def extra_repr(self) -> str:
        """Shown in the model's printed form."""
        rank, size_in = self.A.shape
        return f"in={size_in}, rank={rank}, out={self.B.shape[0]}, act={self.act}"

    def reset_parameters(self) -> None:
        """CoLA's initialisation of the factors, LaX's of gate and norm."""
        rank, size_in = self.A.shape
        std = (rank * (size_in + self.B.shape[0])) ** -0.25
        nn.init.normal_(self.A, 0.0, std)
        nn.init.normal_(self.B, 0.0, std)
        if self.gate_kind == "tensor":
            for gate in (self.gate_left, self.gate_right):
                bound = math.sqrt(6.0 / gate.shape[0])
                nn.init.uniform_(gate, -bound, bound)
        elif self.gate_kind == "linear":
            nn.init.trunc_normal_(self.gate_weight, std=0.02)
            nn.init.zeros_(self.gate_bias)
        if self.norm_kind != "none":
            nn.init.ones_(self.norm_weight)
        if self.norm_kind == "layernorm":
            nn.init.zeros_(self.norm_bias)

    def forward(self, x: Tensor) -> Tensor:
        """`[…, in]` → `[…, out]`."""
        value = F.linear(x, self.A)
        if self.previous is not None:
            value = self._norm(value + self._gate(self.previous))
        self.latent = activate(value, self.act, self.amount)
        return F.linear(self.latent, self.B)

    def _gate(self, z: Tensor) -> Tensor:
        if self.gate_kind == "identity":
            return z
        if self.gate_kind == "linear":
            return F.linear(z, self.gate_weight, self.gate_bias)
        left, right = self.gate_left.shape[0], self.gate_right.shape[0]
        folded = z.unflatten(-1, (left, right))
        return (self.gate_left.t() @ folded @ self.gate_right).flatten(-2)

    def _norm(self, value: Tensor) -> Tensor:
        if self.norm_kind == "none":
            return value
        wide = value.float() if value.dtype.itemsize < 4 else value
        weight = self.norm_weight.to(wide.dtype)
        if self.norm_kind == "rmsnorm":
            normed = F.rms_norm(wide, weight.shape, weight, LATENT_NORM_EPS)
        else:
            bias = self.norm_bias.to(wide.dtype)
            normed = F.layer_norm(wide, weight.shape, weight, bias, LATENT_NORM_EPS)
        return normed.to(value.dtype)


class BoostDecoderLayer(LlamaDecoderLayer):
    """A LLaMA layer, low-rank where the configuration says so."""

    def __init__(self, config: BoostConfig, layer_idx: int):
        super().__init__(config, layer_idx)
        self.hidden_size = config.hidden_size
        self.crosses = config.crosses(layer_idx)
        self.hands_on = config.crosses(layer_idx + 1)
        self.ranks = [config.low_rank_ranks[name] for name in PROJECTIONS]
        if not config.is_low_rank(layer_idx):
            return
        for name, rank in zip(PROJECTIONS, self.ranks, strict=True):
            module = self._module_of(name)
            linear = getattr(module, name)
            size_in, size_out = linear.in_features, linear.out_features
            setattr(module, name, LowRankLinear(config, size_in, size_out, rank, self.crosses))
        if config.low_rank_mlp == "product":
            self.mlp.act_fn = nn.Identity()

    def _module_of(self, projection: str) -> nn.Module:
        found: nn.Module = self.self_attn if hasattr(self.self_attn, projection) else self.mlp
        return found

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        """`[b, s, d]` and, where latents cross over, their columns behind it → the same."""
        if not (self.crosses or self.hands_on):
            return super().forward(hidden_states, *args, **kwargs)
        projections = [getattr(self._module_of(name), name) for name in PROJECTIONS]
        if self.crosses:
            hidden_states, *latents = hidden_states.split([self.hidden_size, *self.ranks], dim=-1)
            for projection, latent in zip(projections, latents, strict=True):
                projection.previous = latent
        output = super().forward(hidden_states, *args, **kwargs)
        hidden, *others = output if isinstance(output, tuple) else (output,)
        if self.hands_on:
            hidden = torch.cat([hidden, *(each.latent for each in projections)], dim=-1)
        for projection in projections:
            projection.previous = projection.latent = None
        return (hidden, *others) if isinstance(output, tuple) else hidden


class BoostPreTrainedModel(LlamaPreTrainedModel):
    """Initialisation and what transformers asks of every model."""

    config_class = BoostConfig
    _no_split_modules = ["BoostDecoderLayer"]

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, LowRankLinear):
            module.reset_parameters()
        else:
            super()._init_weights(module)


class BoostModel(BoostPreTrainedModel, LlamaModel):
    """The embedding, the layers and the final norm."""

    def __init__(self, config: BoostConfig):
        super().__init__(config)
        self.layers = nn.ModuleList(
            [BoostDecoderLayer(config, index) for index in range(config.num_hidden_layers)]
        )
        self.post_init()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """As `LlamaModel`'s; of hidden states that are asked for, latents are left out."""
        output = super().forward(*args, **kwargs)
        states = getattr(output, "hidden_states", None)
        if states is not None:
            width = self.config.hidden_size
            output.hidden_states = tuple(state[..., :width] for state in states)
        return output


class BoostForCausalLM(BoostPreTrainedModel, LlamaForCausalLM):
    """The language model: `BoostModel` and a head."""

    config_class = BoostConfig

    def __init__(self, config: BoostConfig):
        super().__init__(config)
        self.model = BoostModel(config)
        self.post_init()
