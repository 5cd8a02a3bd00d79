"""Anytime-valid tests of bounded means by betting. They may be looked at after every item, and stopped early.

A bettor who does not believe that the mean is `m` bets against it; the capital is a martingale if the mean IS `m`, so
that it ever reaches 1/alpha with probability at most alpha (Ville). This holds for items in random order only (a file
sorted by category passes or fails by its first category), so the order is drawn here, from the items' ids and a seed.
"""

import hashlib
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from mlflow_compress.errors import ConfigError, DataError
from mlflow_compress.metrics.stats.arrays import Float, Int
from mlflow_compress.metrics.stats.significance import holm

_BOLD_SHARE = 0.95  # of the capital at the start
_PSEUDO_ITEMS = 10.0  # that a bold bettor believes to have seen
_SHARES = np.concatenate([[0.0], np.geomspace(0.01, 0.5, 14), np.linspace(0.55, 0.99, 12)])
"""Shares of the capital that a bold bet may lose: nothing, or from 1 % to almost everything."""

Side = Literal["below", "above"]


def _bold_path(x: Float, m: float, side: Side) -> Float:
    """Return the log-capital of who stakes before each item what would have gained most until then, shape (n,).

    That is Kelly's bet for the items so far. Ten items with a mean of a tenth of `m` (or twice `m`, for "above") are
    believed in beforehand, so that rare events are shown to be rare with few items.
    """
    sign, room = _direction(m, side)
    bets = _SHARES / room
    guess = 0.1 * m if side == "below" else min(2.0 * m, (1.0 + m) / 2.0)
    believed = guess * np.log1p(sign * bets * (m - 1.0)) + (1.0 - guess) * np.log1p(sign * bets * m)
    gains = np.log1p(sign * bets[None, :] * (m - x[:, None]))
    before = np.cumsum(gains, axis=0) - gains + _PSEUDO_ITEMS * believed
    return np.asarray(np.cumsum(gains[np.arange(len(x)), before.argmax(axis=1)]), dtype=np.float64)


def _direction(m: float, side: Side) -> tuple[float, float]:
    """Return the sign of a bet, and what it has room for: a bet of 1/room loses everything at the worst value."""
    return (1.0, 1.0 - m) if side == "below" else (-1.0, m)


def _log_wealth(x: Float, m: float, *, side: Side, alpha: float) -> Float:
    """Return the log-capital after each item of who bets that the mean is below, or above, `m`; shape (n,).

    `x` has values in [0, 1], in random order. Nearly all of the capital is bet boldly, the rest carefully: the sum of
    two martingales is one. The careful bets aim at the level `alpha`; the capital is a martingale whatever it is.

    Source: Waudby-Smith and Ramdas, "Estimating means of bounded random variables by betting", JRSS-B 2024.
    """
    sign, room = _direction(m, side)
    t = np.arange(1, len(x) + 1)
    mean = (0.5 + np.cumsum(x)) / (t + 1)
    variance = (0.25 + np.cumsum((x - mean) ** 2)) / (t + 1)
    before = np.concatenate([[0.25], variance[:-1]])
    # A careful bet sqrt(2 ln(1/alpha) / (var_{t-1} t log(1 + t))) may lose half of the capital.
    bets = np.minimum(np.sqrt(2.0 * math.log(1.0 / alpha) / (before * t * np.log1p(t))), 0.5 / room)
    careful = np.cumsum(np.log1p(sign * bets * (m - x)))
    bold = _bold_path(x, m, side)
    return np.asarray(np.logaddexp(math.log(_BOLD_SHARE) + bold, math.log1p(-_BOLD_SHARE) + careful), dtype=np.float64)


Verdict = Literal["pass", "fail", "undecided"]


def random_order(ids: Iterable[object], *, seed: int = 0) -> Int:
    """Return the random order in which items are looked at: the rows, sorted by the SHA-256 of seed and id.

    It depends on the ids and the seed alone, not on the order in which the items are given: whoever repeats a decision
    with the same items looks at them in the same order, and nobody can choose an order by sorting a file. No id, or one
    that two items share, is a `DataError`.
    """
    names = [repr(tuple(map(str, i)) if isinstance(i, tuple) else str(i)) for i in ids]
    if not names:
        raise DataError("An order needs at least one item", fix="Give one id per item")
    if len(set(names)) != len(names):
        repeated = Counter(names).most_common(1)[0][0]
        raise DataError("Two items share an id", got=repeated, fix="Give every item an id of its own")
    keys = [hashlib.sha256(f"{seed}\x1f{name}".encode()).digest() for name in names]
    return np.array(sorted(range(len(keys)), key=keys.__getitem__), dtype=np.int64)


PASS_SHARE = 0.9
"""Share of the error level that wrong passes have; the rest is that of wrong fails, which need fewer items."""


@dataclass(frozen=True, kw_only=True)
class BoundedCheck:
    """The claim that the mean of bounded values keeps to a limit."""

    name: str
    limit: float  # Strictly between `low` and `high`
    low: float = 0.0  # Bounds of every value
    high: float = 1.0
    at_least: bool = False  # The claim is that the mean is above the limit, not below it

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


@dataclass(frozen=True, eq=False)
class ItemGroups:
    """Which values of a check belong together, because their items share something."""

    codes: Int  # Group of each value, in the order of the values; a group's values follow each other; shape (n,)
    largest: int  # Most values that a group of this check can have, those included that were not looked at


def p_values(
    check: BoundedCheck, values: npt.ArrayLike, groups: ItemGroups | None = None, *, error: float, n_checks: int
) -> tuple[Float, Float]:
    """Return p-values of "the claim is wrong" and of "the claim is right", after each value; they hold at all times.

    A p-value is 1/(largest capital so far) of who bets against the statement. It never rises. The values are in random
    order, those of a group together, and the bets are on groups: with the sum s and the size w of a group's values,
    both over `groups.largest`, on ``m + s - m w``, which lies in [0, 1] and whose mean is at most the limit m if that
    of the items is. For items that stand alone it is the value. The bets aim at the level `error` of all checks
    together.
    """
    x = check.as_shares(values)
    m = (check.limit - check.low) / (check.high - check.low)
    if groups is not None and len(x):
        codes = np.cumsum(np.concatenate([[0], np.diff(groups.codes) != 0]))
        x = m + (np.bincount(codes, weights=x) - m * np.bincount(codes)) / groups.largest
    if check.at_least:  # "above m" is "below 1 - m" of the mirrored values
        x, m = 1.0 - x, 1.0 - m
    levels: dict[Side, float] = {"below": PASS_SHARE * error, "above": (1.0 - PASS_SHARE) * error / n_checks}
    against_wrong, against_right = (
        np.exp(-np.maximum.accumulate(np.maximum(_log_wealth(x, m, side=side, alpha=alpha), 0.0)))
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
    checks: Sequence[BoundedCheck],
    values: Mapping[str, npt.ArrayLike],
    groups: Mapping[str, ItemGroups | None] | None = None,
    *,
    error: float = 0.05,
) -> dict[str, Verdict]:
    """Return "pass", "fail" or "undecided" for every check, from the items so far. Look as often as you like.

    The probability that ANY verdict is wrong is at most `error`, however often one looks: a check that passes although
    its mean breaks the limit, or fails although it keeps to it. Passes are corrected over the checks by Holm's rule,
    and have nine tenths of the level. Fails are corrected by Bonferroni's, and have the rest. Holm's rule may be
    applied at any time, because ``1/max(capital)`` is a p-value that holds at every time at once (Ville).

    `values` has each check's values, in the random order in which items are looked at; a longer look begins with the
    values of a shorter one. `groups` has the groups of each check's items where they come in groups; groups are whole.
    """
    if not 0.0 < error < 1.0:
        raise ConfigError("The error level must lie strictly between 0 and 1", got=error)
    if not checks:
        return {}
    last = []
    for check in checks:
        of_check = None if groups is None else groups[check.name]
        paths = p_values(check, values[check.name], of_check, error=error, n_checks=len(checks))
        last.append([float(p[-1]) if len(p) else 1.0 for p in paths])
    wrong, right = zip(*last, strict=True)
    return {check.name: verdict for check, verdict in zip(checks, verdicts(wrong, right, error=error), strict=True)}
