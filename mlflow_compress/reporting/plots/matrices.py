"""Matrices as heat maps: models' similarity, correlations of metrics, groups of weights; and the map of models."""

import numpy as np
from matplotlib.colors import LogNorm

from mlflow_compress.decide.scoreboard import Scoreboard
from mlflow_compress.metrics.conscompf import ModelSimilarity
from mlflow_compress.metrics.diagnosis import GroupsFound
from mlflow_compress.reporting.plots.style import (
    BASELINE,
    GRID,
    MUTED,
    VARIANT,
    WORSE,
    Drawing,
    draw_heat_map,
    label_points,
    new_canvas,
    plain_text,
    state,
)

_MOST_MODELS, _MOST_LAYERS = 12, 40  # of more, a matrix shows no numbers: they would cover each other


def draw_matrix(similarity: ModelSimilarity) -> Drawing:
    """Return the matrix of similarities as a heat map; its colours begin at the smallest value."""
    size = len(similarity.names)
    canvas = new_canvas(1.9 + 0.4 * size)
    axes = canvas.subplots()
    lowest = float(similarity.values.min())
    image = draw_heat_map(
        axes,
        similarity.values,
        ["#ffffff", VARIANT],
        number="{:.3f}".format if size <= _MOST_MODELS else None,
        is_dark=lambda value: value > (lowest + 1) / 2 + 0.2 * (1 - lowest),
        vmin=0.0 if similarity.shares is None else lowest,
        vmax=1.0,
    )
    if size > _MOST_MODELS:
        canvas.colorbar(image, ax=axes, label="ConSCompF similarity", shrink=0.6)
    names = [plain_text(name) for name in similarity.names]
    axes.set_xticks(range(size), names, rotation=30, ha="right")
    axes.set_yticks(range(size), names)
    i, j = divmod(int(similarity.values.argmin()), size)
    title = "All models answer alike"
    if similarity.shares is not None:
        title = f"Least alike answer {similarity.names[i]} and {similarity.names[j]}: {lowest:.3f}"
    caption = f"ConSCompF similarity (equation 4), mean over {similarity.n_instructions} instructions with "
    caption += f"{similarity.n_samples} answers each, embedded by {similarity.encoder}. "
    caption += "The baseline's two samples show how alike a model is to itself."
    return Drawing(canvas, title, caption)


def draw_map(models: ModelSimilarity) -> Drawing | None:
    """Return the models on the two principal components of the matrix; None if nothing tells them apart."""
    if models.shares is None:
        return None
    canvas = new_canvas(4.8)
    axes = canvas.subplots()
    points = [(float(x), float(y)) for x, y in models.coordinates]
    for place, (x, y) in enumerate(points):
        base = place < 2  # the baseline's two samples
        axes.scatter(
            [x],
            [y],
            s=80 if base else 46,
            color=BASELINE if base else VARIANT,
            edgecolor="white",
            zorder=3,
        )
    for number, (set_label, share) in enumerate(zip((axes.set_xlabel, axes.set_ylabel), models.shares, strict=True), 1):
        set_label(f"Principal component {number}: {100 * share:.1f} % of the variance")
    axes.margins(x=0.22, y=0.15)
    axes.grid(color=GRID, linewidth=0.8)
    axes.tick_params(length=0, labelcolor=MUTED)
    title = f"Where the baseline and {len(points) - 2} variants lie by their answers"
    state(canvas, title)
    label_points(axes, points, [plain_text(name) for name in models.names], bold=0)
    caption = "Principal components of the rows of the similarity matrix (columns centred, not scaled): models that "
    caption += "resemble the same models are near each other. Grey: the baseline's two samples."
    return Drawing(canvas, title, caption)


def draw_correlations(board: Scoreboard) -> Drawing | None:
    """Return the figure: one cell per pair of metrics, with the correlation; None if there is no correlation."""
    by_pair = {(c.first, c.second): c for c in board.correlations if c.value is not None}
    if not by_pair:
        return None
    labels = {column.key: column.label for column in board.columns}
    metrics = [name for name in labels if any(name in pair for pair in by_pair)]
    size = len(metrics)
    values = np.full((size, size), np.nan)
    for (first, second), c in by_pair.items():
        low, high = sorted((metrics.index(first), metrics.index(second)))
        values[high, low] = np.nan if c.value is None else c.value
    canvas = new_canvas(1.6 + 0.46 * size)
    axes = canvas.subplots()
    shades = (WORSE, "#ffffff", VARIANT)
    shown = values[1:, :-1]
    draw_heat_map(
        axes, shown, shades, number="{:+.2f}".format, is_dark=lambda x: abs(x) > 0.75, fontsize=10, vmin=-1, vmax=1
    )
    axes.set_xticks(range(size - 1), [labels[name] for name in metrics[:-1]], rotation=25, ha="right")
    axes.set_yticks(range(size - 1), [labels[name] for name in metrics[1:]])
    n = sorted({c.n for c in by_pair.values()})
    counted = str(n[0]) if len(n) == 1 else f"{n[0]} to {n[-1]}"
    title = f"Rank correlations between metrics over {counted} variants"
    caption = "Spearman's rank correlation: 1 where two metrics order the variants alike, -1 where in reverse. "
    caption += "Intervals and p-values stand in scoreboard.json."
    return Drawing(canvas, title, caption)


_ORDER = ("qkv", "o", "gate_up", "down", "experts")


def draw_layer_map(results: GroupsFound) -> Drawing | None:
    """Return the heat map of the groups in layers; None where no group is in a layer."""
    groups = [group for group in results.groups if group.layer is not None]
    if not groups:
        return None
    # Kinds of matrices in the order in which a layer computes them.
    firsts = {kind: kind.split("+")[0] for kind in dict.fromkeys(group.kind for group in groups)}
    kinds = sorted(firsts, key=lambda kind: _ORDER.index(firsts[kind]) if firsts[kind] in _ORDER else 99)
    layers = sorted({group.layer for group in groups if group.layer is not None})
    values = np.full((len(layers), len(kinds)), np.nan)
    for group in groups:
        values[layers.index(group.layer or 0), kinds.index(group.kind)] = group.kl.value
    canvas = new_canvas(min(14.0, 1.9 + 0.34 * len(layers)))
    axes = canvas.subplots()
    positive = values[values > 0]
    lowest, highest = (float(positive.min()), float(positive.max())) if len(positive) else (1e-6, 1e-5)
    norm = LogNorm(lowest / 1.5, max(highest, lowest * 1.5))
    image = draw_heat_map(
        axes,
        values,
        ["#f2f7fb", "#7fb8d8", VARIANT, "#00304d"],
        number=(lambda value: f"{value:.2g}" if value else "0") if len(layers) <= _MOST_LAYERS else None,
        is_dark=lambda value: value > 0 and norm(value) > 0.55,
        norm=norm,
    )
    canvas.colorbar(image, ax=axes, label="KL, nats per token (logarithmic)", shrink=0.8)
    axes.set_xticks(range(len(kinds)), [plain_text(kind.replace("_", "/")) for kind in kinds])
    step = max(1, len(layers) // 40)
    axes.set_yticks(range(0, len(layers), step), [f"layer {layer}" for layer in layers[::step]])
    most = results.largest
    title = f"{most.name.replace('_', '/')} moves the model most: {most.kl.value:.2g} nats per token"
    outside = [group for group in results.groups if group.layer is None]
    caption = "Mean KL of the final distributions when only this group of weights is the variant's. An empty cell is a "
    caption += "group that does not differ."
    if outside:
        caption += " Outside of layers: " + ", ".join(f"{g.name} {g.kl.value:.2g}" for g in outside) + "."
    return Drawing(canvas, title, caption)
