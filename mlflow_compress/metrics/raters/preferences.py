"""Win rate, wins and losses of comparisons in pairs, whoever compared: a judge model or people."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np

from mlflow_compress.metrics.core.metric_inputs import MetricSettings
from mlflow_compress.metrics.stats.bootstrap import bootstrap, ratio
from mlflow_compress.records import MetricResult


@dataclass(frozen=True)
class Preference:
    """One comparison of two answers.

    Attributes
    ----------
    question : str
        What both answer. Comparisons of one question depend on each other.
    category : str
        The question's category; "" for none.
    adds : mapping of str to float, or None
        What it adds to the share of each name; None without a verdict. A share counts the comparisons that name it.
    """

    question: str
    category: str
    adds: Mapping[str, float] | None


def won_and_lost(value: float) -> dict[str, float]:
    """Return what a verdict adds to win rate, wins and losses: 1 if the variant won, 0 if it lost, 0.5 for a tie.

    Examples
    --------
    >>> won_and_lost(0.5)
    {'win_rate': 0.5, 'wins': 0.0, 'losses': 0.0}
    """
    return {"win_rate": value, "wins": float(value == 1.0), "losses": float(value == 0.0)}


def preference_shares(
    preferences: Iterable[Preference], settings: MetricSettings, *, prefix: str
) -> list[MetricResult]:
    """Return the share of each name over all comparisons, then by category; bootstrap over questions.

    Parameters
    ----------
    preferences : iterable of Preference
    settings : MetricSettings
        Level, resamples and seed.
    prefix : str
        Put before each name: "judge/".
    """
    given = list(preferences)
    questions = sorted({one.question for one in given})
    place = {question: i for i, question in enumerate(questions)}
    category = np.full(len(questions), "", dtype=object)
    # Per question: sum and count of each share, and the number of comparisons without a verdict.
    names = dict.fromkeys(name for one in given for name in one.adds or ())
    sums = {name: np.zeros((len(questions), 2)) for name in names}
    unscored = np.zeros(len(questions), dtype=np.int64)
    for one in given:
        row = place[one.question]
        category[row] = one.category
        unscored[row] += one.adds is None
        for name, value in (one.adds or {}).items():
            sums[name][row] += (value, 1)
    results = []
    s = settings
    for part in [None, *sorted({c for c in category if c})]:
        rows = np.arange(len(questions)) if part is None else np.flatnonzero(category == part)
        for name, columns in sums.items():
            total, n = columns[rows].sum(axis=0)
            if n == 0:
                continue
            interval = bootstrap(
                columns[rows], ratio, resamples=s.resamples, level=s.level, seed=s.seed, method=s.method
            )
            low, high = (None, None) if interval is None else interval
            counted = {"level": s.level, "n": int(n), "n_unscored": int(unscored[rows].sum()), "category": part}
            results.append(MetricResult(name=prefix + name, value=float(total / n), low=low, high=high, **counted))
    return results
