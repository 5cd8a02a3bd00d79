"""Kaplan-Meier estimate of how long something lasts, where some observations end before it does."""

from __future__ import annotations

import warnings
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from scipy.stats import CensoredData, ecdf

from mlflow_compress.errors import DataError
from mlflow_compress.metrics.stats.arrays import Bool, Float, finite, same_length


@dataclass(frozen=True)
class Survival:
    """A survival curve: a step function that falls at each of `times`."""

    times: Float  # The distinct times, of events and of censored observations, in ascending order; shape (n_times,)
    share: Float  # Probability to survive beyond each time; shape (n_times,)
    # Its interval; NaN before the first event and where the share is 0, because the formula has no value there; shape
    # (n_times,)
    low: Float
    high: Float

    @property
    def median(self) -> float | None:
        """The first time at which at most half survive; None where more than half survive to the end."""
        return self._first(self.share)

    @property
    def median_interval(self) -> tuple[float, float] | None:
        """The times at which the interval of the share contains a half; None where it has no upper end.

        References
        ----------
        Brookmeyer and Crowley, "A confidence interval for the median survival time", Biometrics 1982.
        """
        low, high = self._first(self.low), self._first(self.high)
        return None if low is None or high is None else (low, high)

    def _first(self, curve: Float) -> float | None:
        below = np.flatnonzero(curve <= 0.5 + 1e-12)  # a half up to rounding is; NaN is not
        return float(self.times[below[0]]) if len(below) else None


def kaplan_meier(times: npt.ArrayLike, events: npt.ArrayLike, *, level: float = 0.95) -> Survival:
    """Return the Kaplan-Meier curve with Greenwood's log-log interval, by scipy.

    ``S(t) = prod over t_i <= t of (1 - d_i / n_i)``, with d_i events among the n_i that are still observed at t_i.

    - `times` (n,): Time of each observation's event, or of its end.
    - `events` (n,): Whether it had the event; the others are censored: their event would come later.
    - `level`: Confidence level of the interval at each time.

    References
    ----------
    Kaplan and Meier, "Nonparametric estimation from incomplete observations", JASA 1958.

    Examples
    --------
    >>> curve = kaplan_meier([3, 5, 5, 8], [True, True, False, False])
    >>> [round(float(s), 4) for s in curve.share]
    [0.75, 0.5, 0.5]
    """
    at, had = finite("times", times), np.asarray(events, dtype=bool)
    if same_length(times=at, events=had) == 0:
        raise DataError("A survival curve needs at least one observation")
    curve = ecdf(CensoredData.right_censored(at, ~had)).sf
    with warnings.catch_warnings():  # scipy warns where the interval has no value
        warnings.simplefilter("ignore", RuntimeWarning)
        interval = curve.confidence_interval(level, method="log-log")
    low, high = (np.asarray(end.probabilities, dtype=np.float64) for end in (interval.low, interval.high))
    without: Bool = (curve.probabilities <= 0.0) | (curve.probabilities >= 1.0)
    return Survival(
        np.asarray(curve.quantiles, dtype=np.float64),
        np.asarray(curve.probabilities, dtype=np.float64),
        np.where(without, np.nan, low),
        np.where(without, np.nan, high),
    )
