"""Histogram of the KL of single items (or corpus tokens) on a logarithmic axis."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from mlflow_compress.metrics.kl_by_position import ANSWER, REASONING
from mlflow_compress.metrics.margins import BinnedShare
from mlflow_compress.metrics.stats.arrays import Float
from mlflow_compress.records import MetricResult
from mlflow_compress.reporting.plots.style import (
    GRID,
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

    `kl` is in nats; values slightly below 0, from rounding, count as zeros.
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


def _order(name: str) -> int:
    """Return the first token of a place, by its name: 4 of "tokens 4-7"."""
    return int(name.split()[-1].split("-")[0])


def draw_positions(whole: MetricResult, parts: Mapping[str, MetricResult]) -> Drawing:
    """Return the mean KL of each place in the answer with intervals, and of reasoning and answer where told apart."""
    places = sorted((name for name in parts if name not in (REASONING, ANSWER)), key=_order)
    names = [*places, *(name for name in (REASONING, ANSWER) if name in parts)]
    canvas = new_canvas(1.7 + 0.27 * len(names))
    axes = canvas.subplots()
    for y, name in enumerate(names):
        result = parts[name]
        colour = VARIANT if name in places else MUTED
        axes.plot([result.value], [y], "o", color=colour, markersize=6)
        if result.low is not None and result.high is not None:
            axes.plot([result.low, result.high], [y, y], color=colour, linewidth=1.6)
        axes.annotate(
            f"{result.n:,}", (1.01, y), xycoords=("axes fraction", "data"), va="center", fontsize=8, color=MUTED
        )
    axes.axvline(whole.value, color=MUTED, linewidth=1.0, linestyle="--", label="all tokens")
    axes.legend(loc="lower right", frameon=False, fontsize=9)
    axes.set_yticks(range(len(names)), names)
    axes.set(xlim=(0, None), ylim=(len(names) - 0.4, -0.6))
    axes.set_xlabel("KL, nats; figures on the right: tokens")
    axes.grid(axis="x", color=GRID, linewidth=0.8)
    axes.tick_params(length=0)
    title = f"KL on text that the baseline wrote: {whole.value:.2g} nats per token"
    if len(places) > 1:
        first, last = (parts[place].value for place in (places[0], places[-1]))
        title += f", {first:.2g} at the first token and {last:.2g} at {places[-1]}"
    state(canvas, title)
    caption = (
        f"Mean KL(baseline ‖ variant) of {whole.n:,} tokens that the baseline has sampled itself, by place in the "
        f"answer, with {100 * whole.level:g} % intervals over prompts. A place without one has too few prompts."
    )
    return Drawing(canvas, title, caption)


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
    """Return the figure: per margin bin the share of changed answers with Wilson intervals, and of wrong answers."""
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
