"""What every variant costs (size, speed, memory) against its distance, with one or the front highlighted."""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from matplotlib.colors import LogNorm
from matplotlib.ticker import MaxNLocator

from mlflow_compress.decide.gates import DECODE_SPEEDUP, KL, MEMORY_RATIO, SIZE
from mlflow_compress.decide.scoreboard import BITS, KL_DISTANCES, Scoreboard
from mlflow_compress.metrics.conscompf import ModelSimilarity
from mlflow_compress.metrics.core.metric_registry import key
from mlflow_compress.metrics.diagnosis import GroupsFound
from mlflow_compress.metrics.thought_length import COST_RATIO
from mlflow_compress.records import MetricResult
from mlflow_compress.reporting.plots import style
from mlflow_compress.reporting.verdict import tokens_words

_WIDE = 8.0  # ratio of the ends of an axis from which on it is logarithmic


@dataclass(frozen=True, kw_only=True)
class _CostAxis:
    """What stands on the axis from left to right."""

    field: str  # The metric; `<field>_low` and `<field>_high` are the ends of its interval, where a row has them
    label: str  # Of the axis
    factor: float = 1.0  # What the value is multiplied by
    shown: str  # Format of a value in words
    what: str  # What it is called, what the better one is ("small"), and in which words it is drawn
    word: str
    side: str
    higher: bool = False  # Whether more is better
    baseline: float | None = None  # The baseline's own value, where a line shows it


_SIZE: dict[str, Any] = {"what": "size", "word": "small", "side": "smaller is further left"}
SIZES = (
    _CostAxis(
        field=BITS,
        label="Stored bits per weight of the linear layers",
        shown="{:.2f} bits per weight",
        **_SIZE,
    ),
    _CostAxis(field=SIZE, label="Size, MB", factor=1e-6, shown="{:.3g} MB", **_SIZE),
)
SPEED_AXIS = _CostAxis(
    field=DECODE_SPEEDUP,
    label="Decode speed, one sequence at a time, over the baseline's",
    shown="{:.2f}x the baseline's decode speed",
    what="decode speed",
    word="fast",
    side="faster is further right",
    higher=True,
    baseline=1.0,
)
MEMORY_AXIS = _CostAxis(
    field=MEMORY_RATIO,
    label="Peak memory while serving, over the baseline's",
    shown="{:.2f}x the baseline's peak memory",
    what="memory",
    word="small in memory",
    side="less memory is further left",
    baseline=1.0,
)


TOKENS_AXIS = _CostAxis(
    field=COST_RATIO.name,
    label="Tokens to a right answer, over the baseline's",
    shown="{:.2f}x the baseline's tokens to a right answer",
    what="tokens to a right answer",
    word="cheap in tokens",
    side="fewer tokens are further left",
    baseline=1.0,
)


class _Point(NamedTuple):
    name: str
    cost: float
    cost_ends: tuple[float, float] | None
    kl: float
    low: float | None
    high: float | None


def _points(variants: Sequence[Mapping[str, Any]], axis: _CostAxis, distance: str) -> list[_Point]:
    points = []
    for v in variants:
        if v.get(axis.field) is not None and v.get(distance) is not None:
            low, high = v.get(f"{axis.field}_low"), v.get(f"{axis.field}_high")
            ends = None if low is None or high is None else (axis.factor * low, axis.factor * high)
            cost, kl = axis.factor * v[axis.field], max(v[distance], 0.0)
            points.append(_Point(str(v["name"]), cost, ends, kl, v.get(f"{distance}_low"), v.get(f"{distance}_high")))
    return points


def _finding(points: Sequence[_Point], current: str, axis: _CostAxis, tokens: str) -> str:
    mine = next((p for p in points if p.name == current), None)
    if mine is None:
        return f"KL and {axis.what} of {len(points)} variants"
    start = f"{current}: KL {mine.kl:.2g} at {axis.shown.format(mine.cost)}{tokens}"
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


def draw_variants(
    variants: Sequence[Mapping[str, Any]],
    current: str | None,
    *,
    front: Sequence[str] = (),
    costs: Sequence[_CostAxis] = SIZES,
    fewest: int = 1,
) -> style.Drawing | None:
    """Return the figure of KL (log axis) against a cost. Variants with a KL of exactly 0 are in a strip below the axis.

    A variant has `name`, and by their metrics' keys values and ends of intervals ("<key>_low", "<key>_high"). The KL is
    that of the items, or where there is none, of the baseline's own thoughts. Of `costs`, the one that most variants
    have is drawn. The Pareto `front`, the best cost first, is highlighted where no variant is `current`. None if fewer
    than `fewest` variants have both a cost and a KL.
    """
    distance = next((name for name in KL_DISTANCES if any(v.get(name) is not None for v in variants)), KL)
    axis, points = max(((axis, _points(variants, axis, distance)) for axis in costs), key=lambda pair: len(pair[1]))
    if len(points) < fewest or not points:
        return None
    above, zero = [p for p in points if p.kl > 0], [p for p in points if p.kl == 0]
    canvas = style.new_canvas(4.8 if above else 2.4)
    panels = list(zip(_panels(canvas, bool(above), bool(zero)), filter(None, (above, zero)), strict=True))
    for axes, members in panels:
        _scatter(axes, members, front if current is None else (current,))
        if axis.baseline is not None:
            axes.axvline(axis.baseline, color=style.MUTED, linewidth=1, linestyle=":", zorder=1)
    _cost_axis(panels[-1][0], axis, points)
    off_the_line = 0
    if above:
        upper = panels[0][0]
        _log_axis(upper, above)
        on = "to the baseline" if distance == KL else "on the baseline's own thoughts"
        upper.set_ylabel(f"KL {on}, nats (log axis)")
        # A variant with a smaller cache is on the front too, where a closer one has weights as small.
        points_on = sorted(((p.cost, p.kl) for p in above if p.name in front), reverse=axis.higher)
        closest = itertools.accumulate((kl for _, kl in points_on), min)

        if steps := [point for point, kl in zip(points_on, closest, strict=True) if point[1] == kl]:
            off_the_line = len(points_on) - len(steps)
            # Behind a step lies what the front beats.
            upper.step(
                *zip(*steps, strict=True), where="post", color=style.VARIANT_COLOUR, linewidth=1, alpha=0.5, zorder=1
            )
    if current is not None:
        mine: Mapping[str, Any] = next((v for v in variants if v["name"] == current), {})
        cost = mine.get(COST_RATIO.name) if axis in SIZES else None
        low, high = (mine.get(f"{COST_RATIO.name}_{end}") for end in ("low", "high"))
        tokens = tokens_words(None if cost is None else MetricResult(COST_RATIO.name, cost, low, high))
        title = _finding(points, current, axis, tokens)
    else:
        are = "is" if len(front) == 1 else "are"
        title = f"{len(front)} of {len(points)} variants {are} on the Pareto front of {axis.what} and KL"
    style.state(canvas, title)
    for axes, members in panels:
        bold = next((i for i, p in enumerate(members) if p.name == current), None)
        style.label_points(axes, [(p.cost, p.kl) for p in members], [p.name for p in members], bold=bold)
    caption = "Every variant measured so far in this evaluation (same baseline, items and settings): "
    caption += f"{axis.side}, closer to the baseline is lower"
    caption += f"; no other variant is both as {axis.word} and as close as one on the front" if front else ""
    caption += "; those above its line have smaller caches" if off_the_line else ""
    caption += "; bars are intervals" if any(p.low is not None for p in above) else ""
    caption += "; the dotted line is the baseline" if axis.baseline is not None else ""
    if left_out := len(variants) - len(points):
        caption += f"; {left_out} without {axis.what} or KL {'is' if left_out == 1 else 'are'} left out"
    return style.Drawing(canvas, title, caption + ".")


def _panels(canvas: Any, above: bool, zero: bool) -> list[Any]:
    """Return the log axes and the strip for KL = 0, without an empty one."""
    if above and zero:
        panels = list(canvas.subplots(2, 1, sharex=True, gridspec_kw={"height_ratios": [7, 1], "hspace": 0.04}))
        panels[0].tick_params(axis="x", length=0)
    else:
        panels = [canvas.subplots()]
    if zero:
        panels[-1].set(yticks=[0], yticklabels=["KL = 0"], ylim=(-1, 1), facecolor="#f4f6f8")
        panels[-1].tick_params(length=0)
        panels[-1].spines["left"].set_visible(False)
    return panels


def _scatter(axes: Any, points: Sequence[_Point], highlighted: Sequence[str]) -> None:
    for p in points:
        mine = p.name in highlighted
        colour, size, order = (style.VARIANT_COLOUR, 95, 4) if mine else (style.BASELINE_COLOUR, 46, 3)
        bar = {"color": colour, "linewidth": 1.5, "alpha": 0.7, "zorder": 2}
        if p.kl > 0 and p.low is not None and p.high is not None:
            low = p.low if p.low > 0 else p.kl / 10  # a bound of 0 has no place on a log axis: the bar just runs down
            axes.plot([p.cost, p.cost], [low, p.high], **bar)
        if p.cost_ends is not None:
            axes.plot(p.cost_ends, [p.kl, p.kl], **bar)
        axes.scatter([p.cost], [p.kl], s=size, color=colour, edgecolor="white", linewidth=1, zorder=order)


def _cost_axis(axes: Any, axis: _CostAxis, points: Sequence[_Point]) -> None:
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
    axes.grid(axis="y", color=style.GRID, linewidth=0.8)
    axes.tick_params(axis="y", which="both", length=0, labelcolor=style.MUTED)
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    decades = high - low + 2 * room
    axes.yaxis.set_minor_formatter(lambda value, _: f"{value:g}" if decades < 1.5 and f"{value:e}"[0] in "25" else "")


def draw_budget_front(rows: Sequence[Mapping[str, Any]], *, gate: float | None) -> style.Drawing | None:
    """Return the figure of KL (log axis) against bits per weight, from `Search.to_rows()`; None if every KL is 0."""
    above = [row for row in rows if row["kl"] > 0]
    if not above:
        return None
    canvas, axes = style.new_axes(4.8)
    kinds = {kind: [row for row in above if row["kind"] == kind] for kind in ("uniform", "searched")}
    for (kind, members), colour in zip(kinds.items(), (style.BASELINE_COLOUR, style.VARIANT_COLOUR), strict=True):
        for row in members:
            if row["kl_low"] is not None and row["kl_low"] > 0:
                axes.plot([row["bits_per_weight"]] * 2, [row["kl_low"], row["kl_high"]], color=colour, linewidth=1.5)
        points = [(row["bits_per_weight"], row["kl"]) for row in members]
        if not points:
            continue
        shape = {"marker": "s" if kind == "uniform" else "o", "s": 55, "color": colour, "edgecolor": "white"}
        axes.scatter(*zip(*points, strict=True), **shape, zorder=3, label=kind)

    if len(ends := kinds["uniform"]) > 1:
        x = np.linspace(ends[0]["bits_per_weight"], ends[-1]["bits_per_weight"], 400)
        mix = np.interp(x, [row["bits_per_weight"] for row in ends], [row["kl"] for row in ends])
        axes.plot(
            x, mix, color=style.BASELINE_COLOUR, linewidth=1, linestyle="--", zorder=1, label="linear mix of uniform"
        )
    if gate is not None:
        axes.axhline(gate, color=style.WORSE_COLOUR, linewidth=1, zorder=1, label=f"gate: KL {gate:g}")
    axes.set_yscale("log")
    axes.grid(color=style.GRID, linewidth=0.6)
    axes.set(xlabel="Stored bits per weight of the linear layers", ylabel="KL to the baseline, nats (log axis)")
    axes.tick_params(colors=style.MUTED)
    axes.legend(loc="lower left")
    axes.margins(x=0.12, y=0.12)

    closer = sum(row["against_mix"] == "closer" for row in kinds["searched"])
    title = f"{closer} of {len(kinds['searched'])} searched variants are closer than the linear mix"
    style.state(canvas, title)
    places = [(row["bits_per_weight"], row["kl"]) for row in above]
    style.label_points(
        axes, places, [row["name"] if row["kind"] == "uniform" else row["limit"] for row in above], bold=None
    )
    caption = "Smaller is further left, closer to the baseline is lower; bars are intervals."
    if left_out := len(rows) - len(above):
        caption += f" {left_out} with a KL of 0 {'is' if left_out == 1 else 'are'} left out."
    return style.Drawing(canvas, title, caption)


_PANELS = ("robustness/shuffle_drop_pct", "uncertainty/uacc", "uncertainty/set_size")


def draw_pairs(pooled: Mapping[str, MetricResult], *, level: float) -> style.Drawing | None:
    """Return the figure, with one panel per metric that both models have; None if there is no such metric."""
    names = [name for name in _PANELS if name in pooled and f"{name}_baseline" in pooled]
    if not names:
        return None
    canvas = style.new_canvas(3.7)
    for axes, name in zip(canvas.subplots(1, len(names), squeeze=False)[0], names, strict=True):
        unit = ", %" if key(name).unit == "percent" else ""
        label = f"{key(name).label}{unit}\n({key(name).direction} is better)"
        _panel(axes, pooled[f"{name}_baseline"], pooled[name], label)
    values = [(key(name).label, pooled[f"{name}_baseline"].value, pooled[name].value) for name in names]
    # Non-breaking spaces keep a number and its arrow on one line.
    title = "; ".join(f"{label} {before:.3g}\u00a0→\u00a0{after:.3g}" for label, before, after in values)
    if all(before == after for _, before, after in values):
        title = f"Unchanged: {'; '.join(f'{label} {after:.3g}' for label, _, after in values)}"
    n = " and ".join(sorted({f"{pooled[name].n:,}" for name in names}))
    return style.Drawing(
        canvas, title, f"Baseline and variant on the same items ({n}), with {100 * level:g} % intervals."
    )


def _panel(axes: Any, baseline: MetricResult, variant: MetricResult, label: str) -> None:
    top = 0.0
    for x, (result, colour) in enumerate(((baseline, style.BASELINE_COLOUR), (variant, style.VARIANT_COLOUR))):
        axes.bar([x], [result.value], color=colour, width=0.56, alpha=0.85)
        peak = result.value
        if result.low is not None and result.high is not None:
            axes.plot([x, x], [result.low, result.high], color=style.INK, linewidth=1.6)
            peak = max(peak, result.high)
        look = {"ha": "center", "fontweight": "bold", "fontsize": 10}
        axes.annotate(f"{result.value:.3g}", (x, peak), xytext=(0, 4), textcoords="offset points", **look)
        top = max(top, peak)
    axes.set(xlim=(-0.6, 1.6), ylim=(0, 1.18 * top if top > 0 else 1.0))
    axes.set_xticks([0, 1], ["baseline", "variant"])
    axes.set_title(label, fontsize=10, color=style.MUTED, loc="left", linespacing=1.3)
    style.horizontal_grid(axes)


_MOST_MODELS, _MOST_LAYERS = 12, 40  # of more, a matrix shows no numbers: they would cover each other


def draw_matrix(similarity: ModelSimilarity) -> style.Drawing:
    """Return the matrix of similarities as a heat map; its colours begin at the smallest value."""
    size = len(similarity.names)
    canvas, axes = style.new_axes(1.9 + 0.4 * size)
    lowest = float(similarity.values.min())
    image = style.draw_heat_map(
        axes,
        similarity.values,
        ["#ffffff", style.VARIANT_COLOUR],
        number="{:.3f}".format if size <= _MOST_MODELS else None,
        is_dark=lambda value: value > (lowest + 1) / 2 + 0.2 * (1 - lowest),
        vmin=0.0 if similarity.shares is None else lowest,
        vmax=1.0,
    )
    if size > _MOST_MODELS:
        canvas.colorbar(image, ax=axes, label="ConSCompF similarity", shrink=0.6)
    names = [style.plain_text(name) for name in similarity.names]
    axes.set_xticks(range(size), names, rotation=30, ha="right")
    axes.set_yticks(range(size), names)
    i, j = divmod(int(similarity.values.argmin()), size)
    title = "All models answer alike"
    if similarity.shares is not None:
        title = f"Least alike answer {similarity.names[i]} and {similarity.names[j]}: {lowest:.3f}"
    caption = f"ConSCompF similarity (equation 4), mean over {similarity.n_instructions} instructions with "
    caption += f"{similarity.n_samples} answers each, embedded by {similarity.encoder}. "
    caption += "The baseline's two samples show how alike a model is to itself."
    return style.Drawing(canvas, title, caption)


def draw_map(models: ModelSimilarity) -> style.Drawing | None:
    """Return the models on the two principal components of the matrix; None if nothing tells them apart."""
    if models.shares is None:
        return None
    canvas, axes = style.new_axes(4.8)
    points = [(float(x), float(y)) for x, y in models.coordinates]
    for place, (x, y) in enumerate(points):
        base = place < 2  # the baseline's two samples
        axes.scatter(
            [x],
            [y],
            s=80 if base else 46,
            color=style.BASELINE_COLOUR if base else style.VARIANT_COLOUR,
            edgecolor="white",
            zorder=3,
        )
    for number, (set_label, share) in enumerate(zip((axes.set_xlabel, axes.set_ylabel), models.shares, strict=True), 1):
        set_label(f"Principal component {number}: {100 * share:.1f} % of the variance")
    axes.margins(x=0.22, y=0.15)
    axes.grid(color=style.GRID, linewidth=0.8)
    axes.tick_params(length=0, labelcolor=style.MUTED)
    title = f"Where the baseline and {len(points) - 2} variants lie by their answers"
    style.state(canvas, title)
    style.label_points(axes, points, [style.plain_text(name) for name in models.names], bold=0)
    caption = "Principal components of the rows of the similarity matrix (columns centred, not scaled): models that "
    caption += "resemble the same models are near each other. Grey: the baseline's two samples."
    return style.Drawing(canvas, title, caption)


def draw_correlations(board: Scoreboard) -> style.Drawing | None:
    """Return the figure: one cell per pair of metrics, with the correlation; None if there is no correlation."""
    by_pair = {(c.first, c.second): c for c in board.correlations if c.value is not None}
    if not by_pair:
        return None
    labels = {column.key: column.label for column in board.columns}
    metrics = [name for name in labels if any(name in pair for pair in by_pair)]
    size = len(metrics)
    values = np.full((size, size), np.nan)
    for (first, second), c in by_pair.items():
        low, high = sorted((metrics.index(first), metrics.index(second)))
        values[high, low] = np.nan if c.value is None else c.value
    canvas, axes = style.new_axes(1.6 + 0.46 * size)
    shades = (style.WORSE_COLOUR, "#ffffff", style.VARIANT_COLOUR)
    shown = values[1:, :-1]
    style.draw_heat_map(
        axes, shown, shades, number="{:+.2f}".format, is_dark=lambda x: abs(x) > 0.75, fontsize=10, vmin=-1, vmax=1
    )
    axes.set_xticks(range(size - 1), [labels[name] for name in metrics[:-1]], rotation=25, ha="right")
    axes.set_yticks(range(size - 1), [labels[name] for name in metrics[1:]])
    n = sorted({c.n for c in by_pair.values()})
    counted = str(n[0]) if len(n) == 1 else f"{n[0]} to {n[-1]}"
    title = f"Rank correlations between metrics over {counted} variants"
    caption = "Spearman's rank correlation: 1 where two metrics order the variants alike, -1 where in reverse. "
    caption += "Intervals and p-values are in scoreboard.json."
    return style.Drawing(canvas, title, caption)


_ORDER = ("qkv", "o", "gate_up", "down", "experts")


def draw_layer_map(results: GroupsFound) -> style.Drawing | None:
    """Return the heat map of the groups in layers; None where no group is in a layer."""
    groups = [group for group in results.groups if group.layer is not None]
    if not groups:
        return None
    # Kinds of matrices in the order in which a layer computes them.
    firsts = {kind: kind.split("+")[0] for kind in dict.fromkeys(group.kind for group in groups)}
    kinds = sorted(firsts, key=lambda kind: _ORDER.index(firsts[kind]) if firsts[kind] in _ORDER else 99)
    layers = sorted({group.layer for group in groups if group.layer is not None})
    values = np.full((len(layers), len(kinds)), np.nan)
    for group in groups:
        values[layers.index(group.layer or 0), kinds.index(group.kind)] = group.kl.value
    canvas, axes = style.new_axes(min(14.0, 1.9 + 0.34 * len(layers)))
    positive = values[values > 0]
    lowest, highest = (float(positive.min()), float(positive.max())) if len(positive) else (1e-6, 1e-5)
    norm = LogNorm(lowest / 1.5, max(highest, lowest * 1.5))
    image = style.draw_heat_map(
        axes,
        values,
        ["#f2f7fb", "#7fb8d8", style.VARIANT_COLOUR, "#00304d"],
        number=(lambda value: f"{value:.2g}" if value else "0") if len(layers) <= _MOST_LAYERS else None,
        is_dark=lambda value: value > 0 and norm(value) > 0.55,
        norm=norm,
    )
    canvas.colorbar(image, ax=axes, label="KL, nats per token (logarithmic)", shrink=0.8)
    axes.set_xticks(range(len(kinds)), [style.plain_text(kind.replace("_", "/")) for kind in kinds])
    step = max(1, len(layers) // 40)
    axes.set_yticks(range(0, len(layers), step), [f"layer {layer}" for layer in layers[::step]])
    most = results.largest
    title = f"{most.name.replace('_', '/')} moves the model most: {most.kl.value:.2g} nats per token"
    outside = [group for group in results.groups if group.layer is None]
    caption = "Mean KL of the final distributions when only this group of weights is the variant's. An empty cell is a "
    caption += "group that does not differ."
    if outside:
        caption += " Outside of layers: " + ", ".join(f"{g.name} {g.kl.value:.2g}" for g in outside) + "."
    return style.Drawing(canvas, title, caption)
