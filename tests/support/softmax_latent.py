"""An architecture that needs whole latents, in one file: y = B·(softmax(u) ∘ φ(v) + w)."""

import torch.nn.functional as F
from torch import Tensor, nn

from boost_layers import Architecture, register_architecture
from boost_layers.architecture import Phi
from tests.support.plain_llama import unset


def mixed(phi: Phi, u: Tensor, v: Tensor, w: Tensor) -> Tensor:
    """u, v and w `[n, r]` → `[n, r]`."""
    return F.softmax(u, dim=-1) * phi(v) + w


register_architecture(
    Architecture(
        name="softmax",
        activation="gelu",
        mlp="swiglu",
        downs=("A_share", "A", "A_skip"),
        combine=mixed,
    )
)


class SoftmaxProjection(nn.Module):
    """The same, whole."""

    def __init__(self, in_features: int, out_features: int, rank: int, phi: Phi) -> None:
        super().__init__()
        self.A_share, self.A, self.A_skip = (unset(rank, in_features) for _ in range(3))
        self.B = unset(out_features, rank)
        self.phi = phi

    def forward(self, x: Tensor) -> Tensor:
        """[..., in] -> [..., out]."""
        share = (x @ self.A_share.T).exp()
        share = share / share.sum(dim=-1, keepdim=True)
        return (share * self.phi(x @ self.A.T) + x @ self.A_skip.T) @ self.B.T
