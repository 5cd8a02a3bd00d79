"""Top margins: the baseline's confidence in the answers that a variant changes."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from mlflow_compress.errors import ConfigError
from mlflow_compress.metrics.core.estimates import Estimates, Mean, by_subset
from mlflow_compress.metrics.core.metric_inputs import MetricInputs
from mlflow_compress.metrics.core.metric_registry import METRICS, Direction, MetricKey, metric
from mlflow_compress.metrics.core.requirements import ITEMS, OPTION_SCORES
from mlflow_compress.metrics.stats.arrays import Float, Int, finite, same_length
from mlflow_compress.metrics.stats.intervals import wilson
from mlflow_compress.records import MetricResult


@dataclass(frozen=True, kw_only=True)
class BinnedShare:
    """A share by bin, ready to draw; only bins that hold items."""

    left: Float  # Edges of each bin; shape (n_bins,)
    right: Float
    n: Int  # Items in each bin; shape (n_bins,)
    share: Float  # Share of items with the event, and its Wilson interval; shape (n_bins,)
    low: Float
    high: Float


def share_by_bin(
    values: npt.ArrayLike, events: npt.ArrayLike, *, edges: npt.ArrayLike | None = None, level: float = 0.95
) -> BinnedShare:
    """Return P(event) by bin of a value in [0, 1], with intervals: figures 3 and 4 of the flips paper.

    - `values` (n,): Top margins (or probabilities) of the baseline.
    - `events` (n,): Answer changed, or answer incorrect.
    - `edges` (n_bins + 1,): Increasing bin edges, default ten equal bins over [0, 1]; the last bin includes its right
      edge.
    """
    x = finite("values", values)
    happened = np.asarray(events, dtype=bool)
    same_length(values=x, events=happened)
    cuts = finite("edges", np.linspace(0.0, 1.0, 11) if edges is None else edges)
    if len(cuts) < 2 or (np.diff(cuts) <= 0).any() or x.min() < cuts[0] or x.max() > cuts[-1]:
        raise ConfigError("Bin edges must increase and enclose every value", got=f"{cuts[0]} to {cuts[-1]}")
    codes = np.minimum(np.searchsorted(cuts, x, side="right") - 1, len(cuts) - 2)
    n = np.bincount(codes, minlength=len(cuts) - 1)
    k = np.bincount(codes, weights=happened, minlength=len(cuts) - 1).astype(int)
    used = np.flatnonzero(n)
    bounds = np.array([wilson(int(k[i]), int(n[i]), level=level) for i in used])
    return BinnedShare(
        left=cuts[used],
        right=cuts[used + 1],
        n=n[used],
        share=k[used] / n[used],
        low=bounds[:, 0],
        high=bounds[:, 1],
    )


_MEANINGS: tuple[tuple[str, Direction, str], ...] = (
    ("margin_correct", "higher", "Mean top margin of the items that the model has right."),
    ("margin_incorrect", "neither", "Mean top margin of the items that the model has wrong."),
    ("margin_correct_baseline", "neither", "Mean top margin of the items that the baseline has right."),
    ("margin_incorrect_baseline", "neither", "Mean top margin of the items that the baseline has wrong."),
)
RIGHT, WRONG, RIGHT_BASELINE, WRONG_BASELINE = (
    MetricKey.probability(f"quality/{name}", direction, meaning, by_category=False)
    for name, direction, meaning in _MEANINGS
)


@METRICS.register("margins")
@metric(
    keys=(RIGHT, WRONG, RIGHT_BASELINE, WRONG_BASELINE),
    requires=(ITEMS, OPTION_SCORES),
    source="Accuracy is Not All You Need, section 5; p is normalised over the options, which the paper leaves open",
)
def margins(inputs: MetricInputs) -> list[MetricResult]:
    """Mean of ``p(best) - p(second best)`` over correct and over incorrect items, pooled and by task."""
    models = [(inputs.subject_predictions, RIGHT, WRONG)]
    if inputs.variant is not None:
        models.append((inputs.baseline_predictions, RIGHT_BASELINE, WRONG_BASELINE))

    def means(rows: Int) -> Estimates:
        found = {}
        for model, right, wrong in models:
            margin, correct = model.margin[rows, 0], model.correct[rows, 0]
            scored = np.isfinite(margin)
            left = int((~scored).sum())
            found[right] = Mean(margin[scored & correct], left)
            found[wrong] = Mean(margin[scored & ~correct], left)
        return found

    return by_subset(inputs, means, families=inputs.view.choice)
