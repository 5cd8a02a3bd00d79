"""KL on the baseline's own text by place in the answer: does the distance grow with the length?"""

from __future__ import annotations

from collections.abc import Mapping

from mlflow_compress.metrics.kl_by_position import ANSWER, REASONING
from mlflow_compress.records import MetricResult
from mlflow_compress.reporting.plots.style import MUTED, VARIANT, Drawing, horizontal_grid, new_canvas, state


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
    canvas = new_canvas(4.2)
    axes = canvas.subplots()
    for x, name in enumerate(names):
        result = parts[name]
        colour = VARIANT if name in places else MUTED
        axes.plot([x], [result.value], "o", color=colour, markersize=6)
        if result.low is not None and result.high is not None:
            axes.plot([x, x], [result.low, result.high], color=colour, linewidth=1.6)
        axes.annotate(
            f"{result.n:,}", (x, 0), xytext=(0, -26), textcoords="offset points", ha="center", fontsize=8, color=MUTED
        )
    axes.axhline(whole.value, color=MUTED, linewidth=1.0, linestyle="--", label="all tokens")
    axes.legend(loc="upper right", frameon=False, fontsize=9)
    axes.set_xticks(range(len(names)), [name.removeprefix("tokens ").removeprefix("token ") for name in names])
    axes.set_ylim(bottom=0)
    axes.set_xlabel("Place of the token in the answer; small figures: tokens", labelpad=18)
    axes.set_ylabel("KL, nats")
    horizontal_grid(axes)
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
