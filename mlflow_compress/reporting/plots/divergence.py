"""Histogram of the KL of single items (or corpus tokens) on a logarithmic axis."""

from __future__ import annotations

from typing import Any

import numpy as np

from mlflow_compress.metrics.stats.arrays import Float
from mlflow_compress.reporting.plots.style import (
    INK,
    MUTED,
    VARIANT,
    WORSE,
    Drawing,
    horizontal_grid,
    new_canvas,
    state,
)

_BINS_A_DECADE = 8
_FEWEST_BINS, _MOST_BINS = 12, 60


def _bins(positive: Float) -> Float:
    low, high = np.log10(positive.min()), np.log10(positive.max())
    if high - low < 0.1:
        low, high = low - 0.5, high + 0.5
    count = int(np.clip((high - low) * _BINS_A_DECADE, _FEWEST_BINS, _MOST_BINS))
    return np.asarray(np.logspace(low, high, count + 1))


def _mark(axes: Any, x: float, words: str, colour: str, *, side: str, height: float) -> None:
    axes.axvline(x, color=colour, linewidth=1.5)
    axes.annotate(
        f"{words} {x:.2g}",
        (x, height),
        xycoords=("data", "axes fraction"),
        xytext=(5 if side == "left" else -5, 0),
        textcoords="offset points",
        ha=side,
        va="top",
        color=colour,
        fontsize=10,
        fontweight="bold",
        bbox={"facecolor": "white", "edgecolor": "none", "pad": 1.5, "alpha": 0.85},
    )


def draw_divergence(kl: Float, *, unit: str) -> Drawing:
    """Return the histogram of the KL with mean and 95th percentile. Zeros have a bar of their own.

    Parameters
    ----------
    kl : numpy.ndarray, shape (n,)
        KL in nats of each item or token, n at least 1. Values slightly below 0, from rounding, count as zeros.
    unit : str
        "item" or "corpus token".
    """
    n, positive = len(kl), kl[kl > 0]
    zeros = n - len(positive)
    mean, p95 = float(np.mean(kl)), float(np.percentile(kl, 95))
    canvas = new_canvas(4.2 if len(positive) else 2.6)
    if not len(positive):
        axes = canvas.subplots()
        axes.barh([0], [n], color=VARIANT, height=0.5)
        axes.set(
            yticks=[0], yticklabels=["KL = 0"], xlim=(0, 1.02 * n), ylim=(-0.6, 0.6), xlabel=f"{unit}s".capitalize()
        )
        axes.tick_params(length=0)
        title = f"KL is exactly 0 for all {n:,} {unit}s"
    else:
        axes = _draw_positive(canvas, positive, zeros, unit)
        _mark(axes, mean, "mean", INK, side="right" if p95 >= mean else "left", height=0.99)
        if p95 > 0:
            _mark(axes, p95, "p95", WORSE, side="left" if p95 >= mean else "right", height=0.99)
        title = f"Half of the {unit}s have a KL below {np.median(kl):.2g}, one in twenty above {p95:.2g}"
    state(canvas, title)
    noun = unit if zeros == 1 else f"{unit}s"
    caption = (
        f"KL(baseline ‖ variant) in nats of each of {n:,} {unit}s, logarithmic axis; "
        f"{zeros if zeros else 'no'} {noun} with a KL of exactly 0."
    )
    return Drawing(canvas, title, caption)


def _draw_positive(canvas: Any, positive: Float, zeros: int, unit: str) -> Any:
    if zeros:
        strip, axes = canvas.subplots(1, 2, sharey=True, gridspec_kw={"width_ratios": [1, 13], "wspace": 0.02})
        strip.bar([0], [zeros], color=MUTED, width=0.7)
        strip.set(xticks=[0], xticklabels=["0"], xlim=(-0.7, 0.7))
        horizontal_grid(strip)
        strip.set_ylabel(f"{unit}s".capitalize())
    else:
        axes = canvas.subplots()
        axes.set_ylabel(f"{unit}s".capitalize())
    axes.hist(positive, bins=_bins(positive), color=VARIANT, alpha=0.75, edgecolor="white", linewidth=0.6)
    axes.set_xscale("log")
    axes.margins(x=0.02)
    axes.set_ylim(0, 1.12 * axes.get_ylim()[1])
    axes.set_xlabel(f"KL of the {unit}, nats")
    horizontal_grid(axes)
    axes.tick_params(axis="x", which="minor", length=0)
    return axes
