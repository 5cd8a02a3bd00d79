"""What all figures share: colours that colour-blind readers can distinguish, titles, heat maps, labels of points."""

import math
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure as Canvas
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.patheffects import withStroke
from matplotlib.transforms import Bbox

from mlflow_compress.metrics.stats.arrays import Float

# Okabe and Ito's palette (jfly.uni-koeln.de/color): distinct under the common colour-vision deficiencies.
BASELINE_COLOUR, VARIANT_COLOUR = "#8b95a1", "#0072b2"
WORSE_COLOUR, BETTER_COLOUR, OTHER_COLOUR = "#d55e00", "#009e73", "#b9c0c8"
INK, MUTED, GRID = "#1f2933", "#5c6773", "#e3e7eb"

_WIDTH_INCHES, _DPI = 7.4, 150  # 1110 pixels
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
    """A drawn figure before it is saved."""

    canvas: Any  # matplotlib's figure
    title: str  # The finding
    caption: str


def new_canvas(height: float) -> Any:
    """Return an empty figure of the common width. It does not use pyplot, and so no global state or display."""
    layout = ConstrainedLayoutEngine(w_pad=0.12, h_pad=0.1)
    canvas = Canvas(figsize=(_WIDTH_INCHES, height), dpi=_DPI, layout=layout)
    FigureCanvasAgg(canvas)
    return canvas


def new_axes(height: float) -> tuple[Any, Any]:
    """Return an empty figure of the common width, and its only plot."""
    canvas = new_canvas(height)
    return canvas, canvas.subplots()


def state(canvas: Any, title: str) -> None:
    """Write the finding above the plots, as wrapped text aligned left."""
    canvas.suptitle(
        plain_text("\n".join(textwrap.wrap(title, _TITLE_CHARACTERS))),
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


def draw_heat_map(
    axes: Axes,
    values: Float,
    colours: Sequence[str],
    *,
    number: Callable[[float], str] | None,  # Text of a cell; None where no numbers are shown
    is_dark: Callable[[float], bool],  # Whether a cell's text is white
    fontsize: float = 8.5,
    **scale: Any,
) -> Any:
    """Draw a matrix; NaN is an empty cell. Return the image, for a colour bar."""
    colour_map = LinearSegmentedColormap.from_list("shades", colours)
    image = axes.imshow(values, cmap=colour_map, aspect="auto", **scale)
    for (row, column), value in np.ndenumerate(values):
        if number is not None and np.isfinite(value):
            ink = "white" if is_dark(value) else INK
            axes.text(column, row, number(value), ha="center", va="center", color=ink, fontsize=fontsize)
    axes.tick_params(length=0, labelcolor=MUTED)
    for side in axes.spines.values():
        side.set_color(GRID)
    return image


_DIRECTIONS = ((1, 0), (-1, 0), (0, 1), (0, -1), (0.7, 0.7), (0.7, -0.7), (-0.7, 0.7), (-0.7, -0.7))
# Places around a point, in points of the page, the nearest first
_OFFSETS = [(far * x, far * y) for far in (9.0, 16.0, 26.0, 38.0, 52.0, 70.0) for x, y in _DIRECTIONS]
_LEADER_FROM = 20.0  # a label further away than this gets a line to its point


def label_points(axes: Any, points: Sequence[tuple[float, float]], texts: Sequence[str], *, bold: int | None) -> None:
    """Fix the layout, and write each text at the first of 48 places around its point where it overlaps nothing.

    The bold text comes first, then from left to right; without a free place it is the one with the least overlap.
    """
    axes.figure.draw_without_rendering()  # fixes the layout; labels are placed in pixels
    renderer = axes.figure.canvas.get_renderer()
    frame = axes.get_window_extent(renderer)
    pixels = axes.transData.transform(np.asarray(points, dtype=float))
    taken: list[Any] = [Bbox.from_bounds(x - 9, y - 9, 18, 18) for x, y in pixels]
    for i in sorted(range(len(points)), key=lambda i: (i != bold, pixels[i][0], pixels[i][1])):
        best, least = _OFFSETS[0], math.inf
        for offset in _OFFSETS:
            tried = _note(axes, texts[i], points[i], offset, bold=i == bold)
            area = _covered(tried.get_window_extent(renderer), taken, frame)
            tried.remove()
            if area < least:
                best, least = offset, area
            if area == 0:
                break
        note = _note(axes, texts[i], points[i], best, bold=i == bold)
        if math.hypot(*best) > _LEADER_FROM:
            line = {"arrowstyle": "-", "color": GRID, "shrinkA": 1, "shrinkB": 4}
            leader = axes.annotate("", points[i], xytext=best, textcoords="offset points", arrowprops=line)
            leader.set_in_layout(False)
        taken.append(note.get_window_extent(renderer))


def _note(axes: Any, text: str, point: tuple[float, float], offset: tuple[float, float], *, bold: bool) -> Any:
    x, y = offset
    note = axes.annotate(
        plain_text(text),
        point,
        xytext=offset,
        textcoords="offset points",
        ha="center" if x == 0 else "left" if x > 0 else "right",
        va="center" if y == 0 else "bottom" if y > 0 else "top",
        fontsize=9.5,
        fontweight="bold" if bold else "normal",
        path_effects=[withStroke(linewidth=3, foreground="white")],
    )
    note.set_in_layout(False)
    return note


def _covered(box: Any, taken: Sequence[Any], frame: Any) -> float:
    """Return the area of `box` that other boxes cover or that is outside the frame, in square pixels."""
    overlaps = [common for other in taken if (common := Bbox.intersection(box, other)) is not None]
    inside = Bbox.intersection(box, frame)
    outside = box.width * box.height - (0.0 if inside is None else inside.width * inside.height)
    return float(sum(common.width * common.height for common in overlaps) + outside)
