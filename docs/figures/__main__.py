"""Draw the figures of the documentation."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from docs.figures import block, message, volume
from docs.figures.style import svg
from megatron.boost.command_line import ToolParser, run_tool, write_text

FIGURES = {
    "btp-block": block.figure,
    "btp-volume": volume.figure,
    "btp-message": message.figure,
}
IMAGES = Path(__file__).parents[1] / "images"


def main(argv: Sequence[str] | None) -> None:
    """Write every figure."""
    parser = ToolParser(__doc__ or "")
    parser.parse_args(argv)
    for name, figure in FIGURES.items():
        write_text(IMAGES / f"{name}.svg", svg(figure()))
        print(IMAGES / f"{name}.svg")


if __name__ == "__main__":
    run_tool(main)
