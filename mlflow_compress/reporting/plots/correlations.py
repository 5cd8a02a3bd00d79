"""Rank correlations between metrics over the variants of a sweep."""

from __future__ import annotations

import numpy as np
from matplotlib.colors import LinearSegmentedColormap

from mlflow_compress.decide.scoreboard import Scoreboard
from mlflow_compress.reporting.plots.style import GRID, INK, MUTED, VARIANT, WORSE, Drawing, new_canvas, state


def draw_correlations(board: Scoreboard) -> Drawing | None:
    """Return the figure: one cell per pair of metrics, with the correlation; None if there is no correlation."""
    found = {(c.first, c.second): c for c in board.correlations if c.value is not None}
    if not found:
        return None
    labels = {column.key: column.label for column in board.columns}
    metrics = [name for name in labels if any(name in pair for pair in found)]
    size = len(metrics)
    values = np.full((size, size), np.nan)
    for (first, second), c in found.items():
        low, high = sorted((metrics.index(first), metrics.index(second)))
        values[high, low] = np.nan if c.value is None else c.value
    canvas = new_canvas(1.6 + 0.46 * size)
    axes = canvas.subplots()
    colours = LinearSegmentedColormap.from_list("correlation", [WORSE, "#ffffff", VARIANT])
    axes.imshow(values[1:, :-1], cmap=colours, vmin=-1, vmax=1, aspect="auto")
    for row, column in zip(*np.nonzero(np.isfinite(values)), strict=True):
        value = values[row, column]
        text = f"{value:+.2f}"
        axes.text(column, row - 1, text, ha="center", va="center", color="white" if abs(value) > 0.75 else INK)
    axes.set_xticks(range(size - 1), [labels[name] for name in metrics[:-1]], rotation=25, ha="right")
    axes.set_yticks(range(size - 1), [labels[name] for name in metrics[1:]])
    axes.tick_params(length=0, labelcolor=MUTED)
    for side in axes.spines.values():
        side.set_color(GRID)
    n = sorted({c.n for c in found.values()})
    counted = str(n[0]) if len(n) == 1 else f"{n[0]} to {n[-1]}"
    title = f"Rank correlations between metrics over {counted} variants"
    state(canvas, title)
    caption = "Spearman's rank correlation: 1 where two metrics order the variants alike, -1 where in reverse. "
    caption += "Intervals and p-values stand in scoreboard.json."
    return Drawing(canvas, title, caption)
