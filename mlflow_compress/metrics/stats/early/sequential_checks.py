"""Several sequential checks at once: which are decided, with one error level for all of them together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from mlflow_compress.errors import ConfigError, DataError
from mlflow_compress.metrics.stats.arrays import Float
from mlflow_compress.metrics.stats.early.betting import Side, log_wealth
from mlflow_compress.metrics.stats.sequential import Verdict
from mlflow_compress.metrics.stats.significance import holm

PASS_SHARE = 0.9
"""Share of the error level that wrong passes have; the rest is that of wrong fails, which need fewer items."""


@dataclass(frozen=True, kw_only=True)
class BoundedCheck:
    """The claim that the mean of bounded values keeps to a limit.

    Attributes
    ----------
    name : str
    limit : float
        Strictly between `low` and `high`.
    low, high : float
        Bounds of every value.
    at_least : bool
        The claim is that the mean is above the limit, not below it.
    """

    name: str
    limit: float
    low: float = 0.0
    high: float = 1.0
    at_least: bool = False

    def __post_init__(self) -> None:
        if not self.low < self.limit < self.high:
            raise ConfigError(
                f"{self.name}: a limit that items can decide lies strictly between the bounds of their values",
                allowed=f"more than {self.low:g} and less than {self.high:g}",
                got=self.limit,
            )

    def as_shares(self, values: npt.ArrayLike) -> Float:
        """Return values as shares of their range; a value outside of it is a `DataError`."""
        x = np.asarray(values, dtype=np.float64)
        if len(x) and not (self.low <= x.min() and x.max() <= self.high):
            raise DataError(
                f"{self.name}: values must lie in [{self.low:g}, {self.high:g}]", got=f"{x.min()}, {x.max()}"
            )
        return np.asarray((x - self.low) / (self.high - self.low), dtype=np.float64)


def p_values(check: BoundedCheck, values: npt.ArrayLike, *, error: float, n_checks: int) -> tuple[Float, Float]:
    """Return p-values of "the claim is wrong" and of "the claim is right", after each value; they hold at all times.

    A p-value is 1/(largest capital so far) of who bets against the statement. It never rises.

    Parameters
    ----------
    check : BoundedCheck
    values : array_like, shape (n,)
        In random order.
    error, n_checks : float, int
        Level and number of all checks together; the bets aim at it.
    """
    x = check.as_shares(values)
    m = (check.limit - check.low) / (check.high - check.low)
    if check.at_least:  # "above m" is "below 1 - m" of the mirrored values
        x, m = 1.0 - x, 1.0 - m
    levels: dict[Side, float] = {"below": PASS_SHARE * error, "above": (1.0 - PASS_SHARE) * error / n_checks}
    against_wrong, against_right = (
        np.exp(-np.maximum.accumulate(np.maximum(log_wealth(x, m, side=side, alpha=alpha), 0.0)))
        for side, alpha in levels.items()
    )
    return against_wrong, against_right


def verdicts(wrong: npt.ArrayLike, right: npt.ArrayLike, *, error: float) -> list[Verdict]:
    """Return the verdict of each check from its p-values of "the claim is wrong" and "the claim is right".

    Passes are corrected by Holm's rule, at `PASS_SHARE` of the level; fails by Bonferroni's, at the rest.
    """
    passes = holm(wrong) <= PASS_SHARE * error
    fails = np.asarray(right) * len(passes) <= (1.0 - PASS_SHARE) * error
    # Both at once is an error of one of them, which the level allows for; neither verdict stands then.
    return [
        "undecided" if passed == failed else "pass" if passed else "fail"
        for passed, failed in zip(passes, fails, strict=True)
    ]


def decide_checks(
    checks: Sequence[BoundedCheck], values: Mapping[str, npt.ArrayLike], *, error: float = 0.05
) -> dict[str, Verdict]:
    """Return "pass", "fail" or "undecided" for every check, from the items so far. Look as often as you like.

    The probability that ANY verdict is wrong is at most `error`, however often one looks: a check that passes although
    its mean breaks the limit, or fails although it keeps to it. Passes are corrected over the checks by Holm's rule,
    and have nine tenths of the level. Fails are corrected by Bonferroni's, and have the rest.

    Parameters
    ----------
    checks : sequence of BoundedCheck
        With different names.
    values : mapping of str to array_like
        For each check its values, in the random order in which items are looked at; a longer look begins with the
        values of a shorter one.
    error : float
        Level of all verdicts together.

    Notes
    -----
    ``1/max(capital)`` over the items so far is a p-value that holds at every time at once (Ville), so that Holm's rule
    may be applied at any of them.
    """
    if not 0.0 < error < 1.0:
        raise ConfigError("The error level must lie strictly between 0 and 1", got=error)
    if not checks:
        return {}
    last = []
    for check in checks:
        paths = p_values(check, values[check.name], error=error, n_checks=len(checks))
        last.append([float(p[-1]) if len(p) else 1.0 for p in paths])
    wrong, right = zip(*last, strict=True)
    return {check.name: verdict for check, verdict in zip(checks, verdicts(wrong, right, error=error), strict=True)}
