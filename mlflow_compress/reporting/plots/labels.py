"""Places labels next to points so that they overlap neither each other, nor the points, nor the frame."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.patheffects import withStroke
from matplotlib.transforms import Bbox

from mlflow_compress.reporting.plots.style import GRID, plain_text

_DISTANCES = (9.0, 16.0, 26.0, 38.0, 52.0, 70.0)  # points
_DIRECTIONS = ((1, 0), (-1, 0), (0, 1), (0, -1), (1, 1), (1, -1), (-1, 1), (-1, -1))
_LEADER_FROM = 20.0  # a label further away than this gets a line to its point


def _aligned(direction: tuple[int, int]) -> dict[str, Any]:
    across = {1: "left", -1: "right", 0: "center"}[direction[0]]
    up = {1: "bottom", -1: "top", 0: "center"}[direction[1]]
    return {"ha": across, "va": up}


def _covered(box: Any, taken: Sequence[Any], frame: Any) -> float:
    """Return the area of `box` that other boxes cover or that is outside the frame, in square pixels."""
    area = 0.0
    for other in taken:
        common = Bbox.intersection(box, other)
        if common is not None:
            area += common.width * common.height
    inside = Bbox.intersection(box, frame)
    return float(area + box.width * box.height - (0.0 if inside is None else inside.width * inside.height))


def label_points(axes: Any, points: Sequence[tuple[float, float]], texts: Sequence[Any], *, bold: int | None) -> None:
    """Write each text next to its point, at the nearest place where it overlaps nothing.

    The method is greedy: the bold text first, then from left to right. Each text takes the first free one of 48 places
    around its point, or the one with the least overlap. The figure's layout must be final before the call.

    Parameters
    ----------
    axes : matplotlib.axes.Axes
        Axes of the points.
    points : sequence of (x, y)
        Points in data coordinates.
    texts : sequence of str
        One text per point.
    bold : int or None
        Index of the point to emphasise.
    """
    canvas = axes.figure
    renderer = canvas.canvas.get_renderer()
    frame = axes.get_window_extent(renderer)
    pixels = axes.transData.transform(np.asarray(points, dtype=float))
    taken: list[Any] = [Bbox.from_bounds(x - 9, y - 9, 18, 18) for x, y in pixels]
    for i in sorted(range(len(points)), key=lambda i: (i != bold, pixels[i][0], pixels[i][1])):
        best: tuple[float, float, tuple[int, int]] | None = None
        style = {"fontsize": 9.5, "fontweight": "bold" if i == bold else "normal"}
        for distance in _DISTANCES:
            for direction in _DIRECTIONS:
                box = _extent(axes, texts[i], points[i], distance, direction, style, renderer)
                area = _covered(box, taken, frame)
                if best is None or area < best[0]:
                    best = (area, distance, direction)
                if area == 0:
                    break
            if best is not None and best[0] == 0:
                break
        assert best is not None
        _, distance, direction = best
        note = _note(axes, texts[i], points[i], distance, direction, style)
        if distance > _LEADER_FROM:
            axes.annotate(
                "",
                points[i],
                xytext=_offset(distance, direction),
                textcoords="offset points",
                arrowprops={"arrowstyle": "-", "color": GRID, "shrinkA": 1, "shrinkB": 4},
            ).set_in_layout(False)
        taken.append(note.get_window_extent(renderer))


def _offset(distance: float, direction: tuple[int, int]) -> tuple[float, float]:
    shorter = 0.7 if all(direction) else 1.0
    return distance * shorter * direction[0], distance * shorter * direction[1]


def _note(axes: Any, text: str, point: tuple[float, float], distance: float, direction: Any, style: Any) -> Any:
    note = axes.annotate(
        plain_text(text),
        point,
        xytext=_offset(distance, direction),
        textcoords="offset points",
        path_effects=[withStroke(linewidth=3, foreground="white")],
        **_aligned(direction),
        **style,
    )
    note.set_in_layout(False)
    return note


def _extent(
    axes: Any, text: str, point: tuple[float, float], distance: float, direction: Any, style: Any, renderer: Any
) -> Any:
    note = _note(axes, text, point, distance, direction, style)
    box = note.get_window_extent(renderer)
    note.remove()
    return box
