"""Survival curve of greedy answers: the share that is still the same as the baseline's after so many tokens."""

from __future__ import annotations

import numpy as np
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.ticker import MaxNLocator

from mlflow_compress.metrics.conscompf import ModelSimilarity
from mlflow_compress.metrics.greedy_answers import Forks, kaplan_meier
from mlflow_compress.reporting.plots.style import (
    BASELINE,
    GRID,
    INK,
    MUTED,
    VARIANT,
    Drawing,
    horizontal_grid,
    new_canvas,
    plain_text,
    state,
)
from mlflow_compress.reporting.plots.variants import label_points

_MOST_NUMBERS = 12
"""Most models of which the matrix shows numbers; more would cover each other, and stand in the CSV file."""


def draw_matrix(found: ModelSimilarity) -> Drawing:
    """Return the matrix of similarities as a heat map; its colours begin at the smallest value."""
    size = len(found.names)
    canvas = new_canvas(1.9 + 0.4 * size)
    axes = canvas.subplots()
    lowest = float(found.values.min())
    colours = LinearSegmentedColormap.from_list("similarity", ["#ffffff", VARIANT])
    least = 0.0 if found.shares is None else lowest
    image = axes.imshow(found.values, cmap=colours, vmin=least, vmax=1.0, aspect="auto")
    if size <= _MOST_NUMBERS:
        middle = (lowest + 1) / 2
        for row in range(size):
            for column in range(size):
                value = float(found.values[row, column])
                ink = "white" if value > middle + 0.2 * (1 - lowest) else INK
                axes.text(column, row, f"{value:.3f}", ha="center", va="center", color=ink, fontsize=8.5)
    else:
        canvas.colorbar(image, ax=axes, label="ConSCompF similarity", shrink=0.6)
    names = [plain_text(name) for name in found.names]
    axes.set_xticks(range(size), names, rotation=30, ha="right")
    axes.set_yticks(range(size), names)
    axes.tick_params(length=0, labelcolor=MUTED)
    for side in axes.spines.values():
        side.set_color(GRID)
    i, j = divmod(int(found.values.argmin()), size)
    title = "All models answer alike"
    if found.shares is not None:
        title = f"Least alike answer {plain_text(found.names[i])} and {plain_text(found.names[j])}: {lowest:.3f}"
    state(canvas, title)
    caption = f"ConSCompF similarity (equation 4), mean over {found.n_instructions} instructions with "
    caption += f"{found.n_samples} answers each, embedded by {found.encoder}. "
    caption += "The baseline's two samples show how alike a model is to itself."
    return Drawing(canvas, title, caption)


def draw_map(found: ModelSimilarity) -> Drawing | None:
    """Return the models on the two principal components of the matrix; None if nothing tells them apart."""
    if found.shares is None:
        return None
    canvas = new_canvas(4.8)
    axes = canvas.subplots()
    points = [(float(x), float(y)) for x, y in found.coordinates]
    for place, (x, y) in enumerate(points):
        own = place < 2  # the baseline's two samples
        axes.scatter([x], [y], s=80 if own else 46, color=BASELINE if own else VARIANT, edgecolor="white", zorder=3)
    for number, (set_label, share) in enumerate(zip((axes.set_xlabel, axes.set_ylabel), found.shares, strict=True), 1):
        set_label(f"Principal component {number}: {100 * share:.1f} % of the variance")
    axes.margins(x=0.22, y=0.15)
    axes.grid(color=GRID, linewidth=0.8)
    axes.tick_params(length=0, labelcolor=MUTED)
    title = f"Where the baseline and {len(points) - 2} variants lie by their answers"
    state(canvas, title)
    canvas.draw_without_rendering()  # fixes the layout; labels are placed in pixels
    label_points(axes, points, [plain_text(name) for name in found.names], bold=0)
    caption = "Principal components of the rows of the similarity matrix (columns centred, not scaled): models that "
    caption += "resemble the same models are near each other. Grey: the baseline's two samples."
    return Drawing(canvas, title, caption)


def _finding(median: float | None, n_same: int, n: int) -> str:
    same = f"{n_same:,} of {n:,} greedy answers are the same to the end"
    if median is None:
        return same
    return f"Half of the greedy answers have parted by token {median:.0f}; {same}"


def draw_answers_part(found: Forks, *, level: float) -> Drawing:
    """Return the Kaplan-Meier curve of the first divergent token, with its interval."""
    curve = kaplan_meier(found.time, found.differs, level=level)
    n, n_same = len(found.time), int((~found.differs).sum())
    canvas = new_canvas(4.2)
    axes = canvas.subplots()
    times = np.concatenate([[0.0], curve.times])
    share, low, high = (
        100 * np.concatenate([[first], values])
        for first, values in ((1.0, curve.share), (np.nan, curve.low), (np.nan, curve.high))
    )
    axes.fill_between(times, low, high, step="post", color=VARIANT, alpha=0.18, linewidth=0)
    axes.step(times, share, where="post", color=VARIANT, linewidth=1.8)
    ended = found.time[~found.differs]
    if len(ended):
        at = np.unique(ended)
        heights = share[np.searchsorted(times, at, side="right") - 1]
        axes.plot(at, heights, "|", color=MUTED, markersize=9, label="end of answers that are the same")
        axes.legend(loc="upper right", frameon=False, fontsize=9)
    axes.set(xlim=(0, 1.02 * times[-1]), ylim=(0, 102))
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_xlabel("Tokens of the answer")
    axes.set_ylabel("Answers that are still the same, %")
    horizontal_grid(axes)
    title = _finding(curve.median, n_same, n)
    state(canvas, title)
    caption = (
        f"Greedy answers of both models to {n:,} prompts, compared token by token: Kaplan-Meier curve of the first "
        f"divergent token (arXiv 2311.01544) with its {100 * level:g} % interval. An answer that is the same to its "
        "end is followed up to there."
    )
    return Drawing(canvas, title, caption)
