"""Answer order on a sample of items that were scored in every order of their options: 24 for four."""

from dataclasses import dataclass

import numpy as np
from scipy.special import factorial

from mlflow_compress.errors import AlignmentError
from mlflow_compress.metrics.core import estimates
from mlflow_compress.metrics.core.item_table import ItemTable, predict
from mlflow_compress.metrics.core.metric_inputs import MetricInputs
from mlflow_compress.metrics.core.metric_registry import Direction, keys_of, metric
from mlflow_compress.metrics.core.requirements import ITEMS, OPTION_SCORES, family
from mlflow_compress.metrics.order import bias_of, gold_letters, letter_excess
from mlflow_compress.metrics.stats.arrays import Bool, Float, Int
from mlflow_compress.metrics.stats.bootstrap import difference_of
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


_key = keys_of("robustness", unit="share", high=1.0)
_MEANINGS: tuple[tuple[str, Direction, str], ...] = (
    ("orders_accuracy", "higher", "expected accuracy, the mean over all answer orders"),
    ("orders_robust_accuracy", "higher", "share of items that are right in every answer order"),
    ("orders_agreement", "higher", "chance that two different answer orders give the same content"),
    ("orders_position_bias", "lower", "distance of the chosen letters from the uniform distribution, over all orders"),
)
_KEYS = {
    key.name.removeprefix("robustness/"): key
    for name, direction, meaning in _MEANINGS
    for key in (
        _key(name, direction, f"The {meaning}."),
        _key(f"{name}_baseline", "neither", f"The baseline's {meaning}."),
        _key(f"{name}_delta", direction, f"Variant minus baseline {meaning}; paired.", low=-1.0),
    )
}


@metric(
    "all_orders",
    keys=tuple(_KEYS.values()),
    requires=(ITEMS, OPTION_SCORES, family(FAMILY)),
    source="Ours, after Changing Answer Order Can Decrease MMLU Accuracy, whose metric takes two orders of the 24",
)
def all_orders(inputs: MetricInputs) -> list[MetricResult]:
    """Every order of the sampled items, pooled and by task; an item that lacks an order in either model is left out.

    Means have bootstrap intervals over items, or groups of them; the robust accuracy Wilson's and Tango's. A position
    bias is a distance, which resampling overestimates: it has no interval of its own, its paired difference has.
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
            left = len(subset.rows) - len(rows)
            results += estimates.of_subset(inputs, subset, _estimates(models, rows, view.group[rows]), n_unscored=left)
    return results


def _estimates(models: dict[str, _Orders], rows: Int, groups: Int) -> estimates.Estimates:
    found: dict[str, estimates.Estimate] = {}
    for suffix, model in models.items():
        found[f"orders_robust_accuracy{suffix}"] = estimates.Proportion.of(model.always[rows], groups)
        found[f"orders_accuracy{suffix}"] = estimates.Mean(model.right[rows], groups=groups)
        found[f"orders_agreement{suffix}"] = estimates.Mean(model.same[rows], groups=groups)
        bias = float(bias_of(model.excess[rows].mean(axis=0)))
        found[f"orders_position_bias{suffix}"] = estimates.Number(bias, len(rows))
    if "_baseline" in models:
        b, q = models["_baseline"], models[""]
        found["orders_robust_accuracy_delta"] = estimates.PairedDifference.of(b.always[rows], q.always[rows], groups)
        found["orders_accuracy_delta"] = estimates.Mean((q.right - b.right)[rows], groups=groups)
        found["orders_agreement_delta"] = estimates.Mean((q.same - b.same)[rows], groups=groups)
        excess = np.hstack([b.excess[rows], q.excess[rows]])
        found["orders_position_bias_delta"] = estimates.Resampled(excess, difference_of(bias_of), groups=groups)
    return {_KEYS[name]: estimate for name, estimate in found.items()}
