"""Robustness against the order of answers: two shuffles, consistency over content, position bias, and every order."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from scipy.special import factorial

from mlflow_compress.errors import AlignmentError, DataError
from mlflow_compress.metrics.core.estimates import (
    Estimate,
    Estimates,
    Mean,
    Number,
    PairedDifference,
    Proportion,
    Resampled,
    by_subset,
    of_subset,
)
from mlflow_compress.metrics.core.item_table import ItemTable, OptionGrid, Predictions, predict
from mlflow_compress.metrics.core.metric_inputs import MetricInputs, MetricSettings
from mlflow_compress.metrics.core.metric_registry import Direction, keys_of, metric
from mlflow_compress.metrics.core.requirements import ITEMS, OPTION_SCORES, SHUFFLES, family
from mlflow_compress.metrics.stats.arrays import Bool, Float, Int
from mlflow_compress.metrics.stats.bootstrap import difference_of
from mlflow_compress.records import MetricResult, RunRecords


def drop_pct(accuracy: npt.ArrayLike, metric_value: npt.ArrayLike) -> Float:
    """``100 (Acc - M)/Acc``; not finite where the accuracy is 0, for which no drop exists."""
    acc, m = np.asarray(accuracy, dtype=np.float64), np.asarray(metric_value, dtype=np.float64)
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.asarray(100.0 * (acc - m) / acc, dtype=np.float64)


def content_consistency(content: npt.ArrayLike) -> Float:
    """Return, for each item, the share of shuffles in which the content chosen in the original order is chosen again.

    - `content` (n, 1 + S): Original index of the chosen content; column 0 is the original order.
    """
    c = np.asarray(content)
    if c.ndim != 2 or c.shape[1] < 2:
        raise DataError("Consistency needs the original order and at least one shuffle", got=f"shape {c.shape}")
    return np.asarray((c[:, 1:] == c[:, :1]).mean(axis=1), dtype=np.float64)


def letter_excess(letter: npt.ArrayLike, gold_letter: npt.ArrayLike, n_letters: int, shown: npt.ArrayLike) -> Float:
    """Return, for each item, how much more often a letter is chosen than right: what `bias_of` takes.

    - `letter`, `gold_letter` (n, m): Chosen and right shown position in each order.
    - `shown` (n, m): Orders that the item has.

    Returns shape (n, n_letters): ``share of the item's orders that choose l - share in which l is right``, each row
    summing to 0.
    """
    chosen, gold, there = np.asarray(letter), np.asarray(gold_letter), np.asarray(shown, dtype=bool)
    columns = [(((chosen == x) & there).sum(axis=1) - ((gold == x) & there).sum(axis=1)) for x in range(n_letters)]
    return np.asarray(np.column_stack(columns) / there.sum(axis=1, keepdims=True), dtype=np.float64)


def bias_of(means: Float) -> Float:
    """Return the position bias from means of `letter_excess` over items: ``sum_l |mean_l| / 2``, in [0, 1].

    Total variation between the distributions of chosen and of right letters: 0 for a model that is always right; a
    model that always says "A" on balanced four-option items has 0.75.
    """
    return np.asarray(np.abs(means).sum(axis=-1) / 2.0, dtype=np.float64)


def _gold_letters(grid: OptionGrid, gold: npt.ArrayLike) -> Int:
    """Return the shown position of the right content, shape (n_items, n_permutations)."""
    shown = (grid.content == np.asarray(gold)[:, None, None]) & np.isfinite(grid.loglik)
    return np.asarray(shown.argmax(axis=-1), dtype=np.int64)


def _drop(means: Float) -> Float:
    return drop_pct(means[..., 0], means[..., 1])


def drop_of(columns: Float, groups: Int, settings: MetricSettings) -> Number:
    """Return the drop as what it is a mean of: the shuffles, of the items that are right at first, that are wrong.

    - `columns` (n, 2): Whether an item is right in the original order, and the share of its shuffles where it is.
    """
    right = columns[:, 0] > 0
    lost = Mean(100.0 * (1.0 - columns[right, 1]), groups=groups[right], bounds=(0.0, 100.0))
    value, interval = lost.at(settings, 1.0)
    return Number(value, len(columns), interval=interval)


def drop_change(before: Float, after: Float, groups: Int) -> Resampled:
    """Return the paired difference of two models' drops, from the columns of `drop_of`."""
    return Resampled(np.hstack([before, after]), difference_of(_drop), groups=groups, jackknife=True)


def _columns(predictions: Predictions, rows: Int, used: int) -> Float:
    right = predictions.correct[rows, :used]
    return np.column_stack([right[:, 0], (right[:, :1] & right[:, 1:]).mean(axis=1)])


_drop_key = keys_of("robustness", unit="percent", high=100.0)
_share_key = keys_of("robustness", unit="share", high=1.0)
_KEYS = (
    _share_key("shuffle_accuracy", "higher", "Items that are right both in the original order and in a shuffled one."),
    _drop_key(
        "shuffle_drop_pct",
        "lower",
        "Relative loss of accuracy under shuffled answers.",
        label="Lost under shuffled answers",
        headline=90,
        leaderboard=True,
        difference="robustness/shuffle_drop_delta_pct",
    ),
    _drop_key("shuffle_drop_pct_baseline", "neither", "The baseline's loss.", by_category=False),
    _drop_key("shuffle_drop_delta_pct", "lower", "Variant minus baseline drop, paired.", low=-100.0, by_category=False),
    *(
        _share_key(name, direction, meaning, low=-1.0 if name.endswith("_delta") else 0.0, by_category=False)
        for name, direction, meaning in (
            ("content_consistency", "higher", "Share of shuffles in which the same content is chosen."),
            ("content_consistency_baseline", "neither", "The baseline's consistency."),
            ("content_consistency_delta", "higher", "Variant minus baseline consistency, paired."),
            ("position_bias", "lower", "Distance of chosen from gold letters, over all orders."),
            ("position_bias_baseline", "neither", "The baseline's position bias."),
            ("position_bias_delta", "lower", "Variant minus baseline position bias, paired."),
        )
    ),
)


@metric(
    "answer_order",
    keys=_KEYS,
    requires=(ITEMS, OPTION_SCORES, family("lettered"), SHUFFLES),
    source="Changing Answer Order Can Decrease MMLU Accuracy; consistency and position bias are ours",
)
def answer_order(inputs: MetricInputs) -> list[MetricResult]:
    """``M`` and ``100 (Acc - M)/Acc`` over lettered items scored under every order.

    The change of the drop has the jackknife's interval, that of the position bias the bootstrap's, over items. The
    accuracy in the drop is that of the same items. The drop is not returned where it does not exist (accuracy 0).
    """
    models = {"": inputs.subject_predictions}
    if inputs.variant is not None:
        models["_baseline"] = inputs.baseline_predictions
    used = min(p.scored.shape[1] for p in models.values())
    golds = _gold_letters(inputs.grid("baseline"), inputs.view.gold)

    def estimates(rows: Int) -> Estimates:
        letters, every = int(inputs.view.n_options[rows].max()), np.ones((len(rows), used), dtype=bool)
        right = {suffix: _columns(p, rows, used) for suffix, p in models.items()}
        same = {suffix: content_consistency(p.content[rows, :used]) for suffix, p in models.items()}
        excess = {
            suffix: letter_excess(p.letter[rows, :used], golds[rows, :used], letters, every)
            for suffix, p in models.items()
        }
        groups = inputs.view.group[rows]
        found: dict[str, Estimate] = {"shuffle_accuracy": Mean(right[""][:, 1], groups=groups)}
        for suffix in models:
            if right[suffix][:, 0].any():  # no drop exists where the accuracy is 0
                found[f"shuffle_drop_pct{suffix}"] = drop_of(right[suffix], groups, inputs.settings)
            found[f"content_consistency{suffix}"] = Mean(same[suffix], groups=groups)
            # A bias is a distance, which resampling overestimates: no interval.
            bias = float(bias_of(excess[suffix].mean(axis=0)))
            found[f"position_bias{suffix}"] = Number(bias, len(rows))
        if "_baseline" in models:
            if all(columns[:, 0].any() for columns in right.values()):
                found["shuffle_drop_delta_pct"] = drop_change(right["_baseline"], right[""], groups)
            found["content_consistency_delta"] = Mean(same[""] - same["_baseline"], groups=groups)
            both = np.hstack([excess["_baseline"], excess[""]])
            found["position_bias_delta"] = Resampled(both, difference_of(bias_of), groups=groups)
        keys = {key.name.removeprefix("robustness/"): key for key in _KEYS}
        return {keys[name]: estimate for name, estimate in found.items()}

    scored = np.logical_and.reduce([p.scored[:, :used].all(axis=1) for p in models.values()])
    return by_subset(inputs, estimates, scored=scored, families=("lettered",))


LETTERED_ORDERS = "lettered_orders"


def _agreement(content: Int, shown: Bool) -> Float:
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
    right: Float  # Share of orders in which the model is right, and `_agreement`; shape (n,)
    same: Float
    always: Bool  # Right in every order; shape (n,)
    excess: Float  # `letter_excess`; shape (n, n_options)


def _measure(view: ItemTable, run: RunRecords) -> _Orders:
    assert run.option_scores is not None  # `requires` has been checked
    scores = run.option_scores.where(task=sorted(set(view.task)))
    predictions, grid = predict(view, RunRecords(option_scores=scores))
    assert grid is not None
    wanted = factorial(view.n_options).astype(np.int64)
    shown = np.arange(predictions.scored.shape[1]) < wanted[:, None]
    return _Orders(
        complete=(predictions.scored & shown).sum(axis=1) == wanted,
        content=grid.content,
        right=(predictions.correct & shown).sum(axis=1) / shown.sum(axis=1),
        same=_agreement(predictions.content, shown),
        always=np.asarray((predictions.correct | ~shown).all(axis=1), dtype=bool),
        excess=letter_excess(predictions.letter, _gold_letters(grid, view.gold), grid.content.shape[2], shown),
    )


_MEANINGS: tuple[tuple[str, Direction, str], ...] = (
    ("orders_accuracy", "higher", "expected accuracy, the mean over all answer orders"),
    ("orders_robust_accuracy", "higher", "share of items that are right in every answer order"),
    ("orders_agreement", "higher", "chance that two different answer orders give the same content"),
    ("orders_position_bias", "lower", "distance of the chosen letters from the uniform distribution, over all orders"),
)
_EVERY_ORDER = {
    key.name.removeprefix("robustness/"): key
    for name, direction, meaning in _MEANINGS
    for key in (
        _share_key(name, direction, f"The {meaning}."),
        _share_key(f"{name}_baseline", "neither", f"The baseline's {meaning}."),
        _share_key(f"{name}_delta", direction, f"Variant minus baseline {meaning}; paired.", low=-1.0),
    )
}


@metric(
    "all_orders",
    keys=tuple(_EVERY_ORDER.values()),
    requires=(ITEMS, OPTION_SCORES, family(LETTERED_ORDERS)),
    source="Ours, after Changing Answer Order Can Decrease MMLU Accuracy, whose metric takes two orders of the 24",
)
def all_orders(inputs: MetricInputs) -> list[MetricResult]:
    """Every order of the sampled items, pooled and by task; an item that lacks an order in either model is left out.

    Means have bootstrap intervals over items, or groups of them; the robust accuracy that of a share and Tango's. A
    position bias is a distance, which resampling overestimates: it has no interval of its own, its paired difference
    has.
    """
    items = inputs.baseline.items
    assert items is not None
    view = ItemTable(items.where(family=LETTERED_ORDERS))
    models = {"": _measure(view, inputs.subject)}
    if inputs.variant is not None:
        models["_baseline"] = _measure(view, inputs.baseline)
    complete = np.logical_and.reduce([model.complete for model in models.values()])
    if len({model.content[complete].tobytes() for model in models.values()}) > 1:
        raise AlignmentError("Baseline and variant saw different answer orders", fix="Evaluate both on the same tasks")
    results: list[MetricResult] = []
    for subset in view.subsets((LETTERED_ORDERS,), pooled=(LETTERED_ORDERS,), categories=()):
        rows = subset.rows[complete[subset.rows]]
        if len(rows) and not (inputs.settings.pooled_only and subset.task):
            left = len(subset.rows) - len(rows)
            results += of_subset(inputs, subset, _estimates(models, rows, view.group[rows]), n_unscored=left)
    return results


def _estimates(models: dict[str, _Orders], rows: Int, groups: Int) -> Estimates:
    estimates: dict[str, Estimate] = {}
    for suffix, model in models.items():
        estimates[f"orders_robust_accuracy{suffix}"] = Proportion.of(model.always[rows], groups)
        estimates[f"orders_accuracy{suffix}"] = Mean(model.right[rows], groups=groups)
        estimates[f"orders_agreement{suffix}"] = Mean(model.same[rows], groups=groups)
        bias = float(bias_of(model.excess[rows].mean(axis=0)))
        estimates[f"orders_position_bias{suffix}"] = Number(bias, len(rows))
    if "_baseline" in models:
        b, q = models["_baseline"], models[""]
        estimates["orders_robust_accuracy_delta"] = PairedDifference.of(b.always[rows], q.always[rows], groups)
        estimates["orders_accuracy_delta"] = Mean((q.right - b.right)[rows], groups=groups)
        estimates["orders_agreement_delta"] = Mean((q.same - b.same)[rows], groups=groups)
        excess = np.hstack([b.excess[rows], q.excess[rows]])
        estimates["orders_position_bias_delta"] = Resampled(excess, difference_of(bias_of), groups=groups)
    return {_EVERY_ORDER[name]: estimate for name, estimate in estimates.items()}
