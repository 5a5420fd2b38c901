"""A plain LLaMA with full-rank or low-rank projections: the reference of the parity tests.

Single process, no fused kernel and no collective: every line is a formula of `low_rank.md`, so that
a parallel implementation is compared with the mathematics and not with a copy of itself.

    x_0     = E[token]
    x_l'    = x_l  + o(attention(RoPE(q(n)), RoPE(k(n)), v(n)))      n = RMSNorm(x_l)
    x_{l+1} = x_l' + down(SiLU(gate(n)) * up(n))                     n = RMSNorm(x_l')   (swiglu)
    x_{l+1} = x_l' + down(gate(n) * up(n))                                               (product)
    logits  = H RMSNorm(x_L)

and each of the seven projections is `W x` (dense), `B act(A x)` (cola; svd with the identity) or,
with LaX (arXiv 2505.21732), with the same projection of the layer before:

    u_l = A_l x,   v_l = Norm(u_l + G_l(z_{l-1})),   z_l = act(v_l),   y_l = B_l z_l;   v_0 = u_0

Shape letters: b batch, s sequence, d hidden, f FFN width, h query heads, k KV heads, e head
dimension, r rank, V vocabulary. Tensors carry the canonical names, whole and in [out, in] layout.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

ATTENTION_PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj")
MLP_PROJECTIONS = ("gate_proj", "up_proj", "down_proj")

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "identity": lambda z: z,
}


@dataclass(frozen=True)
class Llama3RopeScaling:
    """RoPE frequency scaling of Llama 3.1: long wavelengths are divided by `factor`."""

    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 8192


@dataclass(frozen=True)
class Lax:
    """The crossing of latents."""

    gate: Literal["identity", "linear", "tensor"] = "tensor"
    norm: Literal["none", "layernorm", "rmsnorm"] = "layernorm"


@dataclass(frozen=True, kw_only=True)
class PlainConfig:
    """Sizes and choices of a `PlainLlama`.

    `rank` is that of q, k, v and o, `mlp_rank` (default: `rank`) that of gate, up and down, and
    `ranks` overrides both for the projections it names. `low_rank_layers` are the first and the
    last low-rank layer, the others being dense with "swiglu" (None: all are low-rank). `act` acts
    on the latent, and "gelu" is the exact one (erf); of it `act_amount` is mixed with the identity.
    `projection` makes a low-rank projection of another architecture from (in, out, rank, act).
    `rope_dtype` is the precision of the RoPE
    angles: float64 is exact, float32 reproduces the rounding of libraries that compute them in
    float32 whatever the model's dtype.

    Raises ValueError for sizes that make no model.
    """

    vocab_size: int
    hidden: int
    ffn: int
    heads: int
    kv_heads: int
    head_dim: int
    layers: int
    arch: Literal["dense", "cola"]
    rank: int = 0
    mlp_rank: int | None = None
    ranks: Mapping[str, int] | None = None
    act: Literal["silu", "gelu", "identity"] = "silu"
    act_amount: float = 1.0
    mlp: Literal["product", "swiglu"] = "swiglu"
    lax: Lax | None = None
    projection: Callable[[int, int, int, Callable[[Tensor], Tensor]], nn.Module] | None = None
    low_rank_layers: tuple[int, int] | None = None
    norm_eps: float = 1e-5
    rope_base: float = 10000.0
    rope_scaling: Llama3RopeScaling | None = None
    rope_dtype: torch.dtype = torch.float64
    tied: bool = False

    def __post_init__(self) -> None:
        projections = ATTENTION_PROJECTIONS + MLP_PROJECTIONS
        for field, value, legal in (
            ("arch", self.arch, ("dense", "cola")),
            ("act", self.act, tuple(ACTIVATIONS)),
            ("mlp", self.mlp, ("product", "swiglu")),
        ):
            if value not in legal:
                raise ValueError(f"{field} must be one of {legal}, not {value!r}")
        if self.heads % self.kv_heads:
            raise ValueError(f"heads {self.heads} is no multiple of kv_heads {self.kv_heads}")
        if self.head_dim % 2:
            raise ValueError(f"head_dim {self.head_dim} is odd, and RoPE rotates pairs")
        if unknown := set(self.ranks or {}) - set(projections):
            raise ValueError(f"ranks names {sorted(unknown)}, which are not in {projections}")
        if self.arch == "dense" and self.mlp == "product":
            raise ValueError("mlp 'product' belongs to arch 'cola'; a dense LLaMA has 'swiglu'")
        if self.arch == "cola" and min(map(self.rank_of, projections)) < 1:
            raise ValueError("arch 'cola' needs a rank of at least 1 for every projection")

    def is_low_rank(self, layer: int) -> bool:
        """Whether that layer's projections are factorised."""
        first, last = self.low_rank_layers or (0, self.layers - 1)
        return self.arch != "dense" and first <= layer <= last

    def rank_of(self, projection: str) -> int:
        """Rank of a projection such as "q_proj"."""
        if self.ranks and projection in self.ranks:
            return self.ranks[projection]
        if projection in MLP_PROJECTIONS and self.mlp_rank is not None:
            return self.mlp_rank
        return self.rank


def unset(*shape: int) -> nn.Parameter:
    """A parameter of NaNs: a tensor that nobody loaded cannot pass for a trained one."""
    return nn.Parameter(torch.full(shape, math.nan))


def _at_least_fp32(x: Tensor) -> Tensor:
    """`x` in float32, or as it is when it is wider."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


class Weight(nn.Module):
    """A bare full-rank `weight` [out, in]: an embedding, a head or a dense projection."""

    def __init__(self, out_features: int, in_features: int) -> None:
        super().__init__()
        self.weight = unset(out_features, in_features)

    def forward(self, x: Tensor) -> Tensor:
        """`W x`: [..., in] -> [..., out]."""
        return F.linear(x, self.weight)


def mixed_activation(act: str, amount: float, v: Tensor) -> Tensor:
    """`act`, of which `amount` is mixed with the identity."""
    return (1 - amount) * v + amount * ACTIVATIONS[act](v)


class LowRankProjection(nn.Module):
    """`B act(A x)` with `A` [r, in] and `B` [out, r]; with LaX, `B act(Norm(A x + G(before)))`."""

    def __init__(
        self,
        out_features: int,
        in_features: int,
        rank: int,
        act: str,
        lax: Lax | None = None,
        act_amount: float = 1.0,
    ) -> None:
        super().__init__()
        self.A = unset(rank, in_features)
        self.B = unset(out_features, rank)
        self.act = partial(mixed_activation, act, act_amount)
        self.lax = lax
        self.z: Tensor
        """The latent of the last forward, which the next layer reads."""
        if lax is None:
            return
        if lax.gate == "tensor":
            # The divisor of r nearest to its square root from below.
            p = max(p for p in range(1, rank + 1) if rank % p == 0 and p * p <= rank)
            self.gate_left, self.gate_right = unset(p, p), unset(rank // p, rank // p)
        elif lax.gate == "linear":
            self.gate_weight, self.gate_bias = unset(rank, rank), unset(rank)
        if lax.norm != "none":
            self.norm_weight = unset(rank)
        if lax.norm == "layernorm":
            self.norm_bias = unset(rank)

    def forward(self, x: Tensor, before: LowRankProjection | None = None) -> Tensor:
        """[..., in] -> [..., out]; `before` is the same projection of the layer before."""
        v = F.linear(x, self.A)
        if self.lax is not None:
            assert before is not None
            v = self._norm(v + self._gate(before.z))
        self.z = self.act(v)
        return F.linear(self.z, self.B)

    def _gate(self, z: Tensor) -> Tensor:
        assert self.lax is not None
        if self.lax.gate == "identity":
            return z
        if self.lax.gate == "linear":
            return F.linear(z, self.gate_weight, self.gate_bias)
        matrix = z.unflatten(-1, (len(self.gate_left), len(self.gate_right)))
        gated = torch.einsum("...ij,ik,jl->...kl", matrix, self.gate_left, self.gate_right)
        return gated.flatten(-2)

    def _norm(self, v: Tensor) -> Tensor:
        assert self.lax is not None
        if self.lax.norm == "layernorm":
            return F.layer_norm(v, v.shape[-1:], self.norm_weight, self.norm_bias, 1e-6)
        if self.lax.norm == "rmsnorm":
            return F.rms_norm(v, v.shape[-1:], self.norm_weight, 1e-6)
        return v


def _projection(
    config: PlainConfig, layer: int, name: str, out_features: int, in_features: int
) -> nn.Module:
    if not config.is_low_rank(layer):
        return Weight(out_features, in_features)
    if config.projection is not None:
        act = partial(mixed_activation, config.act, config.act_amount)
        return config.projection(in_features, out_features, config.rank_of(name), act)
    lax = config.lax if layer > 0 and config.is_low_rank(layer - 1) else None
    return LowRankProjection(
        out_features, in_features, config.rank_of(name), config.act, lax, config.act_amount
    )


def _apply(projection: nn.Module, x: Tensor, before: nn.Module | None) -> Tensor:
    if isinstance(projection, LowRankProjection) and isinstance(before, LowRankProjection):
        return projection(x, before)
    return projection(x)


class RMSNorm(nn.Module):
    """`weight * x / sqrt(mean(x^2) + eps)` over the last axis, in float32 or wider."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = unset(size)
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """[..., d] -> [..., d], in the dtype of `x`."""
        wide = _at_least_fp32(x)
        rms = (wide.square().mean(dim=-1, keepdim=True) + self.eps).sqrt()
        return (self.weight * (wide / rms)).to(x.dtype)


def rope_tables(config: PlainConfig, length: int) -> tuple[Tensor, Tensor]:
    """Cosine and sine of the RoPE angles of positions 0 to length-1: two [s, e/2] in `rope_dtype`.

    Pair i turns by `position * base^(-2i/e)`. Llama 3.1 scaling keeps the frequencies that turn
    more than `high_freq_factor` times within the original context, divides those that turn less
    than `low_freq_factor` times by `factor`, and blends linearly in the number of turns between.
    """
    exponent = torch.arange(0, config.head_dim, 2, dtype=config.rope_dtype) / config.head_dim
    frequency = 1.0 / config.rope_base**exponent
    if (scaling := config.rope_scaling) is not None:
        turns = scaling.original_max_position / (2 * math.pi / frequency)
        keep = (turns - scaling.low_freq_factor) / (
            scaling.high_freq_factor - scaling.low_freq_factor
        )
        keep = keep.clamp(0.0, 1.0)
        frequency = (1 - keep) * frequency / scaling.factor + keep * frequency
    angle = torch.outer(torch.arange(length, dtype=config.rope_dtype), frequency)
    return angle.cos(), angle.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate-half RoPE: component i of [..., s, e] is paired with component i + e/2."""
    wide = _at_least_fp32(x)
    first, second = wide.chunk(2, dim=-1)
    cos, sin = cos.to(wide), sin.to(wide)
    rotated = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
    return rotated.to(x.dtype)


class Attention(nn.Module):
    """Causal attention with RoPE; query head i reads KV head `i // (h / k)`."""

    def __init__(self, config: PlainConfig, layer: int = 0) -> None:
        super().__init__()
        self.config = config
        d = config.hidden
        q_width = config.heads * config.head_dim
        kv_width = config.kv_heads * config.head_dim
        self.q_proj = _projection(config, layer, "q_proj", q_width, d)
        self.k_proj = _projection(config, layer, "k_proj", kv_width, d)
        self.v_proj = _projection(config, layer, "v_proj", kv_width, d)
        self.o_proj = _projection(config, layer, "o_proj", d, q_width)

    def forward(self, x: Tensor, before: Attention | None = None) -> Tensor:
        """[b, s, d] -> [b, s, d]; the softmax is in float32 or wider."""
        length = x.shape[1]
        head_dim = self.config.head_dim
        q, k, v = (
            _apply(getattr(self, name), x, before and getattr(before, name))
            .unflatten(-1, (-1, head_dim))
            .transpose(1, 2)
            for name in ("q_proj", "k_proj", "v_proj")
        )
        cos, sin = rope_tables(self.config, length)
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        group = self.config.heads // self.config.kv_heads
        k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)

        scores = _at_least_fp32(torch.einsum("bhie,bhje->bhij", q, k)) / math.sqrt(head_dim)
        future = torch.ones(length, length, dtype=torch.bool, device=x.device).triu(diagonal=1)
        weights = scores.masked_fill(future, -math.inf).softmax(dim=-1).to(v.dtype)
        mixed = torch.einsum("bhij,bhje->bhie", weights, v)
        return _apply(self.o_proj, mixed.transpose(1, 2).flatten(2), before and before.o_proj)


class MLP(nn.Module):
    """`down(SiLU(gate(x)) * up(x))` (swiglu) or `down(gate(x) * up(x))` (product)."""

    def __init__(self, config: PlainConfig, layer: int = 0) -> None:
        super().__init__()
        self.swiglu = config.mlp == "swiglu" or not config.is_low_rank(layer)
        self.gate_proj = _projection(config, layer, "gate_proj", config.ffn, config.hidden)
        self.up_proj = _projection(config, layer, "up_proj", config.ffn, config.hidden)
        self.down_proj = _projection(config, layer, "down_proj", config.hidden, config.ffn)

    def forward(self, x: Tensor, before: MLP | None = None) -> Tensor:
        """[..., d] -> [..., d]."""
        gate = _apply(self.gate_proj, x, before and before.gate_proj)
        if self.swiglu:
            gate = F.silu(gate)
        up = _apply(self.up_proj, x, before and before.up_proj)
        return _apply(self.down_proj, gate * up, before and before.down_proj)


class Block(nn.Module):
    """One pre-norm decoder layer."""

    def __init__(self, config: PlainConfig, layer: int = 0) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden, config.norm_eps)
        self.self_attention = Attention(config, layer)
        self.pre_mlp_layernorm = RMSNorm(config.hidden, config.norm_eps)
        self.mlp = MLP(config, layer)

    def forward(self, x: Tensor, before: Block | None = None) -> Tensor:
        """[b, s, d] -> [b, s, d]; `before` is the block whose latents cross over, with LaX."""
        attention, mlp = (before.self_attention, before.mlp) if before else (None, None)
        x = x + self.self_attention(self.input_layernorm(x), attention)
        return x + self.mlp(self.pre_mlp_layernorm(x), mlp)


class Embedding(nn.Module):
    """The token embedding."""

    def __init__(self, config: PlainConfig) -> None:
        super().__init__()
        self.word_embeddings = Weight(config.vocab_size, config.hidden)

    def forward(self, tokens: Tensor) -> Tensor:
        """Integers [b, s] -> [b, s, d]."""
        return self.word_embeddings.weight[tokens]


class Decoder(nn.Module):
    """The stack of blocks and the final norm."""

    def __init__(self, config: PlainConfig) -> None:
        super().__init__()
        self.config = config
        self.layers = nn.ModuleList(Block(config, i) for i in range(config.layers))
        self.final_layernorm = RMSNorm(config.hidden, config.norm_eps)

    def forward(self, x: Tensor) -> Tensor:
        """[b, s, d] -> [b, s, d]."""
        before = None
        for layer in self.layers:
            x = layer(x, before)
            before = layer if self.config.lax else None
        return self.final_layernorm(x)


class PlainLlama(nn.Module):
    """The whole model; `state_dict()` and `named_parameters()` use the canonical names.

    Every parameter is NaN until `load_canonical` is called.
    """

    def __init__(self, config: PlainConfig, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        self.config = config
        self.embedding = Embedding(config)
        self.decoder = Decoder(config)
        if not config.tied:
            self.output_layer = Weight(config.vocab_size, config.hidden)
        self.to(dtype)

    def load_canonical(self, tensors: Mapping[str, Tensor]) -> PlainLlama:
        """Copy whole canonical tensors in, cast to the model's dtype, and return the model.

        Raises RuntimeError when a name is missing or unknown, or when a shape differs.
        """
        self.load_state_dict(dict(tensors), strict=True)
        return self

    def forward(self, tokens: Tensor, labels: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        """Logits [b, s, V], and the cross-entropy [b, s] of each position when labels are given.

        `tokens` and `labels` are integers [b, s]; `labels[:, t]` is the token to predict at
        position t (already shifted). The loss is in float32 or wider and not averaged.
        """
        x = self.decoder(self.embedding(tokens))
        head = self.embedding.word_embeddings if self.config.tied else self.output_layer
        logits = head(x)
        if labels is None:
            return logits, None
        log_probability = _at_least_fp32(logits).log_softmax(dim=-1)
        return logits, F.nll_loss(log_probability.transpose(1, 2), labels, reduction="none")


def random_canonical(
    config: PlainConfig, seed: int, fan_in: bool = True, dtype: torch.dtype = torch.float64
) -> dict[str, Tensor]:
    """Random whole tensors under their canonical names, the same numbers for every dtype.

    With `fan_in` each matrix has standard deviation `in^(-1/2)`, so that the blocks matter to the
    loss, and norm weights are `1 + 0.1 N(0, 1)`, so that a lost or misplaced one shows. Without,
    the initialisation is that of training: low-rank factors `r^(-1/4) (in + out)^(-1/4)`, every
    other matrix 0.02, norm weights 1.
    """
    generator = torch.Generator().manual_seed(seed)
    with torch.device("meta"):
        shapes = {name: t.shape for name, t in PlainLlama(config).state_dict().items()}
    tensors = {}
    for name, shape in shapes.items():
        noise = torch.randn(shape, generator=generator, dtype=torch.float64)
        if name.endswith("_bias"):
            value = 0.1 * noise if fan_in else torch.zeros_like(noise)
        elif len(shape) == 1:
            value = 1 + 0.1 * noise if fan_in else torch.ones_like(noise)
        elif fan_in:
            value = noise / math.sqrt(shape[1])
        elif name.endswith((".A", ".B")):
            projection = name.rsplit(".", 1)[0]
            rank, in_features = shapes[projection + ".A"]
            out_features = shapes[projection + ".B"][0]
            value = noise * (rank * (in_features + out_features)) ** -0.25
        else:
            value = 0.02 * noise
        tensors[name] = value.to(dtype)
    return tensors


def adamw_steps(
    model: PlainLlama,
    batches: Iterable[tuple[Tensor, Tensor]],
    lr: float,
    *,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 0.01,
    clip_grad: float = 1.0,
    decay_norms: bool = False,
) -> list[tuple[float, float]]:
    """Train with one AdamW step per (tokens, labels) batch; return each step's (loss, grad norm).

    The loss is the mean over the batch's tokens. The gradient is scaled by
    `min(1, clip_grad / (norm + 1e-6))` with the global L2 norm taken in float64 before clipping;
    `clip_grad=0` turns that off. Weight decay is decoupled and applies to matrices, and to norm
    weights too with `decay_norms`.
    """
    parameters = list(model.parameters())
    groups = [
        {"params": [p for p in parameters if p.ndim > 1], "weight_decay": weight_decay},
        {
            "params": [p for p in parameters if p.ndim == 1],
            "weight_decay": weight_decay if decay_norms else 0.0,
        },
    ]
    optimizer = torch.optim.AdamW(groups, lr=lr, betas=betas, eps=eps)
    history = []
    for tokens, labels in batches:
        optimizer.zero_grad()
        loss = model(tokens, labels)[1].mean()
        loss.backward()
        gradients = [p.grad for p in parameters if p.grad is not None]
        norm = math.hypot(*(g.double().norm().item() for g in gradients))
        if clip_grad:
            scale = min(1.0, clip_grad / (norm + 1e-6))
            for gradient in gradients:
                gradient.mul_(scale)
        optimizer.step()
        history.append((loss.item(), norm))
    return history
