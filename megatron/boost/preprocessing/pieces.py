"""Documents of any length, encoded piece by piece with the tokens of the whole.

A piece goes to the tokenizer with some text before and after it. What a tokenizer makes of a place
depends on the text around it, but only nearby, so the tokens at a joint do not depend on where the
text was cut, as long as the cut is far enough away. This is not taken on trust. At every joint the
text around it is encoded alone too, and the tokens of each of the two pieces must equal its, over
half of the context on both sides; if they do not, `NoJoint` is raised. The two pieces need not be
compared with each other then, so they may be encoded in different processes, or runs.
"""

from bisect import bisect_left
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from tokenizers import Tokenizer

# The tokenizers library is fastest, and takes little memory, with texts of this size or less.
PIECE_BYTES = 1 << 18
CONTEXT_BYTES = 1 << 12

_LONGEST_CHARACTER = 4


class NoJoint(ValueError):
    """The tokens around a joint depend on text far away; the message is the reason."""


class Piece(NamedTuple):
    """A part of a document with the text around it, in UTF-8, cut between characters."""

    data: bytes
    """The context before the piece, the piece, and the context after it."""
    begin: int
    """Where the piece begins in `data`."""
    end: int
    at: int
    """Where `data` begins in the document, in bytes."""
    first: bool
    last: bool


def context_begin(begin: int) -> int:
    """From where on a document must be read for the piece that begins at byte `begin` of it."""
    return max(0, begin - CONTEXT_BYTES - _LONGEST_CHARACTER + 1)


def cut(read: Callable[[int], bytes], begin: int = 0) -> Iterator[Piece]:
    """The pieces of a document from byte `begin` on, which must be where a piece began.

    `read(size)` gives the document's next bytes from `context_begin(begin)` on, fewer than `size`
    only at its end. A document of no more than about a piece comes as one.
    """
    at = context_begin(begin)
    held = b""
    while True:
        start = begin - at
        # One byte more than is needed tells whether a character ends where the context does.
        wanted = start + PIECE_BYTES + CONTEXT_BYTES + 1
        held += read(wanted - len(held))
        left = _boundary(held, start - CONTEXT_BYTES) if start > CONTEXT_BYTES else 0
        if len(held) < wanted:
            yield Piece(held[left:], start - left, len(held) - left, at + left, begin == 0, True)
            return
        end = _boundary(held, start + PIECE_BYTES)
        right = _boundary(held, end + CONTEXT_BYTES)
        yield Piece(held[left:right], start - left, end - left, at + left, begin == 0, False)
        begin = at + end
        held = held[context_begin(begin) - at :]
        at = context_begin(begin)


def encode_piece(tokenizer: "Tokenizer", piece: Piece) -> list[int]:
    """The token ids that begin within the piece, without those that the tokenizer adds to a text.

    Those of all pieces of a document, one after the other, are those of the document. Raises
    `UnicodeDecodeError`, and `NoJoint` where that could not be made sure of.
    """
    data = piece.data
    # Cut where it is allowed to, the context of a joint decodes if the piece does.
    tokens = _Tokens(tokenizer, data.decode("utf-8"))
    begin, end = 0, len(tokens.ids)
    if not piece.first:
        context = data[: _boundary(data, piece.begin + CONTEXT_BYTES)]
        begin = _joint(tokenizer, tokens, piece, context, 0, piece.begin)
    if not piece.last:
        left = _boundary(data, piece.end - CONTEXT_BYTES)
        end = _joint(tokenizer, tokens, piece, data[left:], left, piece.end)
    return tokens.ids[begin:end]


class _Tokens:
    """The tokens of a text, in its order."""

    def __init__(self, tokenizer: "Tokenizer", text: str) -> None:
        self._encoding = tokenizer.encode(text, add_special_tokens=False)
        self.ids: list[int] = self._encoding.ids

    def first(self, character: int) -> int:
        """The index of the first token that begins at or after that character of the text."""
        return bisect_left(range(len(self.ids)), character, key=self._begin)

    def between(self, low: int, high: int, shift: int) -> list[tuple[int, int]]:
        """Place, less `shift`, and id of the tokens that begin at characters `low` to `high`."""
        return [
            (self._begin(index) - shift, self.ids[index])
            for index in range(self.first(low), self.first(high))
        ]

    def _begin(self, index: int) -> int:
        characters = self._encoding.token_to_chars(index)
        assert characters is not None  # only tokens that the tokenizer adds have none
        return int(characters[0])


def _joint(
    tokenizer: "Tokenizer",
    tokens: _Tokens,
    piece: Piece,
    context: bytes,
    context_at: int,
    joint: int,
) -> int:
    """The index of the first of a piece's tokens after the joint at byte `joint` of its data;
    `context` is the data around it and begins at byte `context_at`."""
    text = context.decode("utf-8")
    shift = len(piece.data[:context_at].decode("utf-8"))
    centre = len(piece.data[context_at:joint].decode("utf-8"))
    low, high = centre // 2, (centre + len(text)) // 2
    expected = _Tokens(tokenizer, text).between(low, high, 0)
    if not expected or expected != tokens.between(low + shift, high + shift, shift):
        raise NoJoint(
            f"it must be encoded in pieces, and around byte {piece.at + joint + 1} the tokens "
            "depend on text far away, as they do in long runs of the same characters"
        )
    return tokens.first(centre + shift)


def _boundary(data: bytes, index: int) -> int:
    """The last place between two characters at or before `index`."""
    for candidate in range(index, index - _LONGEST_CHARACTER, -1):
        if candidate >= len(data) or data[candidate] & 0xC0 != 0x80:
            return candidate
    return index  # no UTF-8, which decoding will find
