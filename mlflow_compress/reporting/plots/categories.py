"""Flips by category, in each direction."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from mlflow_compress.reporting.plots.style import (
    BETTER,
    GRID,
    INK,
    OTHER,
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
