"""What the figures have in common: colours, and how they are written."""

import io
import re

import matplotlib as mpl
from matplotlib.figure import Figure

# Told apart by all common kinds of colour vision (Okabe and Ito).
BTP, FULL_RANK, VANILLA = "#0072b2", "#d55e00", "#009e73"
COLLECTIVE = "#cc0000"
INK, FAINT = "#333333", "#bbbbbb"


def svg(figure: Figure) -> str:
    """The figure as an SVG file, the same text for the same figure."""
    text = io.StringIO()
    # Letters as text, for search and for screen readers.
    with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": "boost"}):
        figure.savefig(text, format="svg", metadata={"Creator": None, "Date": None})
    # Matplotlib names its version in a comment.
    return re.sub(r"<!--.*?-->\n?", "", text.getvalue())
