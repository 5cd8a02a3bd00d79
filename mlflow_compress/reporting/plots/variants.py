"""Size against distance of every variant of the evaluation, with this one highlighted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from matplotlib.ticker import MaxNLocator

from mlflow_compress.reporting.plots.labels import label_points
from mlflow_compress.reporting.plots.style import BASELINE, GRID, MUTED, VARIANT, Drawing, new_canvas, state

_SIZES = (("bits_per_weight", "Stored bits per weight of the linear layers", 1.0), ("bytes", "Size, MB", 1e-6))


@dataclass(frozen=True, kw_only=True)
class _Point:
    name: str
    size: float
    kl: float
    low: float | None
    high: float | None


def _points(variants: Sequence[Mapping[str, Any]], field: str, factor: float) -> list[_Point]:
    return [
        _Point(
            name=str(v["name"]),
            size=factor * v[field],
            kl=max(v["kl"], 0.0),
            low=v.get("kl_low"),
            high=v.get("kl_high"),
        )
        for v in variants
        if v.get(field) is not None and v.get("kl") is not None
    ]


def _finding(points: Sequence[_Point], current: str, field: str) -> str:
    mine = next((p for p in points if p.name == current), None)
    if mine is None:
        return f"KL and size of {len(points)} variants"
    at = f"{mine.size:.2f} bits per weight" if field == "bits_per_weight" else f"{mine.size:.3g} MB"
    start = f"{current}: KL {mine.kl:.2g} at {at}"
    others = [p for p in points if p is not mine]
    if not others:
        return start
    better = [
        p.name for p in others if p.size <= mine.size and p.kl <= mine.kl and (p.size, p.kl) != (mine.size, mine.kl)
    ]
    if not better:
        return f"{start}; no other of {len(points)} variants is both as small and as close"
    return f"{start}; {better[0] if len(better) == 1 else f'{len(better)} variants'} " + (
        "is both as small and as close" if len(better) == 1 else "are both as small and as close"
    )


def _front(points: Sequence[_Point], front: Sequence[str]) -> str:
    return f"{len(front)} of {len(points)} variants are on the Pareto front of size and KL"


def draw_variants(
    variants: Sequence[Mapping[str, Any]], current: str | None, *, front: Sequence[str] = ()
) -> Drawing | None:
    """Return the figure of KL (log axis) against size. Variants with a KL of exactly 0 are in a strip below the axis.

    Parameters
    ----------
    variants : sequence of mapping
        `name`, `bits_per_weight` or `bytes`, `kl`, and optionally `kl_low`, `kl_high`. A variant without a size or a
        KL is counted in the caption.
    current : str or None
        Name of the highlighted variant; None highlights the front.
    front : sequence of str
        Names of the variants on the Pareto front, from small to large; they are joined by a line.

    Returns
    -------
    Drawing or None
        None if no variant has both a size and a KL.
    """
    found = [(field, label, _points(variants, field, factor)) for field, label, factor in _SIZES]
    field, label, points = max(found, key=lambda f: len(f[2]))
    if not points:
        return None
    above, zero = [p for p in points if p.kl > 0], [p for p in points if p.kl == 0]
    canvas = new_canvas(4.8 if above else 2.4)
    upper, strip = _panels(canvas, bool(above), bool(zero))
    for axes, members in ((upper, above), (strip, zero)):
        if axes is not None:
            _scatter(axes, members, front if current is None else (current,))
    if upper is not None and (steps := sorted((p.size, p.kl) for p in above if p.name in front)):
        sizes_of_steps, kl_of_steps = zip(*steps, strict=True)
        upper.step(sizes_of_steps, kl_of_steps, where="post", color=VARIANT, linewidth=1, alpha=0.5, zorder=1)
    sizes = np.array([p.size for p in points])
    spread = float(np.ptp(sizes)) or 0.5 * float(sizes.max())
    lowest = strip if strip is not None else upper
    lowest.set_xlim(max(0.0, sizes.min() - 0.2 * spread), sizes.max() + 0.3 * spread)
    lowest.xaxis.set_major_locator(MaxNLocator(nbins=8, steps=[1, 2, 4, 5, 10], min_n_ticks=3))
    lowest.set_xlabel(label)
    if upper is not None:
        _log_axis(upper, above)
    title = _front(points, front) if current is None else _finding(points, current, field)
    state(canvas, title)
    canvas.draw_without_rendering()  # fixes the layout; labels are placed in pixels
    for axes, members in ((upper, above), (strip, zero)):
        if axes is not None:
            bold = next((i for i, p in enumerate(members) if p.name == current), None)
            heights = [p.kl if axes is upper else 0.0 for p in members]
            label_points(
                axes, [(p.size, y) for p, y in zip(members, heights, strict=True)], [p.name for p in members], bold=bold
            )
    left_out = len(variants) - len(points)
    caption = "Every variant measured so far in this evaluation (same baseline, items and settings): "
    caption += "smaller is further left, closer to the baseline is lower"
    caption += "; no other variant is both as small and as close as one on the front" if front else ""
    caption += "; bars are intervals" if any(p.low is not None for p in above) else ""
    caption += f"; {left_out} without a size or a KL {'is' if left_out == 1 else 'are'} left out" if left_out else ""
    return Drawing(canvas, title, caption + ".")


def _panels(canvas: Any, above: bool, zero: bool) -> tuple[Any, Any]:
    """Return the log axes and the strip for KL = 0; None for an empty panel."""
    if above and zero:
        upper, strip = canvas.subplots(2, 1, sharex=True, gridspec_kw={"height_ratios": [7, 1], "hspace": 0.04})
        upper.tick_params(axis="x", length=0)
    else:
        only = canvas.subplots()
        upper, strip = (only, None) if above else (None, only)
    if strip is not None:
        strip.set(yticks=[0], yticklabels=["KL = 0"], ylim=(-1, 1), facecolor="#f4f6f8")
        strip.tick_params(length=0)
        strip.spines["left"].set_visible(False)
    if upper is not None:
        upper.set_ylabel("KL to the baseline, nats (log axis)")
    return upper, strip


def _scatter(axes: Any, points: Sequence[_Point], highlighted: Sequence[str]) -> None:
    for p in points:
        mine = p.name in highlighted
        colour = VARIANT if mine else BASELINE
        if p.kl > 0 and p.low is not None and p.high is not None:
            low = p.low if p.low > 0 else p.kl / 10  # a bound of 0 has no place on a log axis: the bar just runs down
            axes.plot([p.size, p.size], [low, p.high], color=colour, linewidth=1.5, alpha=0.7, zorder=2)
        axes.scatter(
            [p.size],
            [p.kl],
            s=95 if mine else 46,
            color=colour,
            edgecolor="white",
            linewidth=1,
            zorder=4 if mine else 3,
        )


def _log_axis(axes: Any, points: Sequence[_Point]) -> None:
    axes.set_yscale("log")
    values = [p.kl for p in points] + [v for p in points for v in (p.low, p.high) if v is not None and v > 0]
    # At least a decade, so that one point does not fill the axis with tenths of itself.
    low, high = np.log10(min(values)), np.log10(max(values))
    room = max(0.15 * (high - low), (1.0 - (high - low)) / 2, 0.1)
    axes.set_ylim(10 ** (low - room), 10 ** (high + room))
    axes.grid(axis="y", color=GRID, linewidth=0.8)
    axes.tick_params(axis="y", which="both", length=0, labelcolor=MUTED)
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    decades = high - low + 2 * room
    axes.yaxis.set_minor_formatter(lambda value, _: f"{value:g}" if decades < 1.5 and f"{value:e}"[0] in "25" else "")
