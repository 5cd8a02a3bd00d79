"""How far a variant moved: by item, by position in the text, by margin and category, and where answers part."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.ticker import MaxNLocator

from mlflow_compress.metrics.greedy_answers import Forks, still_equal
from mlflow_compress.metrics.kl_by_position import ANSWER, REASONING
from mlflow_compress.metrics.margins import Binned
from mlflow_compress.metrics.stats.arrays import Float
from mlflow_compress.metrics.stats.significance import Flips
from mlflow_compress.records import MetricResult
from mlflow_compress.reporting.plots.style import (
    BETTER_COLOUR,
    GRID,
    INK,
    MUTED,
    OTHER_COLOUR,
    VARIANT_COLOUR,
    WORSE_COLOUR,
    Drawing,
    horizontal_grid,
    new_axes,
    new_canvas,
    plain_text,
)

_BINS_A_DECADE = 8
_FEWEST_BINS, _MOST_BINS = 12, 60


def _bins(positive: Float) -> Float:
    low, high = np.log10(positive.min()), np.log10(positive.max())
    if high - low < 0.1:
        low, high = low - 0.5, high + 0.5
    count = int(np.clip((high - low) * _BINS_A_DECADE, _FEWEST_BINS, _MOST_BINS))
    return np.asarray(np.logspace(low, high, count + 1))


def _mark(axes: Any, x: float, words: str, colour: str, *, side: str) -> None:
    axes.axvline(x, color=colour, linewidth=1.5)
    axes.annotate(
        f"{words} {x:.2g}",
        (x, 0.99),
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
    """Return the histogram of the KL in nats with mean and 95th percentile. Zeros have a bar of their own."""
    n, positive = len(kl), kl[kl > 0]
    zeros = n - len(positive)
    mean, p95 = float(np.mean(kl)), float(np.percentile(kl, 95))
    canvas = new_canvas(4.2 if len(positive) else 2.6)
    if not len(positive):
        axes = canvas.subplots()
        axes.barh([0], [n], color=VARIANT_COLOUR, height=0.5)
        axes.set(
            yticks=[0], yticklabels=["KL = 0"], xlim=(0, 1.02 * n), ylim=(-0.6, 0.6), xlabel=f"{unit}s".capitalize()
        )
        axes.tick_params(length=0)
        title = f"KL is exactly 0 for all {n:,} {unit}s"
    else:
        axes = _draw_positive(canvas, positive, zeros, unit)
        _mark(axes, mean, "mean", INK, side="right" if p95 >= mean else "left")
        if p95 > 0:
            _mark(axes, p95, "p95", WORSE_COLOUR, side="left" if p95 >= mean else "right")
        title = f"Half of the {unit}s have a KL below {np.median(kl):.2g}, one in twenty above {p95:.2g}"
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
    axes.hist(positive, bins=_bins(positive), color=VARIANT_COLOUR, alpha=0.75, edgecolor="white", linewidth=0.6)
    axes.set_xscale("log")
    axes.margins(x=0.02)
    axes.set_ylim(0, 1.12 * axes.get_ylim()[1])
    axes.set_xlabel(f"KL of the {unit}, nats")
    horizontal_grid(axes)
    axes.tick_params(axis="x", which="minor", length=0)
    return axes


def _draw_parts(
    axes: Any, whole: MetricResult, parts: Mapping[str, MetricResult], *, muted: Sequence[str] = ()
) -> None:
    """Draw one line per part: its value and interval, and on the right its number of tokens."""
    for y, (name, result) in enumerate(parts.items()):
        colour = MUTED if name in muted else VARIANT_COLOUR
        axes.plot([result.value], [y], "o", color=colour, markersize=5)
        if result.low is not None and result.high is not None:
            axes.plot([result.low, result.high], [y, y], color=colour, linewidth=1.6)
        place = {"xycoords": ("axes fraction", "data"), "va": "center"}
        axes.annotate(f"{result.n:,}", (1.02, y), **place, fontsize=8, color=MUTED)
    axes.axvline(whole.value, color=MUTED, linewidth=1.0, linestyle="--", label="all tokens")
    axes.set_yticks(range(len(parts)), list(parts))
    axes.set_ylim(len(parts) - 0.4, -0.6)
    axes.grid(axis="x", color=GRID, linewidth=0.8)
    axes.tick_params(length=0)


def _canvas_of_parts(
    whole: MetricResult, parts: Mapping[str, MetricResult], *, muted: Sequence[str] = (), **legend: Any
) -> Any:
    canvas, axes = new_axes(1.7 + 0.27 * len(parts))
    _draw_parts(axes, whole, parts, muted=muted)
    axes.legend(loc="lower right", **legend, frameon=False, fontsize=9)
    axes.set(xlim=(0, None), xlabel="KL, nats; figures on the right: tokens")
    return canvas


def _order(name: str) -> int:
    """Return the first token of a place, by its name: 4 of "tokens 4-7"."""
    return int(name.split()[-1].split("-")[0])


def draw_positions(whole: MetricResult, parts: Mapping[str, MetricResult]) -> Drawing:
    """Return the mean KL of each place in the answer with intervals, and of reasoning and answer where told apart."""
    places = sorted((name for name in parts if name not in (REASONING, ANSWER)), key=_order)
    names = [*places, *(name for name in (REASONING, ANSWER) if name in parts)]
    canvas = _canvas_of_parts(whole, {name: parts[name] for name in names}, muted=(REASONING, ANSWER))
    title = f"KL on text that the baseline wrote: {whole.value:.2g} nats per token"
    if len(places) > 1:
        first, last = (parts[place].value for place in (places[0], places[-1]))
        title += f", {first:.2g} at the first token and {last:.2g} at {places[-1]}"
    caption = (
        f"Mean KL(baseline ‖ variant) of {whole.n:,} tokens that the baseline has sampled itself, by place in the "
        f"answer, with {100 * whole.level:g} % intervals over prompts. A place without one has too few prompts."
    )
    return Drawing(canvas, title, caption)


def draw_contexts(whole: MetricResult, parts: Mapping[str, MetricResult]) -> Drawing:
    """Return the mean KL of a corpus by the number of tokens before, with intervals."""
    canvas = _canvas_of_parts(whole, parts, bbox_to_anchor=(1.0, 0.99))  # the legend is above all lines
    (begin, first), (end, last) = (list(parts.items())[at] for at in (0, -1))
    title = f"KL as the context grows: {first.value:.2g} nats at {begin}"
    if len(parts) > 1:
        title += f", {last.value:.2g} at {end}"
        ends = first.low, first.high, last.low, last.high
        if None not in ends and first.low <= last.high and last.low <= first.high:  # type: ignore[operator]
            title += " (not told apart)"
    caption = (
        f"Mean KL(baseline ‖ variant) of {whole.n:,} tokens of {whole.task}, by how many tokens of the text the models "
        f"have read before, with {100 * whole.level:g} % intervals over documents. One without has too few documents."
    )
    return Drawing(canvas, title, caption)


def _tokens(task: str) -> int:
    """Return the context length in a task's name: 4096 of "long_4k"."""
    length = task.rpartition("_")[2]
    return int(length.removesuffix("k")) * (1024 if length.endswith("k") else 1)


_MARKERS = "os^Dv"


def draw_depths(whole: MetricResult, slope: MetricResult | None, parts: Sequence[MetricResult]) -> Drawing:
    """Return the mean KL of text by its relative depth ("text 25-38 %"), a line per context length (task)."""
    canvas, axes = new_axes(4.2)
    tasks = sorted({str(part.task) for part in parts}, key=_tokens)
    top = 2.0 * max(part.value for part in parts)  # so that a wide interval does not flatten the lines
    for number, (task, shade) in enumerate(zip(tasks, np.linspace(0.35, 1.0, len(tasks)), strict=True)):
        by_begin = {}
        for part in parts:
            if part.task == task:
                low, high = map(float, str(part.category).split()[1].split("-"))
                by_begin[low] = ((low + high) / 2, part)
        x, mine = zip(*(by_begin[begin] for begin in sorted(by_begin)), strict=True)
        style = {"color": VARIANT_COLOUR, "alpha": shade, "marker": _MARKERS[number % len(_MARKERS)], "markersize": 4.5}
        axes.plot(x, [part.value for part in mine], linewidth=1.6, label=task.removeprefix("long_"), **style)
        for place, part in zip(x, mine, strict=True):
            if part.low is not None and part.high is not None:
                axes.plot([place, place], [part.low, part.high], color=VARIANT_COLOUR, alpha=shade * 0.5, linewidth=1.0)
    axes.legend(title="tokens", loc="upper left", bbox_to_anchor=(1.0, 1.0))
    axes.set(xlim=(0, 100), ylim=(0, top), xlabel="Depth in the context, %", ylabel="KL, nats")
    horizontal_grid(axes)
    title = f"KL in long contexts: {whole.value:.2g} nats"
    if slope is not None and slope.low is not None and slope.high is not None:
        known = "" if slope.low > 0 or slope.high < 0 else " (not told from 0)"
        title += f", {slope.value:+.2g} per 1,000 tokens of context{known}"
    cut = ", cut at the figure's edge" if any(part.high is not None and part.high > top for part in parts) else ""
    caption = (
        f"Mean KL(baseline ‖ variant) of text at {whole.n:,} places, by depth and length of the context, with "
        f"{100 * whole.level:g} % intervals over texts{cut}. A place without one has too few texts."
    )
    return Drawing(canvas, title, caption)


def _margin_finding(bins: Binned) -> str:
    changed = np.rint(bins.mean * bins.n)
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


def draw_margin(bins: Binned, wrong: Binned, *, level: float) -> Drawing:
    """Return the figure: per margin bin the share of changed answers with its interval, and of wrong answers."""
    canvas, axes = new_axes(4.2)
    centre, share = (bins.left + bins.right) / 2, 100 * bins.mean
    # Bounds of 0 or n events touch the share up to rounding; an error bar must not be negative.
    below, above = np.maximum(share - 100 * bins.low, 0), np.maximum(100 * bins.high - share, 0)
    axes.bar(centre, share, width=0.86 * (bins.right - bins.left), color=VARIANT_COLOUR, alpha=0.3, linewidth=0)
    axes.errorbar(
        centre, share, yerr=[below, above], fmt="o", color=VARIANT_COLOUR, markersize=5, elinewidth=1.6, capsize=0
    )
    axes.plot(centre, 100 * wrong.mean, color=MUTED, linewidth=1.4, marker=".", label="wrong answers of the baseline")
    axes.legend(loc="upper right", frameon=False, fontsize=9)
    for x, n in zip(centre, bins.n, strict=True):
        axes.annotate(
            f"{n:,}", (x, 0), xytext=(0, -5), textcoords="offset points", ha="center", va="top", fontsize=8, color=MUTED
        )
    axes.set(xlim=(0, 1), ylim=(0, max(5.0, 1.06 * 100 * float(max(bins.high.max(), wrong.mean.max())))))
    axes.set_xticks(np.linspace(0, 1, 11))
    axes.tick_params(axis="x", pad=13)
    axes.set_xlabel("Baseline's top margin: p(best option) - p(second best); small figures: items")
    axes.set_ylabel("Answers that changed (bars), %")
    horizontal_grid(axes)
    title = _margin_finding(bins)
    caption = (
        f"Share of the {int(bins.n.sum()):,} multiple-choice items whose answer changed, by how sure the baseline was; "
        f"{100 * level:g} % intervals. The line is the share that the baseline has wrong."
    )
    return Drawing(canvas, title, caption)


_MOST_WIDTHS = 4  # an axis ends at so many times the largest value


def draw_moved_parts(
    whole: MetricResult, positions: Sequence[MetricResult], classes: Sequence[MetricResult]
) -> Drawing | None:
    """Return the mean KL of each place in the text and of each class of tokens; None where there are none."""
    if not positions or not classes:
        return None
    canvas = new_canvas(1.9 + 0.27 * max(len(positions), len(classes)))
    heads = ("by position in the text", "by the predicted token")
    for axes, parts, head in zip(canvas.subplots(1, 2), (positions, classes), heads, strict=True):
        _draw_parts(axes, whole, {str(result.category): result for result in parts})
        # An interval from few texts may be far wider than all values: it is cut at the axis; the caption says so.
        widest = max([whole.value, *(result.value for result in parts)])
        ends = [result.high for result in parts if result.high is not None]
        axes.set(xlim=(0, 1.05 * min(max([widest, *ends]), _MOST_WIDTHS * widest)), xlabel="KL, nats")
        axes.set_title(head, fontsize=10, color=MUTED, loc="left")
    first, last = positions[0], positions[-1]
    title = f"KL {first.value:.2g} nats at {first.category} of the text, {last.value:.2g} at {last.category}"
    caption = f"Mean KL of {whole.n:,} tokens with {100 * whole.level:g} % intervals over whole texts; the line is the "
    caption += "mean of all tokens, the figures on the right count tokens. Rare tokens are in another class too. "
    caption += "Intervals that are much wider than all values are cut; a part without one is in too few texts."
    return Drawing(canvas, title, caption)


MOST = 24  # categories that are drawn
_LABEL_CHARACTERS = 34


def draw_categories(groups: Sequence[tuple[str, Flips]]) -> Drawing:
    """Return stacked bars of named groups, most changed first. At most `MOST` are shown, and the others are counted."""
    percents = [(name, f.n, [100 * k / f.n for k in (f.c2w, f.w2c, f.w2w or 0)]) for name, f in groups]
    ordered = sorted(((sum(parts), name, n, parts) for name, n, parts in percents), key=lambda bar: (-bar[0], bar[1]))
    shown, rest = ordered[:MOST], len(ordered) - MOST
    canvas, axes = new_axes(1.75 + 0.3 * len(shown))
    y, left = np.arange(len(shown)), np.zeros(len(shown))
    kinds = (("right → wrong", WORSE_COLOUR), ("wrong → right", BETTER_COLOUR), ("wrong → other wrong", OTHER_COLOUR))
    for (words, colour), width in zip(kinds, np.transpose([parts for *_, parts in shown]), strict=True):
        axes.barh(y, width, left=left, color=colour, height=0.66, label=words)
        left += width
    for row, (total, *_) in enumerate(shown):
        place = {"xytext": (5, 0), "textcoords": "offset points", "va": "center"}
        axes.annotate(f"{total:.1f} %", (total, row), **place, fontsize=9, color=INK)
    most = _LABEL_CHARACTERS
    labels = [(name if len(name) <= most else f"{name[: most - 1]}…", n) for _, name, n, _ in shown]
    axes.set_yticks(y, [plain_text(f"{label}  ({n:,})") for label, n in labels])
    axes.tick_params(axis="y", labelcolor=INK, length=0)
    axes.tick_params(axis="x", length=0)
    axes.spines["left"].set_visible(False)
    axes.set(xlim=(0, max(5.0, 1.12 * ordered[0][0])), xlabel="Items whose answer changed, %")
    axes.set_ylim(len(shown) - 0.45, -0.55)
    axes.grid(axis="x", color=GRID, linewidth=0.8)
    if ordered[0][0] > 0:
        canvas.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=3, handlelength=1.1)
    (most_changed, worst, *_), (least_changed, best, *_) = ordered[0], ordered[-1]
    if most_changed == 0:
        title = f"No answer changed in {f'any of the {len(ordered)} groups' if len(ordered) > 1 else worst}"
    elif len(ordered) == 1:
        title = f"{most_changed:.1f} % of the answers in {worst} changed"
    else:
        title = f"Answers changed most in {worst} ({most_changed:.1f} %), least in {best} ({least_changed:.1f} %)"
    caption = "Changed answers by category in percent of its items (their number in brackets), most changed first"
    return Drawing(canvas, title, f"{caption}; {rest} further categories are not drawn." if rest > 0 else f"{caption}.")


def draw_answers_part(answers: Forks, *, level: float) -> Drawing:
    """Return the share of answers that are still the same after so many tokens, with its interval."""
    curve = still_equal(answers, level=level)
    n, n_same = len(answers.time), int((~answers.differs).sum())
    canvas, axes = new_axes(4.2)
    times = np.concatenate([[0], curve.times, [answers.time.max()]])
    share, low, high = (
        np.concatenate([[100.0], 100 * values, 100 * values[-1:] if len(values) else [100.0]])
        for values in (curve.share, curve.low, curve.high)
    )
    axes.fill_between(times, low, high, step="post", color=VARIANT_COLOUR, alpha=0.18, linewidth=0)
    axes.step(times, share, where="post", color=VARIANT_COLOUR, linewidth=1.8)
    ended = answers.time[~answers.differs]
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
    title = f"{n_same:,} of {n:,} greedy answers are the same to the end"
    if curve.median is not None:
        title = f"Half of the greedy answers have diverged by token {curve.median:.0f}; {title}"
    caption = (
        f"Greedy answers of both models to {n:,} prompts, compared token by token: those without a divergent "
        f"token (arXiv 2311.01544) so far, with its {100 * level:g} % interval. An answer that is the same to its "
        "end stays the same."
    )
    return Drawing(canvas, title, caption)
