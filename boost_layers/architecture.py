"""What a low-rank architecture is, and how one becomes known by name.

Every projection is y = B·z, and z is made of latents: u = A·x, and those of more down-projections
of the same x where an architecture has them. An `Architecture` says which factors a projection has
and how z is made of the latents; sharding, collectives, checkpoints, recomputation and accounting
follow from that. CoLA, SVD and LaX are registered here as a program's own are in its file.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

Phi = Callable[["Tensor"], "Tensor"]
"""φ, element by element."""

Combine = Callable[..., "Tensor"]
"""(φ, u, …) → z: φ is a `Phi`, u, … the latents `[n, r]`, one for each down-projection, in fp32
(fp64 in an fp64 model); z is `[n, r]`."""

_TAKEN = ("none", "dense")


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """The factors of a projection, and what stands between its latents and B.

    Raises:
        ValueError: on construction, for what could not be computed.
    """

    name: str
    """In `LowRankConfig.arch`, in checkpoints and in messages."""

    activation: str | None
    """φ, where the settings leave it to the architecture: "silu", "gelu" or "identity"; None, with
    a crossing: that of `LowRankConfig.lax_base`."""

    mlp: str | None
    """What joins gate and up, where the settings leave it to the architecture: "swiglu" or
    "product"; None, with a crossing: that of `LowRankConfig.lax_base`."""

    downs: tuple[str, ...] = ("A",)
    """The down-projections `[r, in]` of one projection, by the names of their weights beside B
    `[out, r]`. Their latents lie side by side in one message, `len(downs)`·r wide."""

    combine: Combine | None = None
    """How z is made of the latents, token by token, without parameters of its own and without
    writing into what it is given; None: φ(u), by a fused kernel. Its gradient is autograd's, so it
    may be a `torch.autograd.Function`'s `apply`; it is computed again in backward, and nothing of
    it is kept."""

    elementwise: bool = False
    """Whether each of the r numbers of z depends on the same one of every latent alone. Vanilla
    tensor parallelism, where a rank holds r/T of them, takes no other `combine`."""

    crossing: bool = False
    """Whether latents cross over from layer to layer, with gates and norms (LaX)."""

    def __post_init__(self) -> None:
        names = (*self.downs, "B")
        clash = [name for name in names if name.startswith(("gate_", "norm_"))]
        words = (
            ("activation", self.activation, ("silu", "gelu", "identity")),
            ("mlp", self.mlp, ("swiglu", "product")),
        )
        problems = (
            *(
                (word not in (None, *legal), f"its {name} {word!r} is none of {', '.join(legal)}")
                for name, word, legal in words
            ),
            (self.name in _TAKEN or not self.name.isidentifier(), "its name is no new word"),
            (
                None in (self.activation, self.mlp) and not self.crossing,
                "only one with a latent crossing leaves activation and mlp to --lax-base",
            ),
            (not self.downs, "it has no down-projection"),
            (
                self.combine is not None and not callable(self.combine),
                f"its combine {self.combine!r} is no function",
            ),
            (
                len(set(names)) < len(names) or not all(name.isidentifier() for name in names),
                f"its weights' names are not distinct words: {', '.join(names)}",
            ),
            (bool(clash) and self.crossing, f"LaX has weights named {', '.join(clash)}"),
            (
                len(self.downs) > 1 and self.combine is None,
                "nothing says how z is made of several latents; give it a `combine`",
            ),
            (
                self.crossing and self.combine is not None,
                "a latent that crosses over is z = φ(Norm(…)), and it has a `combine`",
            ),
        )
        for wrong, problem in problems:
            if wrong:
                raise ValueError(f"architecture {self.name!r}: {problem}")


_REGISTERED: dict[str, Architecture] = {}


def register_architecture(architecture: Architecture) -> Architecture:
    """Make an architecture known by its name, in this process: `LowRankConfig(arch=name)`, and
    `--low-rank-arch name` in a script that then calls `pretrain_gpt.py`'s main.

    Returns:
        `architecture`.

    Raises:
        ValueError: where another one has its name.
    """
    if _REGISTERED.setdefault(architecture.name, architecture) != architecture:
        raise ValueError(f"architecture {architecture.name!r}: another one has that name already")
    return architecture


def architecture_of(name: str) -> Architecture | None:
    """The architecture of that name; None for "none" and "dense", whose projections are full-rank.

    Raises:
        ValueError: for a name that is not registered.
    """
    if name in _TAKEN:
        return None
    if name not in _REGISTERED:
        raise ValueError(
            f"--low-rank-arch {name}: legal values are {', '.join(architecture_names())}"
        )
    return _REGISTERED[name]


def architecture_names() -> tuple[str, ...]:
    """All that `LowRankConfig.arch` may be now."""
    return (*_TAKEN, *_REGISTERED)


COLA = register_architecture(Architecture(name="cola", activation="silu", mlp="product"))
SVD = register_architecture(Architecture(name="svd", activation="identity", mlp="swiglu"))
LAX = register_architecture(Architecture(name="lax", activation=None, mlp=None, crossing=True))
