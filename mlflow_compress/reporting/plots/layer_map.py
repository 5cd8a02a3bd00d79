"""How far each group of weights moves the model: layers by kinds of matrices."""

from __future__ import annotations

import numpy as np
from matplotlib.colors import LinearSegmentedColormap, LogNorm

from mlflow_compress.metrics.diagnosis.diagnosis_summary import GroupMove, GroupsFound
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
