"""Survival curve of greedy answers: the share that is still the same as the baseline's after so many tokens."""

from __future__ import annotations

import numpy as np
from matplotlib.ticker import MaxNLocator

from mlflow_compress.metrics.core.greedy_tokens import Forks
from mlflow_compress.metrics.core.survival import kaplan_meier
from mlflow_compress.reporting.plots.style import MUTED, VARIANT, Drawing, horizontal_grid, new_canvas, state


def _finding(median: float | None, n_same: int, n: int) -> str:
    same = f"{n_same:,} of {n:,} greedy answers are the same to the end"
    if median is None:
        return same
    return f"Half of the greedy answers have parted by token {median:.0f}; {same}"


def draw_answers_part(found: Forks, *, level: float) -> Drawing:
    """Return the Kaplan-Meier curve of the first divergent token, with its interval.

    Parameters
    ----------
    found : Forks
        `greedy_tokens.forks(inputs)`.
    level : float
        Confidence level of the interval.
    """
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
