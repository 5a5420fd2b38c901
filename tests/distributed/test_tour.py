"""The tour of a block shows what the accounting says by formulas, in every strategy and
architecture."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron.boost.accounting.collectives import layer_collectives
from megatron.boost.accounting.parameters import layer_tensors
from megatron.boost.accounting.sizes import Layout, Model
from tests.support.distributed import run_ranks

EXAMPLES = Path(__file__).parents[2] / "examples"
BLOCKS = [
    ("btp", "cola"),
    ("btp", "lax"),
    ("btp", "gated"),
    ("vanilla", "cola"),
    ("vanilla", "lax"),
    ("vanilla", "gated"),
    ("dense", "cola"),
]
# A latent is whole on every rank under BTP alone.
LATENTS = {
    "btp": {("latents", "on every rank")},
    "vanilla": {
        (name, f"split along axis 2{apart}")
        for name in ("u", "d u")
        for apart in ("", ", each projection's part apart")
    },
    "dense": set(),
}


def tours(tp: int) -> dict[tuple[str, str], Any]:
    """On a rank: of each block, what is shown of its tensors and of its collectives, and what the
    accounting says of both."""
    sys.path.insert(0, str(EXAMPLES))
    import tour_of_a_block as example

    found = {}
    for strategy, arch in BLOCKS:
        settings = example.settings_of(SimpleNamespace(strategy=strategy, arch=arch))
        steps = example.tour(settings)
        shown = [
            (step.phase, t.name, tuple(t.whole_shape or ()), tuple(t.value.shape), t.layout)
            for step in steps
            for t in step.tensors
        ]
        sizes = example.SIZES | {"vocab_size": 1, "padded_vocab_size": 1, "tied": True}
        model = Model(**sizes, low_rank=settings)
        layout = Layout(
            sequence_length=example.SEQUENCE,
            micro_batch_size=example.BATCH,
            tensor_parallel=tp,
            dtype=torch.float32,
        )
        collectives = {}
        for (phase, operation), traffic in layer_collectives(model, layout, 1).items():
            collectives[f"{phase}_{operation}_calls"] = traffic.calls
            collectives[f"{phase}_{operation}_bytes"] = traffic.bytes
        found[strategy, arch] = (
            shown,
            example.summary(steps),
            collectives,
            {name: (t.shape, t.on_rank(tp), t.axis) for name, t in layer_tensors(model, 1).items()},
        )
    return found


@pytest.mark.parametrize("tp", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_a_tour_shows_what_runs(tp: int) -> None:
    for found in run_ranks(tours, tp, tp):
        for block, (shown, summary, collectives, parameters) in found.items():
            assert summary == collectives, block
            for phase, prefix in (("forward", ""), ("backward", "d ")):
                named = {name: rest for of, name, *rest in shown if of == phase}
                for name, (whole, local, axis) in parameters.items():
                    # The weights of grouped latents' norms are shown side by side.
                    if ".norm_" in name:
                        continue
                    layout = "on every rank" if axis is None else f"split along axis {axis}"
                    assert named[prefix + name] == [whole, local, layout], (block, name)
            assert [t for t in shown if not t[2]] == [], block
            first, last = shown[0], [t for t in shown if t[0] == "forward"][-1]
            assert first[1] == last[1] == "x" and first[2:] == last[2:]
            layouts = {
                (name, layout) for _, name, *_, layout in shown if name in ("latents", "u", "d u")
            }
            assert layouts <= LATENTS[block[0]] and bool(layouts) == bool(LATENTS[block[0]]), block
