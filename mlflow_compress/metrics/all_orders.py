"""Answer order on a sample of items that were scored in every order of their options: 24 for four."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from scipy.special import factorial

from mlflow_compress.errors import AlignmentError
from mlflow_compress.metrics.core.item_table import ItemSubset, ItemTable, predict
from mlflow_compress.metrics.core.metric_inputs import MetricInputs
from mlflow_compress.metrics.core.metric_registry import METRICS, Direction, MetricKey, metric
from mlflow_compress.metrics.core.requirements import ITEMS, OPTION_SCORES, family
from mlflow_compress.metrics.order import bias_difference, bias_of, gold_letters, letter_excess
from mlflow_compress.metrics.stats.arrays import Bool, Float, Int
from mlflow_compress.metrics.stats.bootstrap import Statistic, first_column
from mlflow_compress.metrics.stats.intervals import paired_difference, wilson
from mlflow_compress.records import MetricResult, RunRecords

FAMILY = "lettered_orders"


def agreement(content: Int, shown: Bool) -> Float:
    """Return, for each item, how often two different orders make the model choose the same content, in [0, 1].

    ``sum_c n_c (n_c - 1) / (m (m - 1))`` with `n_c` the orders in which content `c` is chosen, of `m`. 1 for a model
    that looks at contents only; 5/23 for one that says "A" to four options whatever they are. Unlike
    `content_consistency` it holds no order above the others.

    - `content` (n, m): Original index of the chosen content.
    - `shown` (n, m): Orders that the item has; at least two an item.
    """
    m = shown.sum(axis=1)
    counts = np.stack([((content == c) & shown).sum(axis=1) for c in range(int(content.max()) + 1)], axis=1)
    return np.asarray((counts * (counts - 1)).sum(axis=1) / np.maximum(m * (m - 1), 1), dtype=np.float64)


@dataclass(frozen=True)
class _Orders:
    """One model on every order; row `i` is item `i`, and only rows that are `complete` mean anything."""

    complete: Bool  # Scored in all orders; shape (n,)
    content: Int  # The orders: original index of what is shown at each position; shape (n, m, n_options)
    right: Float  # Share of orders in which the model is right, and `agreement`; shape (n,)
    same: Float
    always: Bool  # Right in every order; shape (n,)
    excess: Float  # `letter_excess`; shape (n, n_options)


def _measure(view: ItemTable, run: RunRecords) -> _Orders:
    assert run.option_scores is not None  # `requires` has been checked
    scores = run.option_scores.where(task=sorted(set(view.task)))
    found, grid = predict(view, RunRecords(option_scores=scores))
    assert grid is not None
    wanted = factorial(view.n_options).astype(np.int64)
    shown = np.arange(found.scored.shape[1]) < wanted[:, None]
    return _Orders(
        complete=(found.scored & shown).sum(axis=1) == wanted,
        content=grid.content,
        right=(found.correct & shown).sum(axis=1) / shown.sum(axis=1),
        same=agreement(found.content, shown),
        always=np.asarray((found.correct | ~shown).all(axis=1), dtype=bool),
        excess=letter_excess(found.letter, gold_letters(grid, view.gold), grid.content.shape[2], shown),
    )


def _key(name: str, direction: Direction, meaning: str, low: float = 0.0) -> MetricKey:
    return MetricKey(name=f"robustness/{name}", direction=direction, low=low, high=1.0, unit="share", meaning=meaning)


_MEANINGS: tuple[tuple[str, Direction, str], ...] = (
    ("orders_accuracy", "higher", "expected accuracy, the mean over all answer orders"),
    ("orders_robust_accuracy", "higher", "share of items that are right in every answer order"),
    ("orders_agreement", "higher", "chance that two different answer orders give the same content"),
    ("orders_position_bias", "lower", "distance of the chosen letters from the uniform distribution, over all orders"),
)


@METRICS.register("all_orders")
@metric(
    keys=tuple(
        key
        for name, direction, meaning in _MEANINGS
        for key in (
            _key(name, direction, f"The {meaning}."),
            _key(f"{name}_baseline", "neither", f"The baseline's {meaning}."),
            _key(f"{name}_delta", direction, f"Variant minus baseline {meaning}; paired.", low=-1.0),
        )
    ),
    requires=(ITEMS, OPTION_SCORES, family(FAMILY)),
    source="Ours, after Changing Answer Order Can Decrease MMLU Accuracy, whose metric takes two orders of the 24",
)
def all_orders(inputs: MetricInputs) -> list[MetricResult]:
    """Every order of the sampled items, pooled and by task; an item that lacks an order in either model is left out.

    Means have bootstrap intervals over items, the robust accuracy Wilson's and Tango's. A position bias is a distance,
    which resampling overestimates: it has no interval of its own, its paired difference has.
    """
    items = inputs.baseline.items
    assert items is not None
    view = ItemTable(items.where(family=FAMILY))
    models = {"": _measure(view, inputs.subject)}
    if inputs.variant is not None:
        models["_baseline"] = _measure(view, inputs.baseline)
    complete = np.logical_and.reduce([model.complete for model in models.values()])
    if len({model.content[complete].tobytes() for model in models.values()}) > 1:
        raise AlignmentError("Baseline and variant saw different answer orders", fix="Evaluate both on the same tasks")
    results: list[MetricResult] = []
    for subset in view.subsets((FAMILY,), pooled=(FAMILY,), categories=()):
        rows = subset.rows[complete[subset.rows]]
        if len(rows) and not (inputs.settings.pooled_only and subset.task):
            results += _report(inputs, subset, models, rows)
    return results


def _report(inputs: MetricInputs, subset: ItemSubset, models: dict[str, _Orders], rows: Int) -> Iterator[MetricResult]:
    s, n = inputs.settings, len(rows)

    def result(name: str, value: float, interval: tuple[float, float] | None) -> MetricResult:
        left = len(subset.rows) - n
        return subset.result(f"robustness/{name}", value, interval, n=n, level=s.level, n_unscored=left)

    def drawn(columns: Float, statistic: Statistic = first_column) -> tuple[float, float] | None:
        return s.interval(columns, statistic)

    for suffix, model in models.items():
        robust = int(model.always[rows].sum())
        yield result(f"orders_robust_accuracy{suffix}", robust / n, wilson(robust, n, level=s.level))
        for name, values in (("orders_accuracy", model.right[rows]), ("orders_agreement", model.same[rows])):
            yield result(f"{name}{suffix}", float(values.mean()), drawn(values))
        yield result(f"orders_position_bias{suffix}", float(bias_of(model.excess[rows].mean(axis=0))), None)
    if "_baseline" not in models:
        return
    b, q = models["_baseline"], models[""]
    gained, lost = int((~b.always & q.always)[rows].sum()), int((b.always & ~q.always)[rows].sum())
    tango = paired_difference(gained, lost, n, level=s.level)
    yield result("orders_robust_accuracy_delta", (gained - lost) / n, tango)
    for name, change in (("orders_accuracy", (q.right - b.right)[rows]), ("orders_agreement", (q.same - b.same)[rows])):
        yield result(f"{name}_delta", float(change.mean()), drawn(change))
    excess = np.hstack([b.excess[rows], q.excess[rows]])
    moved = float(bias_difference(excess.mean(axis=0)))
    yield result("orders_position_bias_delta", moved, drawn(excess, bias_difference))
