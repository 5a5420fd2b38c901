"""The figures of the documentation are those that the code draws, and show what it says."""

from __future__ import annotations

import re
from xml.etree import ElementTree

import pytest

from boost_layers.config import LowRankConfig
from docs.figures import block, volume
from docs.figures.__main__ import FIGURES, IMAGES
from docs.figures.style import svg
from megatron.boost.accounting.collectives import layer_collectives
from megatron.boost.accounting.sizes import Layout, Model
from tests.support.programs import ROOT

PAGE = ROOT / "docs" / "how-btp-works.md"
_NUMBER = re.compile(r"-?\d+(?:\.\d+)?")


def drawn(text: str) -> list[tuple[str, str, list[float]]]:
    """Of each element of an SVG its words and its numbers, without the names that others refer to
    it by, which are hashes."""
    found = []
    for element in ElementTree.fromstring(text).iter():
        attributes = " ".join(
            value for key, value in element.attrib.items() if "href" not in key and key != "id"
        )
        attributes = re.sub(r"url\(#\w+\)", "", attributes)
        words = _NUMBER.sub("", f"{element.tag} {attributes}") + (element.text or "").strip()
        found.append((element.tag, words, [float(n) for n in _NUMBER.findall(attributes)]))
    return found


@pytest.mark.parametrize("name", FIGURES)
def test_the_page_shows_what_the_code_draws(name: str) -> None:
    """To half a point, which another release of Matplotlib may round otherwise."""
    stored = drawn((IMAGES / f"{name}.svg").read_text(encoding="utf-8"))
    anew = drawn(svg(FIGURES[name]()))
    assert [element[:2] for element in anew] == [element[:2] for element in stored]
    for (_, _, here), (_, _, there) in zip(anew, stored, strict=True):
        assert here == pytest.approx(there, abs=0.5)
    assert f"(images/{name}.svg)" in PAGE.read_text(encoding="utf-8")


@pytest.mark.parametrize("title, colour, layer", block.LAYERS, ids=[t for t, _, _ in block.LAYERS])
def test_the_drawn_collectives_are_the_accounted_ones(
    title: str, colour: str, layer: tuple[block.Tensor | block.Step, ...]
) -> None:
    d, f, r = 64, 172, 16
    strategy = {"full-rank": {"arch": "dense"}, "BTP": {"arch": "cola"}}
    settings = strategy.get(title, {"arch": "cola", "tp": "vanilla"})
    model = Model(
        hidden_size=d,
        ffn_hidden_size=f,
        num_attention_heads=4,
        num_query_groups=4,
        kv_channels=d // 4,
        num_layers=2,
        vocab_size=32,
        padded_vocab_size=32,
        tied=False,
        low_rank=LowRankConfig(**settings, rank=r, norm="sync"),
    )
    layout = Layout(sequence_length=1, micro_batch_size=1, tensor_parallel=4)
    found = layer_collectives(model, layout, 1)
    widths = {"d": d, "f": f, "r": r, "2r": 2 * r, "3r": 3 * r}
    reduced = [widths[width] for width in block.communicated(layer, "all_reduced")]
    gathered = [widths[width] for width in block.communicated(layer, "gathered")]
    accounted = found["forward", "all_reduce"]
    # The synchronous norm's two messages of one fp32 number, which the figure has no columns for.
    norms = 2 if title == "BTP" else 0
    assert (len(reduced) + norms, 2 * sum(reduced) + 4 * norms) == (
        accounted.calls,
        accounted.bytes,
    )
    shards = found.get(("forward", "all_gather"))
    assert sum(gathered) == (shards.bytes * 4 // 2 if shards else 0)


def test_the_drawn_tensors_join() -> None:
    """A layer begins and ends with the residual stream, and widths are the model's."""
    for _, _, layer in block.LAYERS:
        assert layer[0] == layer[-1]
        kinds = [isinstance(part, block.Tensor) for part in layer]
        assert kinds == [place % 2 == 0 for place in range(len(layer))]
    (numbers,) = [row for row in volume.table_rows("model") if row[0] == "7B"]
    hidden, ffn, _, _, rank = (int(number) for number in numbers[1:6])
    assert (block.F, block.R) == (ffn / hidden, rank / hidden)


def test_the_drawn_volumes_are_those_of_the_table_by_hand() -> None:
    """7B at TP 4, forward: 14r, 4d and 11d + 4f elements a token, times 3/4."""
    n, d, f, r = 4 * 4096, 4096, 11008, 1024
    share = n * 2 * 3 / 4 / 2**30
    by_hand = {"full-rank": 4 * d, "vanilla low-rank": 11 * d + 4 * f, "BTP": 14 * r + 2 * 24}
    for title, _, settings in volume.STRATEGIES:
        found = volume.sent_gib("7B", settings, "forward")
        assert found == pytest.approx(by_hand[title] * share, rel=1e-9), title
