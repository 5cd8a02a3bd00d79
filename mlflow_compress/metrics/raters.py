"""Agreement of raters: Cohen's kappa and Krippendorff's alpha."""

from collections.abc import Callable, Hashable, Mapping, Sequence
from itertools import combinations
from typing import Any

import numpy as np

from mlflow_compress.metrics.core.metric_inputs import MetricSettings
from mlflow_compress.metrics.stats.arrays import Float
from mlflow_compress.metrics.stats.intervals import Interval
from mlflow_compress.records import MetricResult

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
