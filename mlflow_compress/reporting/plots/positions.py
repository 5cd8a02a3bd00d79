"""KL on the baseline's own text by place in the answer: does the distance grow with the length?"""

from __future__ import annotations

from collections.abc import Mapping

from mlflow_compress.metrics.kl_by_position import ANSWER, REASONING
from mlflow_compress.records import MetricResult
from mlflow_compress.reporting.plots.style import GRID, MUTED, VARIANT, Drawing, new_canvas, state


def _order(name: str) -> int:
    """Return the first token of a place, by its name: 4 of "tokens 4-7"."""
    return int(name.split()[-1].split("-")[0])


def draw_positions(whole: MetricResult, parts: Mapping[str, MetricResult]) -> Drawing:
    """Return the mean KL of each place in the answer with intervals, and of reasoning and answer where told apart.

    Parameters
    ----------
    whole : MetricResult
        "distance/traces_kl" over all tokens.
    parts : mapping of str to MetricResult
        The same by category.
    """
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
