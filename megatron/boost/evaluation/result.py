"""What an evaluation found."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Sums:
    """What adds up over windows and ranks; sums over disjoint windows are added."""

    nats: float
    """Of all scored tokens, −ln p."""
    tokens: int
    """Those that were scored."""
    text_bytes: int
    """Of the scored tokens' text, or 0 where it is not known."""


@dataclass(frozen=True)
class Evaluation:
    """A model's quality on some text."""

    sums: Sums
    documents: int
    windows: int
    window_tokens: int
    stride_tokens: int
    seconds: float
    """Of the scoring alone, on the slowest rank."""

    @property
    def loss(self) -> float:
        """Mean −ln p over all scored tokens, in nats."""
        return self.sums.nats / self.sums.tokens

    @property
    def perplexity(self) -> float:
        """e to the loss; infinite where that is more than a float holds."""
        try:
            return math.exp(self.loss)
        except OverflowError:
            return math.inf

    @property
    def bits_per_byte(self) -> float | None:
        """Bits that the model needs for a byte of the text; None where the text is not known."""
        if not self.sums.text_bytes:
            return None
        return self.sums.nats / math.log(2) / self.sums.text_bytes

    def as_flat_dict(self) -> dict[str, object]:
        """For JSON: units in the names, and null for what is not known or not finite."""
        perplexity = self.perplexity
        return {
            "loss_nats_per_token": _finite(self.loss),
            "perplexity": _finite(perplexity),
            "bits_per_byte": self.bits_per_byte,
            "tokens": self.sums.tokens,
            "text_bytes": self.sums.text_bytes or None,
            "documents": self.documents,
            "windows": self.windows,
            "window_tokens": self.window_tokens,
            "stride_tokens": self.stride_tokens,
            "seconds": self.seconds,
            "tokens_per_second": self.sums.tokens / self.seconds,
        }

    def as_lines(self) -> list[str]:
        """For a terminal."""
        bits = self.bits_per_byte
        shown = "not known (the tokens' text is not)" if bits is None else f"{bits:.6f}"
        cut = f"windows of {self.window_tokens:,} tokens"
        if self.stride_tokens != self.window_tokens:
            cut += f", a stride of {self.stride_tokens:,}"
        return [
            f"validation loss  {self.loss:.6f} nats/token",
            f"perplexity       {self.perplexity:.6g}",
            f"bits per byte    {shown}",
            f"tokens           {self.sums.tokens:,} in {self.documents:,} documents; {cut}",
            f"time             {self.seconds:.2f} s "
            f"({self.sums.tokens / self.seconds:,.0f} tokens/s)",
        ]


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
