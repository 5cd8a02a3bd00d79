"""On which text a variant moves: by position, and by class of the predicted token."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.colors import LinearSegmentedColormap, LogNorm

from mlflow_compress.metrics.diagnosis import GroupMove, GroupsFound
from mlflow_compress.records import MetricResult
from mlflow_compress.reporting.plots.style import GRID, INK, MUTED, VARIANT, Drawing, new_canvas, plain_text, state

_ORDER = ("qkv", "o", "gate_up", "down", "experts")
_MOST_NUMBERS = 40
"""Most layers of which the map shows numbers; those of more stand in the CSV file."""


def _kinds(groups: list[GroupMove]) -> list[str]:
    """Return the kinds of matrices in the order in which a layer computes them."""
    found = list(dict.fromkeys(group.kind for group in groups))
    return sorted(found, key=lambda kind: _ORDER.index(first) if (first := kind.split("+")[0]) in _ORDER else 99)


def draw_layer_map(found: GroupsFound) -> Drawing | None:
    """Return the heat map of the groups in layers; None where no group is in a layer."""
    groups = [group for group in found.groups if group.layer is not None]
    if not groups:
        return None
    kinds, layers = _kinds(groups), sorted({group.layer for group in groups if group.layer is not None})
    values = np.full((len(layers), len(kinds)), np.nan)
    for group in groups:
        values[layers.index(group.layer or 0), kinds.index(group.kind)] = group.kl.value
    canvas = new_canvas(min(14.0, 1.9 + 0.34 * len(layers)))
    axes = canvas.subplots()
    positive = values[values > 0]
    lowest, highest = (float(positive.min()), float(positive.max())) if len(positive) else (1e-6, 1e-5)
    norm = LogNorm(lowest / 1.5, max(highest, lowest * 1.5))
    colours = LinearSegmentedColormap.from_list("kl", ["#f2f7fb", "#7fb8d8", VARIANT, "#00304d"])
    image = axes.imshow(values, cmap=colours, norm=norm, aspect="auto")
    if len(layers) <= _MOST_NUMBERS:
        for (row, column), value in np.ndenumerate(values):
            if np.isfinite(value):
                dark = value > 0 and norm(value) > 0.55
                text = f"{value:.2g}" if value else "0"
                axes.text(column, row, text, ha="center", va="center", fontsize=8.5, color="white" if dark else INK)
    canvas.colorbar(image, ax=axes, label="KL, nats per token (logarithmic)", shrink=0.8)
    axes.set_xticks(range(len(kinds)), [plain_text(kind.replace("_", "/")) for kind in kinds])
    step = max(1, len(layers) // 40)
    axes.set_yticks(range(0, len(layers), step), [f"layer {layer}" for layer in layers[::step]])
    axes.tick_params(length=0, labelcolor=MUTED)
    for side in axes.spines.values():
        side.set_color(GRID)
    title = f"{found.largest.name.replace('_', '/')} moves the model most: {found.largest.kl.value:.2g} nats per token"
    state(canvas, plain_text(title))
    outside = [group for group in found.groups if group.layer is None]
    caption = "Mean KL of the final distributions when only this group of weights is the variant's. An empty cell is a "
    caption += "group that does not differ."
    if outside:
        caption += " Outside of layers: " + ", ".join(f"{g.name} {g.kl.value:.2g}" for g in outside) + "."
    return Drawing(canvas, title, caption)


_MOST_WIDTHS = 4  # an axis ends at so many times the largest value


def draw_moved_parts(
    whole: MetricResult, positions: Sequence[MetricResult], classes: Sequence[MetricResult]
) -> Drawing | None:
    """Return the mean KL of each place in the text and of each class of tokens; None where there are none."""
    if not positions or not classes:
        return None
    canvas = new_canvas(1.9 + 0.27 * max(len(positions), len(classes)))
    for axes, parts, title in zip(
        canvas.subplots(1, 2), (positions, classes), ("by position in the text", "by the predicted token"), strict=True
    ):
        _panel(axes, whole, parts, title)
    first, last = positions[0], positions[-1]
    title = f"KL {first.value:.2g} nats at {first.category} of the text, {last.value:.2g} at {last.category}"
    state(canvas, title)
    caption = f"Mean KL of {whole.n:,} tokens with {100 * whole.level:g} % intervals over whole texts; the line is the "
    caption += "mean of all tokens, the figures on the right count tokens. Rare tokens are in another class too. "
    caption += "Intervals that are much wider than all values are cut; a part without one is in too few texts."
    return Drawing(canvas, title, caption)


def _panel(axes: Any, whole: MetricResult, parts: Sequence[MetricResult], title: str) -> None:
    for y, result in enumerate(parts):
        axes.plot([result.value], [y], "o", color=VARIANT, markersize=5)
        if result.low is not None and result.high is not None:
            axes.plot([result.low, result.high], [y, y], color=VARIANT, linewidth=1.6)
        axes.annotate(
            f"{result.n:,}", (1.02, y), xycoords=("axes fraction", "data"), va="center", fontsize=8, color=MUTED
        )
    axes.axvline(whole.value, color=MUTED, linewidth=1.0, linestyle="--")
    axes.set_yticks(range(len(parts)), [str(result.category) for result in parts])
    # An interval from few texts may be far wider than all values: it is cut at the axis, where the caption says so.
    widest = max([whole.value, *(result.value for result in parts)])
    ends = [result.high for result in parts if result.high is not None]
    axes.set(
        xlim=(0, 1.05 * min(max([widest, *ends]), _MOST_WIDTHS * widest)),
        ylim=(len(parts) - 0.4, -0.6),
        xlabel="KL, nats",
    )
    axes.set_title(title, fontsize=10, color=MUTED, loc="left")
    axes.grid(axis="x", color=GRID, linewidth=0.8)
    axes.tick_params(length=0)
