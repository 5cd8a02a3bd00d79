"""Shares over comparisons of answers, and agreement of raters: Cohen's kappa and Krippendorff's alpha."""

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import numpy as np
from scipy import special

from mlflow_compress.metrics.core.item_table import ItemSubset
from mlflow_compress.metrics.core.metric_inputs import MetricSettings
from mlflow_compress.metrics.stats.arrays import Float
from mlflow_compress.metrics.stats.intervals import Interval, paired_difference, z_value
from mlflow_compress.records import MetricResult


@dataclass(frozen=True)
class Preference:
    """One comparison of two answers."""

    question: str  # What both answer. Comparisons of one question depend on each other.
    category: str  # The question's category; "" for none
    # What it adds to the share of each name; None without a verdict. A share counts the comparisons that name it.
    adds: Mapping[str, float] | None


def won_and_lost(value: float) -> dict[str, float]:
    """Return what a verdict adds to win rate, wins and losses: 1 if the variant won, 0 if it lost, 0.5 for a tie."""
    return {"win_rate": value, "wins": float(value == 1.0), "losses": float(value == 0.0)}


def preference_shares(
    preferences: Iterable[Preference], settings: MetricSettings, *, prefix: str
) -> list[MetricResult]:
    """Return the share of each name, with `prefix` before it, over all comparisons, then by category."""
    given = list(preferences)
    questions = sorted({one.question for one in given})
    place = {question: i for i, question in enumerate(questions)}
    category = np.full(len(questions), "", dtype=object)
    # Per question: how often each name is 1, how often 0, and its count; and the comparisons without a verdict.
    names = dict.fromkeys(name for one in given for name in one.adds or ())
    counts = {name: np.zeros((len(questions), 3)) for name in names}
    unscored = np.zeros(len(questions), dtype=np.int64)
    for one in given:
        row = place[one.question]
        category[row] = one.category
        unscored[row] += one.adds is None
        for name, value in (one.adds or {}).items():
            counts[name][row] += (value == 1.0, value == 0.0, 1)
    results = []
    s = settings
    for part in [None, *sorted({c for c in category if c})]:
        rows = np.arange(len(questions)) if part is None else np.flatnonzero(category == part)
        for name, columns in counts.items():
            won, lost, n = columns[rows].sum(axis=0)
            if n == 0:
                continue
            value, interval = (n + won - lost) / (2 * n), preference_interval(columns[rows], level=s.level)
            of, missing = ItemSubset(None, part, rows), unscored[rows].sum()
            results.append(of.result(prefix + name, value, interval, n=n, level=s.level, n_unscored=missing))
    return results


def preference_interval(counts: Float, *, level: float = 0.95) -> Interval | None:
    """Return the interval of a win rate, or of any share, over questions with one comparison or more.

    ``(1 + d)/2`` for the ends d of Tango's score interval of ``(won - lost)/n``, which is Wilson's where nothing is a
    tie. Where a question has several comparisons, the counts are divided by the design effect ``F = G/(G-1) sum_g
    (won_g - lost_g - d n_g)^2 / sum_i (x_i - d)^2``, with x = 1, 0, -1, over G questions; at least 1, and n/G where all
    comparisons came out alike, so that each question counts once. The quantile is then that of t(G - 1).

    - `counts` (G, 3): Of each question how often the variant won, and lost, and the number of comparisons.

    None for several comparisons of a single question.

    Source: Tango 1998 (see `paired_difference`); Rao and Scott, "A simple method for the analysis of clustered binary
    data", Biometrics 1992.
    """
    counts = counts[counts[:, 2] > 0]
    won, lost, n = counts.sum(axis=0)
    questions, effect = len(counts), 1.0
    if n > questions:
        if questions == 1:
            return None
        d = (won - lost) / n
        square = won + lost - n * d * d
        between = counts[:, 0] - counts[:, 1] - d * counts[:, 2]
        scale = questions / (questions - 1)
        effect = n / questions if square <= 1e-9 else max(scale * float(between @ between) / square, 1.0)
        effect *= (float(special.stdtrit(questions - 1, 0.5 + level / 2)) / z_value(level)) ** 2
    low, high = paired_difference(won / effect, lost / effect, n / effect, level=level)
    return Interval((1 + low) / 2, (1 + high) / 2)


Ratings = Mapping[Hashable, float]
"""A rater's ratings, by what was rated."""

QuestionOf = Callable[[Any], Hashable]
"""From what was rated to the question that it answers. Ratings of one question depend on each other."""


def rater_agreement(
    ratings: Mapping[str, Ratings], question: QuestionOf, settings: MetricSettings, *, kappa: str, alpha: str
) -> list[MetricResult]:
    """Return kappa and alpha of every pair of raters, and of all of them; what is undefined is left out.

    Kappa of all is the mean over the pairs. The result of a pair has "<one> and <other>" as its task.
    """
    kappas, alphas, columns = [], [], []
    questions = sorted({question(key) for given in ratings.values() for key in given}, key=str)
    for one, other in combinations(sorted(ratings), 2):
        two = {one: ratings[one], other: ratings[other]}
        shared = sorted(ratings[one].keys() & ratings[other].keys(), key=str)
        n, pair = len(shared), f"{one} and {other}"
        value = cohen_kappa([ratings[one][k] for k in shared], [ratings[other][k] for k in shared])
        if value is not None:
            columns.append(_kappa_columns(two, shared, question, questions))
            kappas.append(_result(kappa, value, n, settings.interval(columns[-1], _kappa), settings, task=pair))
        value = krippendorff_alpha(two)
        if value is not None:
            alphas.append(_result(alpha, value, n, _alpha_interval(two, question, settings), settings, task=pair))
    value = krippendorff_alpha(ratings)
    if value is not None:
        interval = _alpha_interval(ratings, question, settings)
        alphas.append(_result(alpha, value, len(_rated_twice(ratings)), interval, settings))
    if kappas:
        mean, n = float(np.mean([result.value for result in kappas])), min(result.n for result in kappas)
        kappas.append(_result(kappa, mean, n, settings.interval(np.hstack(columns), _mean_kappa), settings))
    return kappas + alphas


def _result(
    name: str, value: float, n: int, interval: Interval | None, settings: MetricSettings, *, task: str | None = None
) -> MetricResult:
    low, high = (None, None) if interval is None else interval
    return MetricResult(name=name, value=value, low=low, high=high, level=settings.level, n=n, task=task)


def cohen_kappa(one: Sequence[float], other: Sequence[float]) -> float | None:
    """Return Cohen's kappa of two raters, weighted by the square of the difference; None where it is undefined."""
    if len({*one, *other}) < 2:
        return None
    two: dict[str, Ratings] = {"one": dict(enumerate(one)), "other": dict(enumerate(other))}
    return float(_kappa(_kappa_columns(two, range(len(one)), lambda _: 0, [0])[0]))


def krippendorff_alpha(ratings: Mapping[str, Ratings]) -> float | None:
    """Return Krippendorff's alpha on the interval scale; None where it is undefined. Missing ratings are left out."""
    columns = _alpha_columns(ratings, lambda _: 0)
    values = {given[unit] for unit in _rated_twice(ratings) for given in ratings.values() if unit in given}
    return None if len(values) < 2 else float(_alpha(columns[0]))


def _rated_twice(ratings: Mapping[str, Ratings]) -> list[Hashable]:
    """Return what two raters or more have rated."""
    every = sorted(set().union(*ratings.values()), key=str)
    return [unit for unit in every if sum(unit in given for given in ratings.values()) > 1]


def _kappa_columns(
    two: Mapping[str, Ratings], shared: Sequence[Hashable], question: QuestionOf, questions: Sequence[Hashable]
) -> Float:
    """Return, for each question, the sums that kappa is made of: number, x, y, x^2 + y^2 and (x - y)^2."""
    row = {name: i for i, name in enumerate(questions)}
    columns = np.zeros((len(questions), 5))
    one, other = two.values()
    for key in shared:
        x, y = one[key], other[key]
        columns[row[question(key)]] += (1, x, y, x * x + y * y, (x - y) ** 2)
    return columns


def _kappa(means: Float) -> Float:
    """Return quadratically weighted kappa: 1 - E(x - y)^2 / E(x - y')^2, where y' is drawn on its own."""
    with np.errstate(divide="ignore", invalid="ignore"):
        n, x, y, squares, apart = np.moveaxis(means, -1, 0)
        expected = squares / n - 2 * (x / n) * (y / n)
        return np.asarray(1 - (apart / n) / expected, dtype=np.float64)


def _mean_kappa(means: Float) -> Float:
    """Return the mean of the kappas of several pairs, five columns each."""
    pairs = [_kappa(means[..., start : start + 5]) for start in range(0, means.shape[-1], 5)]
    return np.asarray(np.mean(pairs, axis=0), dtype=np.float64)


def _alpha_interval(ratings: Mapping[str, Ratings], question: QuestionOf, settings: MetricSettings) -> Interval | None:
    """Return alpha's interval: bootstrap over the questions with ratings by two raters or more."""
    columns = _alpha_columns(ratings, question)
    return settings.interval(columns, lambda means: _alpha(len(columns) * means))


def _alpha_columns(ratings: Mapping[str, Ratings], question: QuestionOf) -> Float:
    """Return, for each question, the sums that alpha is made of: number, x, x^2, and the differences within a unit."""
    twice = _rated_twice(ratings)
    row = {name: i for i, name in enumerate(dict.fromkeys(question(unit) for unit in twice))}
    columns = np.zeros((len(row), 4))
    for unit in twice:
        x = np.array([given[unit] for given in ratings.values() if unit in given])
        within = 2 * (len(x) * (x**2).sum() - x.sum() ** 2) / (len(x) - 1)
        columns[row[question(unit)]] += (len(x), x.sum(), (x**2).sum(), within)
    return columns


def _alpha(sums: Float) -> Float:
    """Return 1 - D_o / D_e with the squared difference as distance (Krippendorff 2011)."""
    with np.errstate(divide="ignore", invalid="ignore"):
        n, x, squares, within = np.moveaxis(sums, -1, 0)
        expected = 2 * (n * squares - x**2) / (n * (n - 1))
        return np.asarray(1 - within / n / expected, dtype=np.float64)
