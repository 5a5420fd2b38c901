"""A low-rank architecture of one's own in one file: y = B·(φ(u) ∘ sigmoid(w)).

Two down-projections of the same input, u = A·x and w = A_gate·x, give the value and the gate of a
latent, so that the messages are 2r wide forward, and r backward: the gradient of what is made of
both. What is written here is the architecture and, to compare it with, the same in plain PyTorch;
sharding, collectives, checkpoints, recomputation at the latents and accounting come with it. As a
program it trains the model of plain_gpt_model.py:

torchrun --nproc-per-node 2 examples/gated_latent.py                          # on GPUs
torchrun --nproc-per-node 2 -m megatron.boost.cpu examples/gated_latent.py    # without
"""

import torch
import torch.nn.functional as F
from torch import nn

from boost_layers import Architecture, LowRankConfig, register_architecture


def gated(phi, u, w):
    return phi(u) * torch.sigmoid(w)


register_architecture(
    Architecture(
        name="gated",
        activation="silu",
        mlp="product",
        downs=("A", "A_gate"),
        combine=gated,
        elementwise=True,
    )
)


class GatedProjection(nn.Module):
    """The definition in plain PyTorch, whole and dense, that the tests compare with."""

    def __init__(self, in_features, out_features, rank, phi):
        super().__init__()
        self.A = nn.Parameter(torch.empty(rank, in_features))
        self.A_gate = nn.Parameter(torch.empty(rank, in_features))
        self.B = nn.Parameter(torch.empty(out_features, rank))
        self.phi = phi

    def forward(self, x):
        gate = torch.sigmoid(F.linear(x, self.A_gate))
        return F.linear(self.phi(F.linear(x, self.A)) * gate, self.B)


if __name__ == "__main__":
    from plain_gpt_model import SEED, main

    main(LowRankConfig(arch="gated", ratio=0.25, seed=SEED))
