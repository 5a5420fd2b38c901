"""The memory that the graph of a forward holds for its backward."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from unittest import mock

import torch
from torch import Tensor, nn

from boost_layers.kept import KeptTokens


class KeptMemory:
    """Saved-tensor hooks that add up the memory that a graph holds, each piece once, without the
    parameters, which live anyway."""

    def __init__(self, *modules: nn.Module) -> None:
        parameters: Iterable[Tensor] = (p for module in modules for p in module.parameters())
        self._own = {p.untyped_storage()._cdata for p in parameters}
        self._found: dict[int, Tensor] = {}
        self._shares: list[KeptTokens] = []

    def pack(self, tensor: Tensor) -> Tensor:
        """Note `tensor` and hold it, so that its memory is not given to another one meanwhile."""
        storage = tensor.untyped_storage()._cdata
        if storage not in self._own:
            self._found.setdefault(storage, tensor)
        return tensor

    @contextmanager
    def hooks(self) -> Iterator[None]:
        """The context in which to run the forward. What our Functions keep beside the graph, their
        rank's share of a latent, is noted too."""
        keep = KeptTokens.keep

        def noting(share: KeptTokens, whole: Tensor) -> None:
            keep(share, whole)
            self._shares.append(share)

        with (
            torch.autograd.graph.saved_tensors_hooks(self.pack, lambda tensor: tensor),
            mock.patch.object(KeptTokens, "keep", noting),
        ):
            yield

    @property
    def bytes(self) -> int:
        """Of everything noted that somebody will ask for."""
        for share in self._shares:
            if share._consumers and share._share is not None:
                self.pack(share._share)
        return sum(tensor.untyped_storage().nbytes() for tensor in self._found.values())
