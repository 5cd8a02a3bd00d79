"""Share of changed answers, and of the baseline's wrong answers, by the baseline's top margin."""

from __future__ import annotations

import numpy as np

from mlflow_compress.metrics.margins import BinnedShare
from mlflow_compress.reporting.plots.style import MUTED, VARIANT, Drawing, horizontal_grid, new_canvas, state


def _finding(bins: BinnedShare) -> str:
    changed = np.rint(bins.share * bins.n)
    total = int(changed.sum())
    if total == 0:
        return f"No answer changed, whatever the baseline's margin ({int(bins.n.sum()):,} items)"
    # Halves of the margin's range, so that the sentence rests on more than one thin bin.
    unsure = bins.right <= 0.5 + 1e-9
    parts = []
    for mask, words in ((unsure, "below 0.5"), (~unsure, "above it")):
        if mask.any():
            parts.append(
                f"{100 * changed[mask].sum() / bins.n[mask].sum():.1f} % of answers with a margin {words} changed"
            )
    if len(parts) == 1:
        return parts[0]
    low, high = parts
    return f"{low}, {high.replace(' of answers with a margin', '').replace(' changed', '')}"


def draw_margin(bins: BinnedShare, wrong: BinnedShare, *, level: float) -> Drawing:
    """Return the figure: per margin bin the share of changed answers with Wilson intervals, and of wrong answers.

    Parameters
    ----------
    bins : BinnedShare
        `record_tables.change_by_margin(inputs)`.
    wrong : BinnedShare
        `record_tables.incorrect_by_margin(inputs)`: the same bins.
    level : float
        Confidence level of the intervals, for the caption.
    """
    canvas = new_canvas(4.2)
    axes = canvas.subplots()
    centre, share = (bins.left + bins.right) / 2, 100 * bins.share
    # Wilson bounds of 0 or n events touch the share up to rounding; an error bar must not be negative.
    below, above = np.maximum(share - 100 * bins.low, 0), np.maximum(100 * bins.high - share, 0)
    axes.bar(centre, share, width=0.86 * (bins.right - bins.left), color=VARIANT, alpha=0.3, linewidth=0)
    axes.errorbar(centre, share, yerr=[below, above], fmt="o", color=VARIANT, markersize=5, elinewidth=1.6, capsize=0)
    axes.plot(centre, 100 * wrong.share, color=MUTED, linewidth=1.4, marker=".", label="wrong answers of the baseline")
    axes.legend(loc="upper right", frameon=False, fontsize=9)
    for x, n in zip(centre, bins.n, strict=True):
        axes.annotate(
            f"{n:,}", (x, 0), xytext=(0, -5), textcoords="offset points", ha="center", va="top", fontsize=8, color=MUTED
        )
    axes.set(xlim=(0, 1), ylim=(0, max(5.0, 1.06 * 100 * float(max(bins.high.max(), wrong.share.max())))))
    axes.set_xticks(np.linspace(0, 1, 11))
    axes.tick_params(axis="x", pad=13)
    axes.set_xlabel("Baseline's top margin: p(best option) - p(second best); small figures: items")
    axes.set_ylabel("Answers that changed (bars), %")
    horizontal_grid(axes)
    title = _finding(bins)
    state(canvas, title)
    caption = (
        f"Share of the {int(bins.n.sum()):,} multiple-choice items whose answer changed, by how sure the baseline was; "
        f"{100 * level:g} % Wilson intervals. The line is the share that the baseline has wrong."
    )
    return Drawing(canvas, title, caption)
