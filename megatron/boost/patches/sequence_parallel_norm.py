"""The local implementation's norm refuses sequence parallelism.

Each rank normalises its own tokens, so the norm itself is the same; but its weight's gradient is
then a sum over a part of the tokens, and `finalize_model_grads` completes only those of parameters
marked `sequence_parallel`. Without the mark the ranks' weights drift apart, silently.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from typing import Any

from torch import nn

from megatron.boost.patches import Patch
from megatron.boost.patches.replacement import replaced


@contextlib.contextmanager
def _apply() -> Iterator[None]:
    from megatron.core.transformer.torch_norm import WrappedTorchNorm

    upstream = WrappedTorchNorm.__new__

    def build(cls: type, config: Any, *args: Any, **kwargs: Any) -> nn.Module:
        """Upstream's norm; over a sequence shard, with its parameters marked."""
        if not config.sequence_parallel:
            return upstream(cls, config, *args, **kwargs)
        accepted = copy.copy(config)
        accepted.sequence_parallel = False
        norm: nn.Module = upstream(cls, accepted, *args, **kwargs)
        for parameter in norm.parameters():
            parameter.sequence_parallel = True  # type: ignore[attr-defined]
        return norm

    with replaced(WrappedTorchNorm, "__new__", staticmethod(build)):
        yield


PATCH = Patch(
    name="sequence_parallel_norm",
    reason="the norm of the local implementation refuses --sequence-parallel",
    needs="always",
    apply=_apply,
)
