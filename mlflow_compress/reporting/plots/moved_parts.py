"""On which text a variant moves: by position, and by class of the predicted token."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mlflow_compress.records import MetricResult
from mlflow_compress.reporting.plots.style import GRID, MUTED, VARIANT, Drawing, new_canvas, state

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
