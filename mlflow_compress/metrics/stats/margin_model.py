"""What the baseline's margins say of answers that change: the share of changes by margin, a forecast, a certificate."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from scipy.special import expit, xlogy

from mlflow_compress.errors import DataError
from mlflow_compress.metrics.stats.arrays import Bool, Float, Int, finite, same_length
from mlflow_compress.metrics.stats.intervals import Interval, check_level

_MOST = 1 - 1e-6  # margin at which the scale ends: log-odds of 14.5
_PRIOR, _DEVIATIONS = np.array([-1.0, 0.0]), np.array([0.7, 30.0])  # of level and slope
_STEPS, _LONGEST = 50, 3.0  # Newton's: at most so many, and none longer


def _log_odds(margins: npt.ArrayLike) -> Float:
    """Return margins as log-odds ``ln((1 + m)/(1 - m))``: of two options, how far their log-likelihoods are apart."""
    return np.asarray(2 * np.arctanh(np.clip(finite("margins", margins), 0.0, _MOST)), dtype=np.float64)


@dataclass(frozen=True)
class MarginModel:
    """``P(event) = 1/(1 + exp(slope t - level))``, with t the log-odds ``ln((1 + m)/(1 - m))`` of a margin m."""

    level: float
    slope: float  # The larger, the faster events become rare with the margin

    @classmethod
    def fit(cls, margins: npt.ArrayLike, events: npt.ArrayLike) -> MarginModel:
        """Return the model of some items, by maximum likelihood with a weak prior: it is there without an event, too.

        - `margins`, `events` (n,): The baseline's margin in [0, 1], and whether the answer changed.
        """
        return cls._fit(_log_odds(margins), np.asarray(events, dtype=np.float64), _PRIOR)

    @classmethod
    def _fit(cls, x: Float, y: Float, begin: Float) -> MarginModel:
        """Return the model of items with log-odds `x`; Newton's method begins at a level and a slope."""
        same_length(margins=x, events=y)
        at, precision = begin.copy(), np.diag(_DEVIATIONS**-2.0)
        for _ in range(_STEPS):
            p = expit(at[0] - at[1] * x)
            left, weights = y - p, p * (1 - p)
            by_x = weights * x
            slope = np.array([left.sum(), -(left @ x)]) - precision @ (at - _PRIOR)
            curvature = np.array([[weights.sum(), -by_x.sum()], [-by_x.sum(), by_x @ x]]) + precision
            step = np.linalg.solve(curvature, slope)
            length = float(np.abs(step).max())
            at = at + step * min(1.0, _LONGEST / max(length, 1e-300))
            if length < 1e-8:
                break
        return cls(float(at[0]), float(at[1]))

    def probability(self, margins: npt.ArrayLike) -> Float:
        """Return the probability of an event, by item."""
        return np.asarray(expit(self.level - self.slope * _log_odds(margins)), dtype=np.float64)


def expected_changes(margins: Float, changed: Bool, known: Bool, strata: Int) -> Float:
    """Return for each item the probability of a change that a model of all of them gives its stratum, shape (n,).

    - `margins`, `changed`, `known`, `strata` (n,): An item without a margin, or without an answer, is not `known`; a
      stratum of such items has 0.
    """
    expected = MarginModel.fit(margins[known], changed[known]).probability(margins[known])
    codes = np.unique(strata, return_inverse=True)[1]
    sums = np.bincount(codes[known], weights=expected, minlength=codes.max() + 1)
    counts = np.bincount(codes[known], minlength=codes.max() + 1)
    return np.asarray((sums / np.maximum(counts, 1))[codes], dtype=np.float64)


def forecast_changes(
    margins: npt.ArrayLike,
    events: npt.ArrayLike,
    others: npt.ArrayLike,
    *,
    level: float = 0.95,
    draws: int = 400,
    seed: int = 0,
) -> tuple[float, Interval]:
    """Return the share of changes to expect among items that were not run, and the interval of what would be seen.

    The interval has the uncertainty of the model, which is fitted again to items that are drawn again, and the luck of
    the other items. It does not know that other tasks may react in other ways.

    - `margins`, `events` (n,): Of the items that were run: the baseline's margin, and whether the answer changed.
    - `others` (n_others,): The baseline's margins of the others.
    """
    check_level(level)
    x, y, other = _log_odds(margins), np.asarray(events, dtype=np.float64), _log_odds(others)
    model = MarginModel._fit(x, y, _PRIOR)
    rng, begin = np.random.default_rng(seed), np.array([model.level, model.slope])
    shares = []
    for _ in range(draws):
        rows = rng.integers(0, len(x), len(x))
        again = MarginModel._fit(x[rows], y[rows], begin)  # near the model of all: fewer steps from there
        shares.append(float((rng.random(len(other)) < expit(again.level - again.slope * other)).mean()))
    low, high = np.quantile(shares, [(1 - level) / 2, (1 + level) / 2])
    return float(expit(model.level - model.slope * other).mean()), Interval(float(low), float(high))


def smallest_kl_to_change(p: npt.ArrayLike) -> Float:
    """Return the smallest KL(p || q) of any q whose most probable option is another than that of p, in nats.

    A variant with a smaller KL cannot have changed the answer. With the two largest probabilities p1 and p2 it is
    ``p1 ln p1 + p2 ln p2 - (p1 + p2) ln((p1 + p2)/2)``: by convexity the nearest q has ``q1 = q2`` and keeps the other
    options. `p` may be the probabilities of all outcomes, or of some of them: of lettered answers, whose options are
    one token each, the KL over the vocabulary can be compared with it.

    - `p` (n_items, n_options): Probabilities, of which each row sums up to at most 1.
    """
    found = finite("probabilities", p, ndim=2)
    if found.shape[1] < 2 or found.min() < 0 or found.sum(axis=1).max() > 1 + 1e-6:
        raise DataError("Rows must be probabilities of two options or more", allowed="from 0, with a sum of at most 1")
    two = np.sort(found, axis=1)[:, -2:]
    return np.asarray(xlogy(two, two).sum(axis=1) - xlogy(two.sum(axis=1), two.mean(axis=1)), dtype=np.float64)
