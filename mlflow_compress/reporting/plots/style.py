"""Common style of all figures: colours that colour-blind readers can distinguish, and titles that state the finding."""

from __future__ import annotations

import textwrap
from dataclasses import dataclass
from typing import Any

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure as Canvas
from matplotlib.layout_engine import ConstrainedLayoutEngine

# Okabe and Ito's palette (jfly.uni-koeln.de/color): distinct under the common colour-vision deficiencies.
BASELINE, VARIANT = "#8b95a1", "#0072b2"
WORSE, BETTER, OTHER = "#d55e00", "#009e73", "#b9c0c8"
INK, MUTED, GRID = "#1f2933", "#5c6773", "#e3e7eb"

WIDTH_INCHES, DPI = 7.4, 150  # 1110 pixels
_TITLE_CHARACTERS = 66

RC = {
    "font.family": "DejaVu Sans",  # ships with matplotlib: the same on every machine
    "font.size": 10,
    "text.color": INK,
    "axes.edgecolor": "#aab2bb",
    "axes.labelcolor": MUTED,
    "axes.labelsize": 10,
    "axes.linewidth": 0.8,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "xtick.color": "#aab2bb",
    "ytick.color": "#aab2bb",
    "xtick.labelcolor": MUTED,
    "ytick.labelcolor": MUTED,
    "legend.frameon": False,
    "legend.fontsize": 9.5,
    "figure.facecolor": "white",
    "savefig.facecolor": "white",
}


@dataclass(frozen=True)
class Drawing:
    """A drawn figure before it is saved: matplotlib's figure, a title with the finding, and a caption."""

    canvas: Any
    title: str
    caption: str


def new_canvas(height: float) -> Any:
    """Return an empty figure of the common width. It does not use pyplot, and so no global state or display."""
    layout = ConstrainedLayoutEngine(w_pad=0.12, h_pad=0.1)
    canvas = Canvas(figsize=(WIDTH_INCHES, height), dpi=DPI, layout=layout)
    FigureCanvasAgg(canvas)
    return canvas


def state(canvas: Any, title: str) -> None:
    """Write the finding above the plots, as wrapped text aligned left."""
    canvas.suptitle(
        "\n".join(textwrap.wrap(title, _TITLE_CHARACTERS)),
        x=0.017,
        ha="left",
        fontsize=12.5,
        fontweight="bold",
        linespacing=1.3,
    )


def horizontal_grid(axes: Axes) -> None:
    """Draw light lines at the y ticks only."""
    axes.grid(axis="y", color=GRID, linewidth=0.8)
    axes.tick_params(axis="both", length=0)


def plain_text(text: str) -> str:
    """Return text that matplotlib draws literally, with dollar signs escaped, because these start a formula."""
    return text.replace("$", r"\$")
