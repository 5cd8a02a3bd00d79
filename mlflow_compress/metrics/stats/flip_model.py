"""What the baseline's leads say of flips: the share of flips by lead, a forecast, and a certificate.

The lead of an item is how many nats its right option is ahead of the best other one, or behind it, over the root of
the nats of both (`item_table.gold_lead`): a variant flips the item where it moves the two by more than they are apart,
and it moves long options by more than short ones.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from scipy.special import expit, xlogy

from mlflow_compress.errors import DataError
from mlflow_compress.metrics.stats.arrays import Bool, Float, Int, finite, same_length
from mlflow_compress.metrics.stats.intervals import Interval, check_level

_PRIOR, _DEVIATIONS = np.array([-1.0, 0.0]), np.array([0.7, 30.0])  # of level and slope
_STEPS, _LONGEST = 50, 3.0  # Newton's: at most so many, and none longer
_FEWEST_PARTS = 3  # of which the variance between parts is estimated


@dataclass(frozen=True)
class FlipModel:
    """``P(flip) = 1/(1 + exp(slope x - level))`` of an item with a lead of x."""

    level: float
    slope: float  # The larger, the faster flips become rare with the lead

    @classmethod
    def fit(cls, leads: npt.ArrayLike, flips: npt.ArrayLike) -> "FlipModel":
        """Return the model of some items, by maximum likelihood with a weak prior: it is there without a flip, too.

        - `leads`, `flips` (n,): The baseline's lead, and whether the item flipped.
        """
        return cls._fit(finite("leads", leads), np.asarray(flips, dtype=np.float64), _PRIOR)

    @classmethod
    def _fit(cls, x: Float, y: Float, begin: Float) -> "FlipModel":
        """Return the model of items with leads `x`; Newton's method begins at a level and a slope."""
        same_length(leads=x, flips=y)
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

    def probability(self, leads: npt.ArrayLike) -> Float:
        """Return the probability of a flip, by item; NaN where there is no lead."""
        return np.asarray(expit(self.level - self.slope * np.asarray(leads)), dtype=np.float64)


GUESS = FlipModel(-1.0, 2.35)
"""What is expected before a variant was looked at."""


def expected_flips(leads: Float, flipped: Bool, known: Bool, strata: Int) -> Float:
    """Return for each item the probability of a flip that a model of all of them gives its stratum, shape (n,).

    - `leads`, `flipped`, `known`, `strata` (n,): An item without a lead, or without an answer, is not `known`; a
      stratum of such items has 0.
    """
    expected = FlipModel.fit(leads[known], flipped[known]).probability(leads[known])
    codes = np.unique(strata, return_inverse=True)[1]
    sums = np.bincount(codes[known], weights=expected, minlength=codes.max() + 1)
    counts = np.bincount(codes[known], minlength=codes.max() + 1)
    return np.asarray((sums / np.maximum(counts, 1))[codes], dtype=np.float64)


@dataclass(frozen=True, eq=False)
class _FlipForecast:
    """What is expected of items that were not run."""

    expected: Float  # Their probability of a flip; shape (n_others,)
    # Flips as they may be, each row with a model and parts of its own; None where too few parts were run to know how
    # much parts differ; shape (draws, n_others)
    drawn: Bool | None

    def share(self, rows: slice | npt.ArrayLike, *, level: float = 0.95) -> tuple[float, Interval | None]:
        """Return the share of flips to expect among some of the items, and the interval of what would be seen there."""
        check_level(level)
        inside = rows if isinstance(rows, slice) else np.asarray(rows)
        if self.drawn is None:
            return float(self.expected[inside].mean()), None
        low, high = np.quantile(self.drawn[:, inside].mean(axis=1), [(1 - level) / 2, (1 + level) / 2])
        return float(self.expected[inside].mean()), Interval(float(low), float(high))


def forecast_flips(
    leads: npt.ArrayLike,
    flips: npt.ArrayLike,
    parts: npt.ArrayLike,
    others: npt.ArrayLike,
    other_parts: npt.ArrayLike,
    *,
    draws: int = 400,
    seed: int = 0,
) -> _FlipForecast:
    """Return what the items that were run let expect of others.

    The draws have the uncertainty of the model, which is fitted again to items that are drawn again; the luck of the
    other items; and that parts differ in more than their leads: each part has a level of its own, with the variance
    between parts of DerSimonian and Laird (1986), ``(Q - (k - 1)) / (sum w - sum w^2 / sum w)``, at least 0. There k
    parts were run, a part weighs ``w = sum p (1 - p)``, its level is off by ``d = sum (flip - p) / w``, and Q is
    ``sum w (d - mean of d by w)^2``.

    - `leads`, `flips`, `parts` (n,): Of the items that were run: the baseline's lead, whether they flipped, and the
      name of the part (a category of a task) that they are of. Of fewer than three parts there are no draws.
    - `others`, `other_parts` (n_others,): The same of the others.
    """
    x, y, other = finite("leads", leads), np.asarray(flips, dtype=np.float64), finite("others", others)
    model = FlipModel._fit(x, y, _PRIOR)
    expected = model.probability(other)
    code, k = _codes(parts)
    if k < _FEWEST_PARTS:
        return _FlipForecast(expected=expected, drawn=None)
    p = model.probability(x)
    weight = np.bincount(code, weights=p * (1 - p))
    off = np.bincount(code, weights=y - p) / weight
    spread = (weight * (off - np.average(off, weights=weight)) ** 2).sum() - (k - 1)
    between = np.sqrt(max(0.0, spread / (weight.sum() - (weight**2).sum() / weight.sum())))
    rng, begin = np.random.default_rng(seed), np.array([model.level, model.slope])
    other_code, n_parts = _codes(other_parts)
    drawn = np.empty((draws, len(other)), dtype=bool)
    for row in drawn:
        rows = rng.integers(0, len(x), len(x))
        again = FlipModel._fit(x[rows], y[rows], begin)  # near the model of all: fewer steps from there
        level = again.level + rng.normal(0, between, n_parts)[other_code]
        row[:] = rng.random(len(other)) < expit(level - again.slope * other)
    return _FlipForecast(expected=expected, drawn=drawn)


def _codes(parts: npt.ArrayLike) -> tuple[Int, int]:
    names, codes = np.unique(np.asarray(parts), return_inverse=True)
    return codes, len(names)


def smallest_kl_to_change(p: npt.ArrayLike) -> Float:
    """Return the smallest KL(p || q) of any q whose most probable option is another than that of p, in nats.

    A variant with a smaller KL cannot have changed the answer. With the two largest probabilities p1 and p2 it is
    ``p1 ln p1 + p2 ln p2 - (p1 + p2) ln((p1 + p2)/2)``: by convexity the nearest q has ``q1 = q2`` and keeps the other
    options. `p` may be the probabilities of all outcomes, or of some of them: of lettered answers, whose options are
    one token each, the KL over the vocabulary can be compared with it.

    - `p` (n_items, n_options): Probabilities, of which each row sums up to at most 1.
    """
    probabilities = finite("probabilities", p, ndim=2)
    if probabilities.shape[1] < 2 or probabilities.min() < 0 or probabilities.sum(axis=1).max() > 1 + 1e-6:
        raise DataError("Rows must be probabilities of two options or more", allowed="from 0, with a sum of at most 1")
    two = np.sort(probabilities, axis=1)[:, -2:]
    return np.asarray(xlogy(two, two).sum(axis=1) - xlogy(two.sum(axis=1), two.mean(axis=1)), dtype=np.float64)
