"""The configuration of a low-rank LLaMA: LLaMA's own, and what its factorised projections are."""

from typing import Any, ClassVar

from transformers.models.llama.configuration_llama import LlamaConfig

PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")

_LEGAL = {
    "low_rank_arch": ("cola", "svd", "lax"),
    "low_rank_act": ("silu", "gelu", "identity"),
    "low_rank_mlp": ("swiglu", "product"),
    "lax_gate": ("identity", "linear", "tensor"),
    "lax_norm": ("none", "layernorm", "rmsnorm"),
}


class BoostConfig(LlamaConfig):
    """Settings of `BoostForCausalLM`, beside LLaMA's.

    Args:
        low_rank_arch: "cola" or "svd", y = B·φ(A·x); "lax", where the latents φ(…) of a layer cross
            over into the next.
        low_rank_act: φ.
        low_rank_mlp: what joins gate and up: "swiglu", SiLU(gate)·up, or "product", gate·up.
        low_rank_ranks: the rank of each projection, by name (`q_proj` …).
        low_rank_layers: the first and the last low-rank layer, counted from 0; the others are plain
            LLaMA layers. None: all of them.
        lax_base, lax_gate, lax_norm: the base, the gate and the norm of a latent crossing.
        activation_amount: a of φ_a(z) = (1 − a)·z + a·φ(z), below 1 in a model whose φ has not
            fully grown.
    """

    model_type = "boost"
    # Those of LLaMA name linear layers that are not there.
    base_model_tp_plan: ClassVar[dict[str, Any] | None] = None
    base_model_pp_plan: ClassVar[dict[str, Any] | None] = None

    def __init__(
        self,
        low_rank_arch: str = "svd",
        low_rank_act: str = "identity",
        low_rank_mlp: str = "swiglu",
        low_rank_ranks: dict[str, int] | None = None,
        low_rank_layers: list[int] | None = None,
        lax_base: str = "cola",
        lax_gate: str = "tensor",
        lax_norm: str = "layernorm",
        activation_amount: float = 1.0,
        **kwargs: Any,
    ):
        self.low_rank_arch = low_rank_arch
        self.low_rank_act = low_rank_act
        self.low_rank_mlp = low_rank_mlp
        self.low_rank_layers = low_rank_layers
        self.lax_base = lax_base
        self.lax_gate = lax_gate
        self.lax_norm = lax_norm
        self.activation_amount = activation_amount
        for name, legal in _LEGAL.items():
            if getattr(self, name) not in legal:
                raise ValueError(
                    f"{name} {getattr(self, name)}: legal values are {', '.join(legal)}"
                )
        quarter = max(1, kwargs.get("hidden_size", 4096) // 4)
        ranks = low_rank_ranks or {}
        self.low_rank_ranks = {name: ranks.get(name, quarter) for name in PROJECTIONS}
        super().__init__(**kwargs)

    def is_low_rank(self, layer: int) -> bool:
        """Whether a layer, counted from 0, has factors."""
        if self.low_rank_layers is None:
            return 0 <= layer < self.num_hidden_layers
        return self.low_rank_layers[0] <= layer <= self.low_rank_layers[1]

    def crosses(self, layer: int) -> bool:
        """Whether a layer, counted from 0, takes latents from the one before it."""
        return (
            self.low_rank_arch == "lax" and self.is_low_rank(layer) and self.is_low_rank(layer - 1)
        )
