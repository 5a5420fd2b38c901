"""Low-rank ("bottleneck") LLaMA layers for Megatron-Core, with bottleneck-aware tensor parallelism.

Usable in any Megatron-Core program; knows nothing of a command line or a training loop.
"""

from typing import TYPE_CHECKING, Any

from boost_layers.config import LowRankConfig

if TYPE_CHECKING:
    from boost_layers.specs import low_rank_spec

__all__ = ["LowRankConfig", "low_rank_spec"]


def __getattr__(name: str) -> Any:
    """`low_rank_spec` on first use: it imports Megatron, which takes seconds."""
    if name == "low_rank_spec":
        from boost_layers.specs import low_rank_spec

        return low_rank_spec
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
