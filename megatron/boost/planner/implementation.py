"""How layers are computed, as far as the accounting does not say: what lies between the products,
which collectives there are, and what hides them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from megatron.boost.accounting.collectives import Message, layer_messages
from megatron.boost.accounting.products import Role
from megatron.boost.accounting.sizes import Layout, Model, Strategy
from megatron.boost.planner.elementwise import Sweep, layer_sweeps


@dataclass(frozen=True, kw_only=True)
class Implementation:
    """One code base."""

    name: str
    sweeps: Callable[[Model, Layout, int], tuple[Sweep, ...]] = layer_sweeps
    messages: Callable[[Model, Layout, int], tuple[Message, ...]] = layer_messages
    """Of one layer and micro-batch, without full recompute's."""
    hidden_strategies: frozenset[Strategy] = frozenset({"dense", "vanilla", "btp"})
    """Where backward all-reduces run beside weight gradients."""
    latent_recompute_communicates: bool = False
    """Whether checkpointing at the latents issues the forward's collectives again."""
    gradient_buffers: bool = True
    """Whether every weight gradient is added to a buffer, as Megatron's data-parallel wrapper has
    it. Else it stays where it was computed, as PyTorch leaves it where there is none to add to, in
    an iteration of one micro-batch."""
    fused_accumulation: bool = True
    """Whether weight gradients are accumulated in buffers by the GEMMs that compute them."""


BOOST = Implementation(name="boost")

HIDING_ROLE: dict[Strategy, Role] = {"dense": "full", "vanilla": "down", "btp": "up"}
"""The weights whose gradients are computed while the input's gradient is reduced: what is reduced
is the gradient of what these weights were multiplied with."""
