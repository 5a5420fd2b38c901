"""Cutting a stream of tokens into windows of which each token is scored in exactly one.

Every token of a segment is scored once, given what stands before it in its window. With windows of
L tokens and a stride S the first window scores L tokens; each following one moves S tokens on,
scores those S and sees L−S scored ones again as context. The last window ends with the segment: it
scores what is left, and looks back as far as any other. Only a segment shorter than L makes a
shorter window.

With S = L this is the rolling log-likelihood of lm-eval, and but for the last window the cut of
Megatron's own data sets.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from megatron.boost.evaluation.tokens import Segment, TokenStream


@dataclass(frozen=True)
class Window:
    """Some consecutive tokens of a segment that are predicted together."""

    start: int
    """Position in the stream of the first token that is predicted; the model reads from the token
    before it on, which at a segment's start is the segment's prefix."""
    stop: int
    """Behind the last token that is predicted; that one itself is not read."""
    scored: int
    """How many of the predicted tokens count, from the last one back; those before are context."""
    prefix: int | None
    """The token read before `start`, if that is none of the stream's."""

    @property
    def length(self) -> int:
        """The number of tokens that the model reads, and predicts."""
        return self.stop - self.start


@dataclass(frozen=True)
class Batch:
    """Some windows side by side, filled up to the same length."""

    tokens: Tensor
    """What the model reads, int64 `[b, s]`; 0 where there is nothing."""
    labels: Tensor
    """The token to predict at each position, int64 `[b, s]`."""
    scored: Tensor
    """Whether the position counts, bool `[b, s]`."""


def cut_segment(segment: Segment, length: int, stride: int) -> Iterator[Window]:
    """The windows of one segment, in order.

    Args:
        segment: where in the stream; without a prefix its first token is context only.
        length: L, the tokens that a window reads, at least 1.
        stride: S, from 1 to `length`.
    """
    first = segment.start if segment.prefix is not None else segment.start + 1
    if first >= segment.stop:
        return
    end = min(first + length, segment.stop)
    yield Window(first, end, end - first, segment.prefix)
    while end < segment.stop:
        new = min(stride, segment.stop - end)
        end += new
        yield Window(end - length, end, new, None)


def cut(segments: Sequence[Segment], length: int, stride: int) -> list[Window]:
    """The windows of all segments, in order; see `cut_segment`."""
    return [window for segment in segments for window in cut_segment(segment, length, stride)]


def share_of(windows: Sequence[Window], rank: int, ranks: int) -> list[Window]:
    """The windows that one of `ranks` data-parallel ranks scores: every window is one rank's."""
    return list(windows[rank::ranks])


def batches(
    windows: Sequence[Window], stream: TokenStream, rows: int, columns: int | None
) -> Iterator[Batch]:
    """Batches of `rows` windows, in order.

    Args:
        windows: those to score.
        stream: the tokens that they are windows of.
        rows: windows in a batch; empty ones, of which nothing counts, fill the last up.
        columns: the length of every batch, at least that of the longest window. None: each is as
            long as its longest window, and the last has no empty ones.
    """
    for first in range(0, len(windows), rows):
        chosen = windows[first : first + rows]
        width = max(window.length for window in chosen) if columns is None else columns
        shape = (len(chosen) if columns is None else rows, width)
        tokens = np.zeros(shape, np.int64)
        labels = np.zeros(shape, np.int64)
        scored = np.zeros(shape, np.bool_)
        for row, window in enumerate(chosen):
            size = window.length
            predicted = stream.read(window.start, window.stop)
            labels[row, :size] = predicted
            tokens[row, 1:size] = predicted[:-1]
            tokens[row, 0] = (
                window.prefix
                if window.prefix is not None
                else stream.read(window.start - 1, window.start)[0]
            )
            scored[row, size - window.scored : size] = True
        yield Batch(*map(torch.from_numpy, (tokens, labels, scored)))
