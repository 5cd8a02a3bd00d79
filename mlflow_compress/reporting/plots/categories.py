"""Flips by category, in each direction."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from matplotlib.colors import LinearSegmentedColormap

from mlflow_compress.decide.scoreboard import Scoreboard
from mlflow_compress.reporting.plots.style import (
    BETTER,
    GRID,
    INK,
    MUTED,
    OTHER,
    VARIANT,
    WORSE,
    Drawing,
    new_canvas,
    plain_text,
    state,
)

MOST = 24
_LABEL_CHARACTERS = 34


@dataclass(frozen=True, kw_only=True)
class CategoryFlips:
    """Changed answers of one category or task, in percent of its `n` items; `w2w` is 0 for generated answers."""

    name: str
    n: int
    c2w: float
    w2c: float
    w2w: float

    @property
    def total(self) -> float:
        """All changed answers, in percent."""
        return self.c2w + self.w2c + self.w2w


def _short(name: str) -> str:
    return name if len(name) <= _LABEL_CHARACTERS else name[: _LABEL_CHARACTERS - 1] + "…"


def draw_categories(groups: Sequence[CategoryFlips]) -> Drawing:
    """Return stacked bars, most changed group first. At most `MOST` groups are shown, and the others are counted."""
    ordered = sorted(groups, key=lambda g: (-g.total, g.name))
    shown, rest = ordered[:MOST], len(ordered) - MOST
    canvas = new_canvas(1.75 + 0.3 * len(shown))
    axes = canvas.subplots()
    y, left = np.arange(len(shown)), np.zeros(len(shown))
    for field, words, colour in (
        ("c2w", "right → wrong", WORSE),
        ("w2c", "wrong → right", BETTER),
        ("w2w", "wrong → other wrong", OTHER),
    ):
        width = np.array([getattr(g, field) for g in shown])
        axes.barh(y, width, left=left, color=colour, height=0.66, label=words)
        left += width
    for row, group in enumerate(shown):
        axes.annotate(
            f"{group.total:.1f} %",
            (group.total, row),
            xytext=(5, 0),
            textcoords="offset points",
            va="center",
            fontsize=9,
            color=INK,
        )
    axes.set_yticks(y, [plain_text(f"{_short(g.name)}  ({g.n:,})") for g in shown])
    axes.tick_params(axis="y", labelcolor=INK, length=0)
    axes.tick_params(axis="x", length=0)
    axes.spines["left"].set_visible(False)
    axes.set(xlim=(0, max(5.0, 1.12 * ordered[0].total)), xlabel="Items whose answer changed, %")
    axes.set_ylim(len(shown) - 0.45, -0.55)
    axes.grid(axis="x", color=GRID, linewidth=0.8)
    if ordered[0].total > 0:
        canvas.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=3, handlelength=1.1)
    title = _finding(ordered)
    state(canvas, title)
    caption = "Changed answers by category in percent of its items (their number in brackets), most changed first"
    return Drawing(canvas, title, f"{caption}; {rest} further categories are not drawn." if rest > 0 else f"{caption}.")


def _finding(ordered: Sequence[CategoryFlips]) -> str:
    worst, best = ordered[0], ordered[-1]
    if worst.total == 0:
        return (
            f"No answer changed in {'any of the ' + str(len(ordered)) + ' groups' if len(ordered) > 1 else worst.name}"
        )
    if len(ordered) == 1:
        return f"{worst.total:.1f} % of the answers in {worst.name} changed"
    return f"Answers changed most in {worst.name} ({worst.total:.1f} %), least in {best.name} ({best.total:.1f} %)"


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
