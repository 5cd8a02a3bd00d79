"""Size against KL of what a search has found: searched variants, uniform ones, their linear mix, and the gate."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from mlflow_compress.reporting.plots.labels import label_points
from mlflow_compress.reporting.plots.style import (
    BASELINE,
    BETTER,
    GRID,
    MUTED,
    VARIANT,
    WORSE,
    Drawing,
    new_canvas,
    state,
)

_LABELS = {"uniform": "uniform", "searched": "searched", "autoscheme": "AutoScheme, same limits"}


def draw_budget_front(rows: Sequence[Mapping[str, Any]], *, gate: float | None) -> Drawing | None:
    """Return the figure of KL (log axis) against stored bits per weight.

    Parameters
    ----------
    rows : sequence of mapping
        `results.Search.to_rows()`. A variant with a KL of 0 has no place on a log axis, and is counted in the caption.
    gate : float or None
        The largest KL that is accepted, drawn as a line.

    Returns
    -------
    Drawing or None
        None if no variant has a KL above 0.
    """
    above = [row for row in rows if row["kl"] > 0]
    if not above:
        return None
    canvas = new_canvas(4.8)
    axes = canvas.subplots()
    kinds = {kind: [row for row in above if row["kind"] == kind] for kind in ("uniform", "searched", "autoscheme")}
    for (kind, members), colour in zip(kinds.items(), (BASELINE, VARIANT, BETTER), strict=True):
        for row in members:
            if row["kl_low"] is not None and row["kl_low"] > 0:
                axes.plot([row["bits_per_weight"]] * 2, [row["kl_low"], row["kl_high"]], color=colour, linewidth=1.5)
        points = [(row["bits_per_weight"], row["kl"]) for row in members]
        if not points:
            continue
        if kind == "autoscheme":  # open, because it is often where the searched variant is
            shape = {"marker": "D", "s": 90, "facecolor": "none", "edgecolor": colour, "linewidth": 1.5}
        else:
            shape = {"marker": "s" if kind == "uniform" else "o", "s": 55, "color": colour, "edgecolor": "white"}
        axes.scatter(*zip(*points, strict=True), **shape, zorder=3, label=_LABELS[kind])
    if len(ends := kinds["uniform"]) > 1:
        x = np.linspace(ends[0]["bits_per_weight"], ends[-1]["bits_per_weight"], 400)
        mix = np.interp(x, [row["bits_per_weight"] for row in ends], [row["kl"] for row in ends])
        axes.plot(x, mix, color=BASELINE, linewidth=1, linestyle="--", zorder=1, label="linear mix of uniform")
    if gate is not None:
        axes.axhline(gate, color=WORSE, linewidth=1, zorder=1, label=f"gate: KL {gate:g}")
    axes.set_yscale("log")
    axes.grid(color=GRID, linewidth=0.6)
    axes.set(xlabel="Stored bits per weight of the linear layers", ylabel="KL to the baseline, nats (log axis)")
    axes.tick_params(colors=MUTED)
    axes.legend(loc="lower left")
    axes.margins(x=0.12, y=0.12)
    closer = sum(row["against_mix"] == "closer" for row in kinds["searched"])
    title = f"{closer} of {len(kinds['searched'])} searched variants are closer than the linear mix"
    state(canvas, title)
    canvas.draw_without_rendering()  # fixes the layout; labels are placed in pixels
    # AutoScheme's points are beside those of the same limits, and have no names of their own.
    named = [row for row in above if row["kind"] != "autoscheme"]
    places = [(row["bits_per_weight"], row["kl"]) for row in named]
    label_points(axes, places, [row["name"] if row["kind"] == "uniform" else row["limit"] for row in named], bold=None)
    caption = "Smaller is further left, closer to the baseline is lower; bars are intervals."
    if left_out := len(rows) - len(above):
        caption += f" {left_out} with a KL of 0 {'is' if left_out == 1 else 'are'} left out."
    return Drawing(canvas, title, caption)
