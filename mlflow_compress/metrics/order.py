"""Robustness against the order of the answers: the two-shuffle metric, consistency over content, position bias."""

from functools import partial

import numpy as np
import numpy.typing as npt

from mlflow_compress.errors import DataError
from mlflow_compress.metrics.core.estimates import Estimates, Number, Resampled, by_subset
from mlflow_compress.metrics.core.item_table import OptionGrid, Predictions
from mlflow_compress.metrics.core.metric_inputs import MetricInputs
from mlflow_compress.metrics.core.metric_registry import keys_of, metric
from mlflow_compress.metrics.core.requirements import ITEMS, OPTION_SCORES, SHUFFLES, family
from mlflow_compress.metrics.stats.arrays import Float, Int
from mlflow_compress.metrics.stats.bootstrap import difference_of, first_column
from mlflow_compress.records import MetricResult


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


def gold_letters(grid: OptionGrid, gold: npt.ArrayLike) -> Int:
    """Return the shown position of the right content, shape (n_items, n_permutations)."""
    shown = (grid.content == np.asarray(gold)[:, None, None]) & np.isfinite(grid.loglik)
    return np.asarray(shown.argmax(axis=-1), dtype=np.int64)


def _drop(means: Float) -> Float:
    return drop_pct(means[..., 0], means[..., 1])


def _columns(predictions: Predictions, rows: Int, used: int) -> Float:
    right = predictions.correct[rows, :used]
    return np.column_stack([right[:, 0], (right[:, :1] & right[:, 1:]).mean(axis=1)])


_drop_key = keys_of("robustness", unit="percent", high=100.0)
_share_key = keys_of("robustness", unit="share", high=1.0)
_KEYS = (
    _share_key("shuffle_accuracy", "higher", "Right on the original order and on a shuffle."),
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
            ("content_consistency", "higher", "Shuffles in which the same content is chosen."),
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
    """``M`` and ``100 (Acc - M)/Acc`` over lettered items scored under every order; bootstrap over items.

    The accuracy in the drop is that of the same items. The drop is not returned where it does not exist (accuracy 0).
    """
    models = {"": inputs.subject_predictions}
    if inputs.variant is not None:
        models["_baseline"] = inputs.baseline_predictions
    used = min(p.scored.shape[1] for p in models.values())
    golds = gold_letters(inputs.grid("baseline"), inputs.view.gold)

    def estimates(rows: Int) -> Estimates:
        letters, every = int(inputs.view.n_options[rows].max()), np.ones((len(rows), used), dtype=bool)
        right = {suffix: _columns(p, rows, used) for suffix, p in models.items()}
        same = {suffix: content_consistency(p.content[rows, :used])[:, None] for suffix, p in models.items()}
        excess = {
            suffix: letter_excess(p.letter[rows, :used], golds[rows, :used], letters, every)
            for suffix, p in models.items()
        }
        resampled = partial(Resampled, groups=inputs.view.group[rows])
        found = {"shuffle_accuracy": resampled(right[""], lambda means: means[..., 1])}
        found |= {f"shuffle_drop_pct{suffix}": resampled(right[suffix], _drop) for suffix in models}
        found |= {f"content_consistency{suffix}": resampled(same[suffix], first_column) for suffix in models}
        if "_baseline" in models:
            both = {name: np.hstack([of["_baseline"], of[""]]) for name, of in (("right", right), ("excess", excess))}
            found["shuffle_drop_delta_pct"] = resampled(both["right"], difference_of(_drop))
            found["content_consistency_delta"] = resampled(same[""] - same["_baseline"], first_column)
            found["position_bias_delta"] = resampled(both["excess"], difference_of(bias_of))
        # No drop exists where the accuracy is 0. A bias is a distance, which resampling overestimates: no interval.
        exist = {name: estimate for name, estimate in found.items() if np.isfinite(estimate.value)}
        bias = {
            f"position_bias{suffix}": Number(float(bias_of(excess[suffix].mean(axis=0))), len(rows))
            for suffix in models
        }
        keys = {key.name.removeprefix("robustness/"): key for key in _KEYS}
        return {keys[name]: estimate for name, estimate in (exist | bias).items()}

    scored = np.logical_and.reduce([p.scored[:, :used].all(axis=1) for p in models.values()])
    return by_subset(inputs, estimates, scored=scored, families=("lettered",))
