"""Low-rank ("bottleneck") LLaMA layers for Megatron-Core, with bottleneck-aware tensor parallelism.

Usable in any Megatron-Core program; knows nothing of a command line or a training loop.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from boost_layers.architecture import Architecture, register_architecture
from boost_layers.config import LowRankConfig

if TYPE_CHECKING:
    from boost_layers.annealing import set_activation_amount
    from boost_layers.specs import finish_model, low_rank_spec

__all__ = [
    "Architecture",
    "LowRankConfig",
    "finish_model",
    "low_rank_spec",
    "register_architecture",
    "set_activation_amount",
]


def __getattr__(name: str) -> Any:
    """The functions on first use: they import Megatron, which takes seconds."""
    if name in ("finish_model", "low_rank_spec"):
        return getattr(import_module("boost_layers.specs"), name)
    if name == "set_activation_amount":
        return getattr(import_module("boost_layers.annealing"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
