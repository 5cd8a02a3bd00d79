"""Baseline and variant side by side, for metrics that each model has: answer order and uncertainty."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mlflow_compress.records import MetricResult
from mlflow_compress.reporting.plots.style import (
    BASELINE,
    INK,
    MUTED,
    VARIANT,
    Drawing,
    horizontal_grid,
    new_canvas,
    state,
)

_PANELS = (
    ("robustness/shuffle_drop_pct", "Accuracy lost under\nshuffled answers, %", "accuracy lost under shuffled answers"),
    ("uncertainty/uacc", "UAcc\n(higher is better)", "UAcc"),
    ("uncertainty/set_size", "Conformal set size\n(lower is surer)", "set size"),
)


def draw_pairs(pooled: Mapping[str, MetricResult], *, level: float) -> Drawing | None:
    """Return the figure, with one panel per metric that both models have; None if there is no such metric."""
    found = [
        (pooled[f"{name}_baseline"], pooled[name], label, words)
        for name, label, words in _PANELS
        if name in pooled and f"{name}_baseline" in pooled
    ]
    if not found:
        return None
    canvas = new_canvas(3.7)
    panels = canvas.subplots(1, len(found), squeeze=False)[0]
    for axes, (baseline, variant, label, _) in zip(panels, found, strict=True):
        _panel(axes, baseline, variant, label)
    title = _finding([(words, b.value, v.value) for b, v, _, words in found])
    state(canvas, title)
    n = " and ".join(sorted({f"{v.n:,}" for _, v, _, _ in found}))
    return Drawing(canvas, title, f"Baseline and variant on the same items ({n}), with {100 * level:g} % intervals.")


def _finding(changes: list[tuple[str, float, float]]) -> str:
    if all(before == after for _, before, after in changes):
        return "Unchanged: " + "; ".join(f"{words} {after:.3g}" for words, _, after in changes)
    # Non-breaking spaces keep a number and its arrow on one line.
    text = "; ".join(f"{words} {before:.3g}\u00a0→\u00a0{after:.3g}" for words, before, after in changes)
    return text[0].upper() + text[1:]


def _panel(axes: Any, baseline: MetricResult, variant: MetricResult, label: str) -> None:
    top = 0.0
    for x, (result, colour) in enumerate(((baseline, BASELINE), (variant, VARIANT))):
        axes.bar([x], [result.value], color=colour, width=0.56, alpha=0.85)
        peak = result.value
        if result.low is not None and result.high is not None:
            axes.plot([x, x], [result.low, result.high], color=INK, linewidth=1.6)
            peak = max(peak, result.high)
        axes.annotate(
            f"{result.value:.3g}",
            (x, peak),
            xytext=(0, 4),
            textcoords="offset points",
            ha="center",
            fontweight="bold",
            fontsize=10,
        )
        top = max(top, peak)
    axes.set(xlim=(-0.6, 1.6), ylim=(0, 1.18 * top if top > 0 else 1.0))
    axes.set_xticks([0, 1], ["baseline", "variant"])
    axes.set_title(label, fontsize=10, color=MUTED, loc="left", linespacing=1.3)
    horizontal_grid(axes)
