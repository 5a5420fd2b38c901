"""Low-rank ("bottleneck") LLaMA layers for Megatron-Core, with bottleneck-aware tensor parallelism.

Usable in any Megatron-Core program; knows nothing of a command line or a training loop.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from boost_layers.config import LowRankConfig

if TYPE_CHECKING:
    from boost_layers.specs import low_rank_spec
    from boost_layers.vocabulary import prepare_vocabulary

__all__ = ["LowRankConfig", "low_rank_spec", "prepare_vocabulary"]

_IMPORTS_MEGATRON = {"low_rank_spec": "specs", "prepare_vocabulary": "vocabulary"}


def __getattr__(name: str) -> Any:
    """The functions on first use: they import Megatron, which takes seconds."""
    if name in _IMPORTS_MEGATRON:
        return getattr(import_module(f"boost_layers.{_IMPORTS_MEGATRON[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
