"""What every variant costs (size, speed, memory) against its distance, with one or the front highlighted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from matplotlib.patheffects import withStroke
from matplotlib.ticker import MaxNLocator
from matplotlib.transforms import Bbox

from mlflow_compress.records import MetricResult
from mlflow_compress.reporting.plots.style import (
    BASELINE,
    BETTER,
    GRID,
    INK,
    MUTED,
    VARIANT,
    WORSE,
    Drawing,
    horizontal_grid,
    new_canvas,
    plain_text,
    state,
)

_DISTANCES = (9.0, 16.0, 26.0, 38.0, 52.0, 70.0)  # points
_DIRECTIONS = ((1, 0), (-1, 0), (0, 1), (0, -1), (1, 1), (1, -1), (-1, 1), (-1, -1))
_LEADER_FROM = 20.0  # a label further away than this gets a line to its point


def _aligned(direction: tuple[int, int]) -> dict[str, Any]:
    across = {1: "left", -1: "right", 0: "center"}[direction[0]]
    up = {1: "bottom", -1: "top", 0: "center"}[direction[1]]
    return {"ha": across, "va": up}


def _covered(box: Any, taken: Sequence[Any], frame: Any) -> float:
    """Return the area of `box` that other boxes cover or that is outside the frame, in square pixels."""
    area = 0.0
    for other in taken:
        common = Bbox.intersection(box, other)
        if common is not None:
            area += common.width * common.height
    inside = Bbox.intersection(box, frame)
    return float(area + box.width * box.height - (0.0 if inside is None else inside.width * inside.height))


def label_points(axes: Any, points: Sequence[tuple[float, float]], texts: Sequence[Any], *, bold: int | None) -> None:
    """Write each text next to its point, at the nearest place where it overlaps nothing.

    The method is greedy: the bold text first, then from left to right. Each text takes the first free one of 48 places
    around its point, or the one with the least overlap. The figure's layout must be final before the call.
    """
    canvas = axes.figure
    renderer = canvas.canvas.get_renderer()
    frame = axes.get_window_extent(renderer)
    pixels = axes.transData.transform(np.asarray(points, dtype=float))
    taken: list[Any] = [Bbox.from_bounds(x - 9, y - 9, 18, 18) for x, y in pixels]
    for i in sorted(range(len(points)), key=lambda i: (i != bold, pixels[i][0], pixels[i][1])):
        best: tuple[float, float, tuple[int, int]] | None = None
        style = {"fontsize": 9.5, "fontweight": "bold" if i == bold else "normal"}
        for distance in _DISTANCES:
            for direction in _DIRECTIONS:
                box = _extent(axes, texts[i], points[i], distance, direction, style, renderer)
                area = _covered(box, taken, frame)
                if best is None or area < best[0]:
                    best = (area, distance, direction)
                if area == 0:
                    break
            if best is not None and best[0] == 0:
                break
        assert best is not None
        _, distance, direction = best
        note = _note(axes, texts[i], points[i], distance, direction, style)
        if distance > _LEADER_FROM:
            axes.annotate(
                "",
                points[i],
                xytext=_offset(distance, direction),
                textcoords="offset points",
                arrowprops={"arrowstyle": "-", "color": GRID, "shrinkA": 1, "shrinkB": 4},
            ).set_in_layout(False)
        taken.append(note.get_window_extent(renderer))


def _offset(distance: float, direction: tuple[int, int]) -> tuple[float, float]:
    shorter = 0.7 if all(direction) else 1.0
    return distance * shorter * direction[0], distance * shorter * direction[1]


def _note(axes: Any, text: str, point: tuple[float, float], distance: float, direction: Any, style: Any) -> Any:
    note = axes.annotate(
        plain_text(text),
        point,
        xytext=_offset(distance, direction),
        textcoords="offset points",
        path_effects=[withStroke(linewidth=3, foreground="white")],
        **_aligned(direction),
        **style,
    )
    note.set_in_layout(False)
    return note


def _extent(
    axes: Any, text: str, point: tuple[float, float], distance: float, direction: Any, style: Any, renderer: Any
) -> Any:
    note = _note(axes, text, point, distance, direction, style)
    box = note.get_window_extent(renderer)
    note.remove()
    return box


_WIDE = 8.0  # ratio of the ends of an axis from which on it is logarithmic


@dataclass(frozen=True, kw_only=True)
class CostAxis:
    """What stands on the axis from left to right."""

    field: str  # Of the variants' rows; `<field>_low` and `<field>_high` are the ends of its interval, where it has one
    label: str  # Of the axis
    factor: float = 1.0  # What the value is multiplied by
    shown: str  # Format of a value in words
    what: str  # What it is called, what the better one is ("small"), and in which words it is drawn
    word: str
    side: str
    higher: bool = False  # Whether more is better
    baseline: float | None = None  # The baseline's own value, where a line shows it


SIZES = tuple(
    CostAxis(
        field=field,
        label=label,
        factor=factor,
        shown=shown,
        what="size",
        word="small",
        side="smaller is further left",
    )
    for field, label, factor, shown in (
        ("bits_per_weight", "Stored bits per weight of the linear layers", 1.0, "{:.2f} bits per weight"),
        ("bytes", "Size, MB", 1e-6, "{:.3g} MB"),
    )
)
SPEED = CostAxis(
    field="decode_speedup",
    label="Decode speed, one sequence at a time, over the baseline's",
    shown="{:.2f}x the baseline's decode speed",
    what="decode speed",
    word="fast",
    side="faster is further right",
    higher=True,
    baseline=1.0,
)
MEMORY = CostAxis(
    field="memory_ratio",
    label="Peak memory while serving, over the baseline's",
    shown="{:.2f}x the baseline's peak memory",
    what="memory",
    word="small in memory",
    side="less memory is further left",
    baseline=1.0,
)


@dataclass(frozen=True, kw_only=True)
class _Point:
    name: str
    cost: float
    cost_ends: tuple[float, float] | None
    kl: float
    low: float | None
    high: float | None


def _points(variants: Sequence[Mapping[str, Any]], axis: CostAxis) -> list[_Point]:
    return [
        _Point(
            name=str(v["name"]),
            cost=axis.factor * v[axis.field],
            cost_ends=None if low is None or high is None else (axis.factor * low, axis.factor * high),
            kl=max(v["kl"], 0.0),
            low=v.get("kl_low"),
            high=v.get("kl_high"),
        )
        for v in variants
        if v.get(axis.field) is not None and v.get("kl") is not None
        for low, high in [(v.get(f"{axis.field}_low"), v.get(f"{axis.field}_high"))]
    ]


def _finding(points: Sequence[_Point], current: str, axis: CostAxis) -> str:
    mine = next((p for p in points if p.name == current), None)
    if mine is None:
        return f"KL and {axis.what} of {len(points)} variants"
    start = f"{current}: KL {mine.kl:.2g} at {axis.shown.format(mine.cost)}"
    others = [p for p in points if p is not mine]
    if not others:
        return start
    sign = -1 if axis.higher else 1
    better = [
        p.name
        for p in others
        if sign * p.cost <= sign * mine.cost and p.kl <= mine.kl and (p.cost, p.kl) != (mine.cost, mine.kl)
    ]
    words = f"both as {axis.word} and as close"
    if not better:
        return f"{start}; no other of {len(points)} variants is {words}"
    return f"{start}; {f'{better[0]} is' if len(better) == 1 else f'{len(better)} variants are'} {words}"


def _front(points: Sequence[_Point], front: Sequence[str], axis: CostAxis) -> str:
    verb = "is" if len(front) == 1 else "are"
    return f"{len(front)} of {len(points)} variants {verb} on the Pareto front of {axis.what} and KL"


def draw_variants(
    variants: Sequence[Mapping[str, Any]],
    current: str | None,
    *,
    front: Sequence[str] = (),
    costs: Sequence[CostAxis] = SIZES,
    fewest: int = 1,
) -> Drawing | None:
    """Return the figure of KL (log axis) against a cost. Variants with a KL of exactly 0 are in a strip below the axis.

    A variant has `name`, `kl`, the field of an axis, and optionally the ends of intervals: `kl_low`, `kl_high` and
    those of the axis; one without cost or KL is counted in the caption. Of `costs`, the one that most variants have a
    value for is drawn. `front` is the Pareto front, the best cost first; it is highlighted where no variant is
    `current`. None if fewer than `fewest` variants have both a cost and a KL.
    """
    axis, points = max(((axis, _points(variants, axis)) for axis in costs), key=lambda found: len(found[1]))
    if len(points) < fewest or not points:
        return None
    above, zero = [p for p in points if p.kl > 0], [p for p in points if p.kl == 0]
    canvas = new_canvas(4.8 if above else 2.4)
    upper, strip = _panels(canvas, bool(above), bool(zero))
    for axes, members in ((upper, above), (strip, zero)):
        if axes is not None:
            _scatter(axes, members, front if current is None else (current,))
    if upper is not None and (steps := sorted((p.cost, p.kl) for p in above if p.name in front)):
        costs_of_steps, kl_of_steps = zip(*steps, strict=True)
        where = "pre" if axis.higher else "post"  # behind a step lies what the front beats
        upper.step(costs_of_steps, kl_of_steps, where=where, color=VARIANT, linewidth=1, alpha=0.5, zorder=1)
    lowest = strip if strip is not None else upper
    _cost_axis(lowest, axis, points)
    if axis.baseline is not None:
        for axes in (upper, strip):
            if axes is not None:
                axes.axvline(axis.baseline, color=MUTED, linewidth=1, linestyle=":", zorder=1)
    if upper is not None:
        _log_axis(upper, above)
    title = _front(points, front, axis) if current is None else _finding(points, current, axis)
    state(canvas, title)
    canvas.draw_without_rendering()  # fixes the layout; labels are placed in pixels
    for axes, members in ((upper, above), (strip, zero)):
        if axes is not None:
            bold = next((i for i, p in enumerate(members) if p.name == current), None)
            heights = [p.kl if axes is upper else 0.0 for p in members]
            label_points(
                axes, [(p.cost, y) for p, y in zip(members, heights, strict=True)], [p.name for p in members], bold=bold
            )
    left_out = len(variants) - len(points)
    caption = "Every variant measured so far in this evaluation (same baseline, items and settings): "
    caption += f"{axis.side}, closer to the baseline is lower"
    caption += f"; no other variant is both as {axis.word} and as close as one on the front" if front else ""
    caption += "; bars are intervals" if any(p.low is not None for p in above) else ""
    caption += "; the dotted line is the baseline" if axis.baseline is not None else ""
    caption += f"; {left_out} without {axis.what} or KL {'is' if left_out == 1 else 'are'} left out" if left_out else ""
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
            axes.plot([p.cost, p.cost], [low, p.high], color=colour, linewidth=1.5, alpha=0.7, zorder=2)
        if p.cost_ends is not None:
            axes.plot(p.cost_ends, [p.kl, p.kl], color=colour, linewidth=1.5, alpha=0.7, zorder=2)
        axes.scatter(
            [p.cost],
            [p.kl],
            s=95 if mine else 46,
            color=colour,
            edgecolor="white",
            linewidth=1,
            zorder=4 if mine else 3,
        )


def _cost_axis(axes: Any, axis: CostAxis, points: Sequence[_Point]) -> None:
    # A tenth around the baseline: so a difference of one percent does not fill the axis.
    near = [] if axis.baseline is None else [0.9 * axis.baseline, 1.1 * axis.baseline]
    costs = np.array([*near, *(value for p in points for value in (p.cost, *(p.cost_ends or ())))])
    axes.set_xlabel(axis.label)
    if axis.baseline is not None and costs.max() > _WIDE * costs.min():  # of ratios, half and twice are alike
        axes.set_xscale("log")
        axes.set_xlim(0.8 * costs.min(), 1.5 * costs.max())
        axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
        axes.xaxis.set_minor_formatter(lambda value, _: "")
        return
    spread = float(np.ptp(costs)) or 0.5 * float(costs.max())
    axes.set_xlim(max(0.0, costs.min() - 0.2 * spread), costs.max() + 0.3 * spread)
    axes.xaxis.set_major_locator(MaxNLocator(nbins=8, steps=[1, 2, 4, 5, 10], min_n_ticks=3))


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


_LABELS = {"uniform": "uniform", "searched": "searched", "autoscheme": "AutoScheme, same limits"}


def draw_budget_front(rows: Sequence[Mapping[str, Any]], *, gate: float | None) -> Drawing | None:
    """Return the figure of KL (log axis) against stored bits per weight.

    `rows` are those of `Search.to_rows()`; a KL of 0 has no place on a log axis and is counted in the caption. None if
    no variant has a KL above 0.
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
    title = _finding_of_two([(words, b.value, v.value) for b, v, _, words in found])
    state(canvas, title)
    n = " and ".join(sorted({f"{v.n:,}" for _, v, _, _ in found}))
    return Drawing(canvas, title, f"Baseline and variant on the same items ({n}), with {100 * level:g} % intervals.")


def _finding_of_two(changes: list[tuple[str, float, float]]) -> str:
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
