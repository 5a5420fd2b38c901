"""What a layer communicates under each strategy, from the accounting."""

from __future__ import annotations

from matplotlib.figure import Figure

from boost_layers.config import LowRankConfig
from docs.figures.style import BTP, FULL_RANK, INK, VANILLA
from megatron.boost.accounting.collectives import layer_collectives, wire_bytes
from megatron.boost.accounting.sizes import Layout, Model
from megatron.boost.recipes.table import table_rows

LAYOUT = Layout(sequence_length=4096, micro_batch_size=4, tensor_parallel=4)
SIZES = ("3B", "7B", "13B", "30B")
STRATEGIES = (
    ("full-rank", FULL_RANK, {"arch": "dense"}),
    ("vanilla low-rank", VANILLA, {"arch": "cola", "tp": "vanilla"}),
    ("BTP", BTP, {"arch": "cola", "tp": "btp"}),
)
_GIB = 2**30


def model_of(size: str, settings: dict[str, str]) -> Model:
    """A model of the recipes."""
    numbers = next(row[1:6] for row in table_rows("model") if row[0] == size)
    hidden, ffn, heads, layers, rank = (int(number) for number in numbers)
    return Model(
        hidden_size=hidden,
        ffn_hidden_size=ffn,
        num_attention_heads=heads,
        num_query_groups=heads,
        kv_channels=hidden // heads,
        num_layers=layers,
        vocab_size=32000,
        padded_vocab_size=32256,
        tied=False,
        low_rank=LowRankConfig(**settings, rank=rank),
    )


def sent_gib(size: str, settings: dict[str, str], phase: str) -> float:
    """GiB that one rank sends in one layer and micro-batch, by ring algorithms."""
    collectives = layer_collectives(model_of(size, settings), LAYOUT, 1)
    of_phase = {key: traffic for key, traffic in collectives.items() if key[0] == phase}
    return wire_bytes(of_phase, LAYOUT.tensor_parallel) / _GIB


def figure() -> Figure:
    """Bars by size and strategy, forward below backward."""
    drawn = Figure(figsize=(9, 4.2), layout="constrained")
    axes = drawn.subplots()
    for place, (title, colour, settings) in enumerate(STRATEGIES):
        at = [number + (place - 1) * 0.27 for number in range(len(SIZES))]
        forward = [sent_gib(size, settings, "forward") for size in SIZES]
        backward = [sent_gib(size, settings, "backward") for size in SIZES]
        axes.bar(at, forward, 0.25, color=colour, label=f"{title}, forward")
        axes.bar(at, backward, 0.25, bottom=forward, color=colour, alpha=0.45, label="… backward")
        for x, low, high in zip(at, forward, backward, strict=True):
            axes.text(x, low + high, f"{low + high:.2f}", ha="center", va="bottom", fontsize=8.5)
    axes.set_xticks(range(len(SIZES)), SIZES)
    axes.set_ylabel("GiB sent by a rank, a layer, 4 × 4096 tokens")
    axes.set_title("TP 4, bf16, r = d/4", loc="left", fontsize=11, color=INK)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, ncols=3, fontsize=9)
    return drawn
