"""The baseline's confidence in the answers that a variant changes, distances by it, and what cannot have changed."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from mlflow_compress.errors import ConfigError
from mlflow_compress.metrics.core.estimates import Estimates, Mean, Proportion, by_subset
from mlflow_compress.metrics.core.metric_inputs import MetricInputs
from mlflow_compress.metrics.core.metric_registry import Direction, MetricKey, metric
from mlflow_compress.metrics.core.requirements import (
    ITEMS,
    OPTION_DISTANCES,
    OPTION_SCORES,
    TOKEN_DISTANCES,
    TOKEN_SCORES,
    family,
)
from mlflow_compress.metrics.core.token_groups import matched
from mlflow_compress.metrics.stats.arrays import Float, Int, finite, same_length
from mlflow_compress.metrics.stats.bootstrap import studentized_interval
from mlflow_compress.metrics.stats.flip_model import smallest_kl_to_change
from mlflow_compress.metrics.stats.intervals import share_interval
from mlflow_compress.records import MetricResult


@dataclass(frozen=True, kw_only=True)
class Binned:
    """A mean or a share by bin, ready to draw; only bins that hold values, each array of shape (n_bins,)."""

    left: Float  # Edges of each bin
    right: Float
    n: Int  # Values in each bin
    # The mean and its interval: of a share its own, else the studentised bootstrap's; NaN of too few values for one
    mean: Float
    low: Float
    high: Float


def _bins(values: Float, edges: npt.ArrayLike | None) -> tuple[Float, Int]:
    cuts = finite("edges", np.linspace(0.0, 1.0, 11) if edges is None else edges)
    if len(cuts) < 2 or (np.diff(cuts) <= 0).any() or values.min() < cuts[0] or values.max() > cuts[-1]:
        raise ConfigError("Bin edges must increase and enclose every value", got=f"{cuts[0]} to {cuts[-1]}")
    return cuts, np.minimum(np.searchsorted(cuts, values, side="right") - 1, len(cuts) - 2)


def share_by_bin(
    values: npt.ArrayLike, events: npt.ArrayLike, *, edges: npt.ArrayLike | None = None, level: float = 0.95
) -> Binned:
    """Return P(event) by bin of a value in [0, 1], with intervals: figures 3 and 4 of the flips paper.

    - `values` (n,): Top margins (or probabilities) of the baseline.
    - `events` (n,): Answer changed, or answer incorrect.
    - `edges` (n_bins + 1,): By default ten equal bins over [0, 1]; the last bin includes its right edge.
    """
    x, happened = finite("values", values), np.asarray(events, dtype=bool)
    same_length(values=x, events=happened)
    cuts, codes = _bins(x, edges)
    n = np.bincount(codes, minlength=len(cuts) - 1)
    k = np.bincount(codes, weights=happened, minlength=len(cuts) - 1).astype(int)
    used = np.flatnonzero(n)
    low, high = np.array([share_interval(int(k[i]), int(n[i]), level=level) for i in used]).T
    return Binned(left=cuts[used], right=cuts[used + 1], n=n[used], mean=k[used] / n[used], low=low, high=high)


def mean_by_bin(
    confidence: npt.ArrayLike,
    values: npt.ArrayLike,
    *,
    edges: npt.ArrayLike | None = None,
    level: float = 0.95,
    resamples: int = 1000,
    seed: int = 0,
) -> Binned:
    """Return the mean of a distance by bin of the baseline's confidence in [0, 1]; bins as in `share_by_bin`."""
    c, x = finite("confidence", confidence), finite("values", values)
    same_length(confidence=c, values=x)
    cuts, codes = _bins(c, edges)
    used = np.unique(codes)
    rows = []
    for code in used:
        inside = x[codes == code]
        interval = studentized_interval(inside, resamples=resamples, level=level, seed=seed)
        rows.append((len(inside), float(inside.mean()), *(interval or (np.nan, np.nan))))
    n, mean, low, high = (np.array(column) for column in zip(*rows, strict=True))
    return Binned(left=cuts[used], right=cuts[used + 1], n=n.astype(np.int64), mean=mean, low=low, high=high)


def kl_by_confidence(inputs: MetricInputs) -> Binned | None:
    """Return the mean KL of choice items by bin of the baseline's top margin; None where there are none."""
    margin, kl = inputs.baseline_predictions.margin[:, 0], inputs.distance("kl")
    rows = np.isin(inputs.view.family, inputs.view.choice) & np.isfinite(margin) & np.isfinite(kl)
    s = inputs.settings
    if not rows.any():
        return None
    return mean_by_bin(margin[rows], kl[rows], level=s.level, resamples=s.resamples, seed=s.seed)


def token_kl_by_confidence(inputs: MetricInputs) -> Binned | None:
    """Return the mean KL of corpus tokens by bin of the baseline's probability of the target; None without a corpus."""
    if inputs.missing(TOKEN_SCORES, TOKEN_DISTANCES) is not None:
        return None
    ours, variant, s = inputs.baseline.token_scores, inputs.variant, inputs.settings
    assert ours is not None and variant is not None and variant.token_distances is not None  # not missing
    kl = matched(ours, variant.token_distances, "kl")
    return mean_by_bin(ours.column("p_target"), kl, level=s.level, resamples=s.resamples, seed=s.seed)


def _margin(name: str, direction: Direction, model: str, answers: str) -> MetricKey:
    meaning = f"Mean top margin of the items that the {model} has {answers}."
    return MetricKey.probability(f"quality/{name}", direction, meaning, by_category=False)


_RIGHT = _margin("margin_correct", "higher", "model", "right")
_WRONG = _margin("margin_incorrect", "neither", "model", "wrong")
_RIGHT_BASELINE = _margin("margin_correct_baseline", "neither", "baseline", "right")
_WRONG_BASELINE = _margin("margin_incorrect_baseline", "neither", "baseline", "wrong")


@metric(
    "margins",
    keys=(_RIGHT, _WRONG, _RIGHT_BASELINE, _WRONG_BASELINE),
    requires=(ITEMS, OPTION_SCORES),
    source="Accuracy is Not All You Need, section 5; p is normalised over the options, which the paper leaves open",
    weighted=True,
)
def margins(inputs: MetricInputs) -> list[MetricResult]:
    """Mean of ``p(best) - p(second best)`` over correct and over incorrect items that every model has scored."""
    models = [(inputs.subject_predictions, _RIGHT, _WRONG)]
    if inputs.variant is not None:
        models.append((inputs.baseline_predictions, _RIGHT_BASELINE, _WRONG_BASELINE))

    def means(rows: Int) -> Estimates:
        estimates = {}
        for model, right, wrong in models:
            margin, correct = model.margin[rows, 0], model.correct[rows, 0]
            units = inputs.units(rows)
            estimates[right] = Mean.of(margin[correct], units[correct])
            estimates[wrong] = Mean.of(margin[~correct], units[~correct])
        return estimates

    scored = np.logical_and.reduce([np.isfinite(model.margin[:, 0]) for model, *_ in models])
    return by_subset(inputs, means, scored=scored, families=inputs.view.choice)


_CERTAIN = MetricKey.percent(
    "distance/certain_pct",
    "higher",
    "Share of lettered items whose KL is too small for their answer to have changed.",
    by_category=False,
)


@metric(
    "certain",
    keys=(_CERTAIN,),
    requires=(ITEMS, OPTION_SCORES, OPTION_DISTANCES, family("lettered")),
    source="ours; the bound follows from the convexity of the KL, see `smallest_kl_to_change`",
    weighted=True,
)
def certain(inputs: MetricInputs) -> list[MetricResult]:
    """``100 mean(KL < b(p))`` over lettered items, b the smallest KL of any distribution with another first letter.

    p are the baseline's probabilities of the letters, of one token each, over the vocabulary, as the KL is. The KL is
    raised by a thousandth and 1e-6 nats first, more than its rounding. It is a bound, no estimate: other items need not
    have changed.
    """
    grid, kl = inputs.grid("baseline"), inputs.distance("kl")

    def share(rows: Int) -> Estimates:
        p = np.exp(grid.loglik[rows, 0])
        p /= np.maximum(p.sum(axis=1, keepdims=True), 1.0)  # by rounding, letters can have more than everything
        below = 1.001 * kl[rows] + 1e-6 < smallest_kl_to_change(p)
        return {_CERTAIN: Proportion.of(below, inputs.units(rows))}

    scored = inputs.scored_by_both & np.isfinite(kl)
    return by_subset(inputs, share, scored=scored, families=("lettered",))
