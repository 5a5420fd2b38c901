"""Windows score every token once, with the context that the rule promises."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from megatron.boost.evaluation.tokens import Segment, TokensInMemory, segments
from megatron.boost.evaluation.windows import Window, batches, cut, share_of

SIZES = [
    (tokens, length, stride)
    for tokens in (1, 2, 3, 7, 8, 9, 16, 17, 40)
    for length in (1, 2, 7, 8)
    for stride in (1, 3, 7, 8)
    if stride <= length
]


def scored_positions(windows: list[Window]) -> list[int]:
    return [position for one in windows for position in range(one.stop - one.scored, one.stop)]


@pytest.mark.parametrize("prefix", [None, 5])
@pytest.mark.parametrize(("tokens", "length", "stride"), SIZES)
def test_every_token_is_scored_once(
    tokens: int, length: int, stride: int, prefix: int | None
) -> None:
    start = 3
    windows = cut([Segment(start, start + tokens, prefix)], length, stride)

    assert scored_positions(windows) == list(
        range(start if prefix is not None else start + 1, start + tokens)
    )
    for number, window in enumerate(windows):
        assert 1 <= window.scored <= window.length <= length
        # What a scored token can see: the whole text so far, or all that the stride leaves.
        context = window.length - window.scored
        assert number == 0 or context >= length - stride
        assert number == 0 or window.length == length
        assert (window.prefix is not None) == (prefix is not None and window.start == start)


def test_without_overlap_it_is_the_rolling_likelihood_of_lm_eval() -> None:
    lm_eval = pytest.importorskip("lm_eval.utils", reason="lm_eval is not installed")
    stream = TokensInMemory([np.arange(100, 100 + size) for size in (1, 5, 8, 9, 20)])
    for segment in segments(stream, "separate", 7, None):
        ours = []
        for window in cut([segment], 8, 8):
            (batch,) = batches([window], stream, 1, None)
            kept = window.length - window.scored
            ours.append((batch.tokens[0].tolist(), batch.labels[0, kept:].tolist()))
        theirs = lm_eval.get_rolling_token_windows(
            token_list=stream.read(segment.start, segment.stop).tolist(),
            prefix_token=7,
            max_seq_len=8,
            context_len=1,
        )
        assert ours == [(list(context), list(wanted)) for context, wanted in theirs]


@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
def test_ranks_share_out_all_windows(ranks: int) -> None:
    windows = cut([Segment(0, 30, None), Segment(30, 33, 1)], 4, 2)
    shares = [share_of(windows, rank, ranks) for rank in range(ranks)]
    assert Counter(one for share in shares for one in share) == Counter(windows)
    assert max(map(len, shares)) - min(map(len, shares)) <= 1


@pytest.mark.parametrize("columns", [None, 6])
def test_batches_hold_what_the_windows_say_and_padding_never_counts(columns: int | None) -> None:
    ids = [np.array([11, 12, 13, 14, 15, 16, 17]), np.array([21, 22, 23])]
    stream = TokensInMemory(ids)
    windows = cut([Segment(0, 7, None), Segment(7, 10, 9)], 4, 4)
    found = list(batches(windows, stream, 2, columns))

    assert [tuple(batch.tokens.shape) for batch in found] == (
        [(2, 4), (1, 3)] if columns is None else [(2, 6), (2, 6)]
    )
    assert sum(int(batch.scored.sum()) for batch in found) == 6 + 3
    pairs = [
        (int(token), int(label))
        for batch in found
        for token, label in zip(batch.tokens[batch.scored], batch.labels[batch.scored], strict=True)
    ]
    assert pairs == [
        *((11, 12), (12, 13), (13, 14), (14, 15), (15, 16), (16, 17)),
        *((9, 21), (21, 22), (22, 23)),
    ]
