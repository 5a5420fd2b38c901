"""z made of several latents, or otherwise than by φ alone: `Architecture.combine`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import batched

import torch
import torch.nn.functional as F
from torch import Tensor

from boost_layers import ops
from boost_layers.architecture import Architecture
from boost_layers.latent import LatentKind

_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "identity": lambda y: y,
}


@dataclass(frozen=True, kw_only=True)
class CombinedKind(LatentKind):
    """z_i = combine(φ_a, u_i, …) of the latents `[n, r_i]` of each projection, which lie side by
    side: `[n, Σ m·r_i]` with m down-projections. They are divided by ρ first, in the kernels that
    all latents go through; then the arithmetic is in fp32 (fp64)."""

    architecture: Architecture

    def open(
        self, v: Tensor, s: Tensor | None, weight: Tensor | None, bias: Tensor | None
    ) -> Tensor:
        """z, flat, its members one after the other, from v `[n, Σ m·r_i]` and S `[n, 1]`."""
        return self.together(self._combined(self._latents(v, s))).to(v.dtype)

    def open_backward(
        self,
        dz: Tensor,
        v: Tensor,
        s: Tensor | None,
        weight: Tensor | None,
        bias: Tensor | None,
    ) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
        """dv `[n, Σ m·r_i]` and dS of `open`, from dz as flat as z."""
        latents = [latent.requires_grad_() for latent in self._latents(v, s)]
        with torch.enable_grad():
            z = self._combined(latents)
        dmembers = [dmember.to(z[0].dtype) for dmember in self.members(dz, v.shape[0])]
        grads = torch.autograd.grad(z, latents, dmembers, materialize_grads=True)
        dv, _, ds, *_ = ops.latent_epilogue_backward(
            torch.cat(grads, dim=1).to(dz.dtype).flatten(),
            (v.shape[1],),
            "identity",
            h=v,
            statistics=s,
            hidden_size=self.hidden_size,
            eps=self.eps,
        )
        return dv, ds, None, None

    @property
    def widths(self) -> tuple[int, ...]:
        """Those of all down-projections of each projection."""
        return tuple(len(self.architecture.downs) * rank for rank in self.ranks)

    @property
    def is_plain(self) -> bool:
        """Whether z is v/ρ: it is not."""
        return False

    def _latents(self, v: Tensor, s: Tensor | None) -> list[Tensor]:
        """Every latent `[n, r_i]`, divided by ρ and outside of any graph."""
        flat, _ = ops.latent_epilogue(
            v,
            (v.shape[1],),
            "identity",
            statistics=s,
            hidden_size=self.hidden_size,
            eps=self.eps,
        )
        together = flat.detach().view(v.shape).to(torch.promote_types(v.dtype, torch.float32))
        widths = [rank for rank in self.ranks for _ in self.architecture.downs]
        return list(together.split(widths, dim=1))

    def _combined(self, latents: Sequence[Tensor]) -> list[Tensor]:
        """z_i `[n, r_i]` of each projection."""
        architecture = self.architecture
        assert architecture.combine is not None
        found = []
        for group in batched(latents, len(architecture.downs)):
            z = architecture.combine(self._phi, *group)
            if z.shape != group[0].shape:
                raise ValueError(
                    f"architecture {architecture.name!r}: its combine made {list(z.shape)} of "
                    f"latents {list(group[0].shape)}, which is the shape that B takes"
                )
            found.append(z)
        return found

    def _phi(self, y: Tensor) -> Tensor:
        """φ_a."""
        activated = _ACTIVATIONS[self.activation](y)
        return activated if self.amount == 1.0 else torch.lerp(y, activated, self.amount)
