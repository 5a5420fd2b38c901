"""A rank's share of a replicated latent, kept for backward in place of the whole."""

from __future__ import annotations

import torch.distributed as dist
from torch import Tensor

from boost_layers.initialization import shard_of
from boost_layers.mappings import as_tokens, gather_along


def to_save(value: Tensor, kept: KeptTokens | None) -> tuple[Tensor | None, KeptTokens | None]:
    """What a Function saves of a replicated tensor `[s, b, w]`: the tensor, or where its share is
    kept, of which it becomes a consumer."""
    return (value, None) if kept is None else (None, kept.add_consumer())


def restored(value: Tensor | None, kept: KeptTokens | None) -> Tensor:
    """The tensor as `[n, w]` from what `to_save` gave. With a share, one all-gather for all of its
    consumers."""
    if kept is not None:
        return kept.whole()
    assert value is not None
    return as_tokens(value)


class KeptTokens:
    """This rank's 1/T of the tokens of a tensor that every rank of the group holds whole.

    Several consumers share one; the first that asks in backward pays one all-gather, and the whole
    tensor is let go when the last has asked.
    """

    def __init__(self, group: dist.ProcessGroup):
        self.group = group
        self._share: Tensor | None = None
        self._whole: Tensor | None = None
        self._consumers = 0
        self._waiting = 0

    @property
    def holds(self) -> bool:
        """Whether `keep` was called."""
        return self._share is not None

    @classmethod
    def of(cls, whole: Tensor, like: KeptTokens | None) -> KeptTokens | None:
        """The share of `whole`, kept as `like` is; None if that is None."""
        if like is None:
            return None
        kept = cls(like.group)
        kept.keep(whole)
        return kept

    def keep(self, whole: Tensor) -> None:
        """Take this rank's tokens of `[s, b, w]` or `[n, w]`."""
        group = self.group
        tokens = as_tokens(whole.detach())
        self._share = shard_of(tokens, 0, group.rank(), group.size()).clone()

    def add_consumer(self) -> KeptTokens:
        """Called in forward by each that will ask for the tensor in backward."""
        self._consumers += 1
        return self

    def whole(self) -> Tensor:
        """The tensor as `[n, w]`, once for each consumer. The first time one all-gather."""
        if self._whole is None:
            assert self._share is not None
            self._whole = gather_along(self._share, 0, self.group, "recompute")
            self._waiting = self._consumers
        whole = self._whole
        self._waiting -= 1
        if self._waiting == 0:
            self._whole = None
        return whole
