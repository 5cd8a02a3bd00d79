"""Draws all figures of a report as PNG files."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib

from mlflow_compress.decide.scoreboard import Scoreboard
from mlflow_compress.metrics.conscompf import ModelSimilarity
from mlflow_compress.metrics.core.metric_inputs import MetricInputs, headline
from mlflow_compress.metrics.core.requirements import GREEDY_ANSWERS, ITEMS, OPTION_DISTANCES, VARIANT
from mlflow_compress.metrics.diagnosis import GroupsFound
from mlflow_compress.metrics.greedy_answers import forks
from mlflow_compress.metrics.kl_by_position import TRACES_KL
from mlflow_compress.metrics.long_context import LONG_KL, SLOPE
from mlflow_compress.metrics.perplexity import CORPUS_KL
from mlflow_compress.records import MetricResult
from mlflow_compress.reporting import details
from mlflow_compress.reporting.html import Figure
from mlflow_compress.reporting.plots import distances
from mlflow_compress.reporting.plots import variants as plots
from mlflow_compress.reporting.plots.style import RC, Drawing, state

_A_CHOICE = 2  # variants; the figures of one would show nothing that its table does not


def _margin(inputs: MetricInputs) -> Drawing | None:
    shares = details.answers_by_margin(inputs)
    return None if shares is None else distances.draw_margin(*shares, level=inputs.settings.level)


def _divergence(inputs: MetricInputs) -> Drawing | None:
    if inputs.missing(ITEMS, OPTION_DISTANCES) is None:
        kl = details.kl_values(inputs)
        if len(kl):
            return distances.draw_divergence(kl, unit="item")
    kl = details.token_kl_values(inputs)
    return distances.draw_divergence(kl, unit="corpus token") if len(kl) else None


def _categories(inputs: MetricInputs) -> Drawing | None:
    """Draw the flips per category; of a task without categories, those of the task."""
    parts = details.flips_by_category(inputs)
    several = len({task for task, category in parts if category is not None}) > 1
    groups = [
        (task if category is None else f"{task}: {category}" if several else category, flips)
        for (task, category), flips in parts.items()
    ]
    return distances.draw_categories(groups) if groups else None


def _answers_part(judged: MetricInputs | None) -> Drawing | None:
    if judged is None or judged.missing(VARIANT, GREEDY_ANSWERS) is not None:
        return None
    return distances.draw_answers_part(forks(judged), level=judged.settings.level)


def _positions(results: Sequence[MetricResult]) -> Drawing | None:
    places = {result.category: result for result in results if result.name == TRACES_KL.name}
    parts = {category: result for category, result in places.items() if category is not None}
    return distances.draw_positions(places[None], parts) if parts else None


def _depths(results: Sequence[MetricResult]) -> Drawing | None:
    depths = [result for result in results if result.name == LONG_KL.name]
    parts = [result for result in depths if result.category is not None]
    if not any(part.value for part in parts):  # none, or equal models
        return None
    whole = next(result for result in depths if result.task is None)
    slope = next((result for result in results if result.name == SLOPE.name and result.task is None), None)
    return distances.draw_depths(whole, slope, parts)


def _contexts(results: Sequence[MetricResult]) -> Drawing | None:
    """Draw the KL of the corpus with most tokens by the number of tokens before."""
    ranges = [result for result in results if result.name == CORPUS_KL.name and result.category is not None]
    if not any(part.value for part in ranges):  # none, or equal models
        return None
    wholes = [result for result in results if result.name == CORPUS_KL.name and result.category is None and result.task]
    whole = max(wholes, key=lambda result: result.n)
    return distances.draw_contexts(whole, {str(part.category): part for part in ranges if part.task == whole.task})


@matplotlib.rc_context(RC)
def draw_all(
    inputs: MetricInputs,
    results: Sequence[MetricResult],
    variants: Sequence[Mapping[str, Any]],
    current: str,
    folder: Path,
    judged: MetricInputs | None = None,
) -> list[Figure]:
    """Draw every figure that has data, in reading order; `variants` are as `draw_variants` takes them."""
    drawings = {
        "size_against_kl": plots.draw_variants(variants, current),
        "speed_against_kl": plots.draw_variants(variants, current, costs=(plots.SPEED_AXIS,), fewest=_A_CHOICE),
        "memory_against_kl": plots.draw_variants(variants, current, costs=(plots.MEMORY_AXIS,), fewest=_A_CHOICE),
        "kl_by_item": _divergence(inputs),
        "change_by_margin": _margin(inputs),
        "flips_by_category": _categories(inputs),
        "baseline_and_variant": plots.draw_pairs(headline(results), level=inputs.settings.level),
        "answers_part": _answers_part(judged),
        "kl_by_position": _positions(results),
        "kl_by_context": _contexts(results),
        "kl_by_depth": _depths(results),
    }
    return _saved(drawings, folder)


@matplotlib.rc_context(RC)
def draw_scoreboard(board: Scoreboard, folder: Path) -> list[Figure]:
    """Draw the figures of a scoreboard that have data: the Pareto fronts, and the correlations between metrics."""
    points = [
        {
            "name": row.name,
            **{
                f"{key}{end}": getattr(cell, part)
                for key, cell in row.cells.items()
                for end, part in (("", "value"), ("_low", "low"), ("_high", "high"))
            },
        }
        for row in board.finished
    ]
    costs = {"speed": plots.SPEED_AXIS, "memory": plots.MEMORY_AXIS, "tokens": plots.TOKENS_AXIS}
    drawings = {
        "pareto_front": plots.draw_variants(points, None, front=board.pareto),
        **{
            f"pareto_front_{name}": plots.draw_variants(
                points, None, front=board.serving_fronts.get(axis.field, ()), costs=(axis,), fewest=_A_CHOICE
            )
            for name, axis in costs.items()
        },
        "correlations": plots.draw_correlations(board),
    }
    return _saved(drawings, folder)


@matplotlib.rc_context(RC)
def draw_diagnosis(
    results: GroupsFound, positions: Sequence[MetricResult], classes: Sequence[MetricResult], folder: Path
) -> list[Figure]:
    """Draw where a variant moves: the map of layers and kinds of matrices, and the parts of the text."""
    drawings = {
        "layer_map": plots.draw_layer_map(results),
        "moved_parts": distances.draw_moved_parts(results.whole, positions, classes),
    }
    return _saved(drawings, folder)


@matplotlib.rc_context(RC)
def draw_similarity(similarity: ModelSimilarity, folder: Path) -> list[Figure]:
    """Draw the similarity of all models' answers: the matrix, and the models on its principal components."""
    return _saved(
        {"answer_similarity": plots.draw_matrix(similarity), "answer_map": plots.draw_map(similarity)}, folder
    )


@matplotlib.rc_context(RC)
def draw_search(rows: Sequence[Mapping[str, Any]], folder: Path, *, gate: float | None) -> list[Figure]:
    """Draw the figure of a search: the rows of `results.Search` by size and KL, with the gate's line."""
    return _saved({"budget_front": plots.draw_budget_front(rows, gate=gate)}, folder)


def _saved(drawings: Mapping[str, Drawing | None], folder: Path) -> list[Figure]:
    """Write every drawing as a PNG file into a folder, which is created if it does not exist."""
    folder.mkdir(parents=True, exist_ok=True)
    figures = []
    for name, drawing in drawings.items():
        if drawing is not None:
            path = folder / f"{name}.png"
            state(drawing.canvas, drawing.title)
            drawing.canvas.savefig(path)
            figures.append(Figure(path, drawing.title, drawing.caption))
    return figures
