"""Conformal metrics of six-option items: UAcc, set size, coverage, "I don't know" rates, and the variant's shift."""

import hashlib
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy.special import softmax

from mlflow_compress.errors import DataError
from mlflow_compress.metrics.core.item_table import ItemSubset
from mlflow_compress.metrics.core.metric_inputs import MetricInputs, MetricSettings
from mlflow_compress.metrics.core.metric_registry import Direction, MetricKey, metric
from mlflow_compress.metrics.core.requirements import ITEMS, OPTION_SCORES, family
from mlflow_compress.metrics.stats.arrays import Float, Int
from mlflow_compress.metrics.stats.bootstrap import Statistic, difference_of, resample_counts
from mlflow_compress.metrics.stats.conformal import (
    SCORES,
    conformal,
    conformity_scores,
    resampled_quantiles,
    sizes_and_coverage,
    split,
)
from mlflow_compress.metrics.stats.intervals import (
    FEWEST_GROUPS,
    Interval,
    are_grouped,
    effective_groups,
    share_interval,
)
from mlflow_compress.records import MetricResult

_N_OPTIONS = 6
DONT_KNOW, NONE_OF_THESE = 4, 5


@dataclass(frozen=True)
class _Table:
    """What the sets say on a task's test items."""

    # One row per item: correct, then size and coverage by score, then whether E and F are the answer; of a variant then
    # size and coverage by score at the baseline's thresholds
    columns: Float
    resampled: Float  # Their means in each resample of calibration and test items; shape (n_resamples, n_columns)
    # Groups of the calibration or the test items, whichever are fewer; None where no items share a group
    n_groups: int | None = None

    def beside(self, other: "_Table") -> "_Table":
        """Return the columns of both, this one's first."""
        both = np.hstack([self.columns, other.columns]), np.hstack([self.resampled, other.resampled])
        return _Table(*both, self.n_groups)

    def first(self, width: int) -> "_Table":
        """Return the first columns alone."""
        return _Table(self.columns[:, :width], self.resampled[:, :width], self.n_groups)


def _uacc(means: Float) -> Float:
    ratios = [means[..., 0] / means[..., 1 + 2 * i] for i in range(len(SCORES))]
    return np.asarray(math.sqrt(_N_OPTIONS) * sum(ratios) / len(SCORES), dtype=np.float64)


def _mean_columns(*columns: int) -> Statistic:
    return lambda means: np.asarray(means[..., list(columns)].mean(axis=-1), dtype=np.float64)


def _percent(column: int) -> Statistic:
    return lambda means: np.asarray(100.0 * means[..., column], dtype=np.float64)


_STATISTICS: dict[str, Statistic] = {
    "uacc": _uacc,
    "set_size": _mean_columns(1, 3),
    "coverage": _mean_columns(2, 4),
    "dont_know_pct": _percent(5),
    "none_of_these_pct": _percent(6),
}
_KEPT: dict[str, Statistic] = {"set_size_kept": _mean_columns(7, 9), "coverage_kept": _mean_columns(8, 10)}
_WIDTH = 1 + 2 * len(SCORES) + 2


def _mean_over_tasks(statistic: Statistic, tasks: list[_Table]) -> float:
    return float(np.mean([statistic(task.columns.mean(axis=0)) for task in tasks]))


def _interval(name: str, statistic: Statistic, tasks: list[_Table], level: float) -> Interval | None:
    fewest = min(len(task.columns) if task.n_groups is None else task.n_groups for task in tasks)
    if fewest < 2 or any(task.n_groups is not None and task.n_groups < FEWEST_GROUPS for task in tasks):
        return None
    scale = 100.0 if "_pct" in name else 1.0
    share = _mean_over_tasks(statistic, tasks) / scale
    if share in (0.0, 1.0) and ("_pct" in name or "coverage" in name):  # no resample has another value
        low, high = share_interval(round(share) * fewest, fewest, level=level)
        return Interval(scale * low, scale * high)
    thetas = np.mean([statistic(task.resampled) for task in tasks], axis=0)
    low, high = np.quantile(thetas, [(1 - level) / 2, (1 + level) / 2])
    return Interval(float(low), float(high)) if low < high else None  # sets that are all alike say nothing of others


def _key(name: str, direction: Direction, low: float, high: float, unit: str, meaning: str, **more: Any) -> MetricKey:
    return MetricKey(
        name=f"uncertainty/{name}", direction=direction, low=low, high=high, unit=unit, meaning=meaning, **more
    )


_HIGHEST = math.sqrt(_N_OPTIONS)
_BASE: tuple[tuple[str, Direction, float, float, str, str], ...] = (
    ("uacc", "higher", 0.0, _HIGHEST, "ratio", "Accuracy over set size times sqrt(6), mean of the ratios by score."),
    ("set_size", "lower", 1.0, 6.0, "options", "Mean size of the conformal sets, over LAC and APS."),
    ("coverage", "neither", 0.0, 1.0, "share", "Sets that contain the gold option; the target is 1 - alpha."),
    ("dont_know_pct", "neither", 0.0, 100.0, "percent", 'Items answered with E, "I don\'t know".'),
    ("none_of_these_pct", "neither", 0.0, 100.0, "percent", 'Items answered with F, "None of the above".'),
)
_SHOWN: dict[str, dict[str, Any]] = {
    "uacc": {"label": "UAcc", "headline": 100, "leaderboard": True, "difference": "uncertainty/uacc_delta"},
    "set_size": {
        "label": "Conformal set size",
        "headline": 110,
        "leaderboard": True,
        "difference": "uncertainty/set_size_delta",
    },
    "coverage": {"label": "Conformal coverage", "headline": 120},
}


@metric(
    "uncertainty",
    keys=(
        *(_key(*row, **_SHOWN.get(row[0], {})) for row in _BASE),
        *(
            _key(
                f"{name}_baseline",
                "neither",
                low,
                high,
                unit,
                f"The baseline's value: {meaning[0].lower()}{meaning[1:]}",
            )
            for name, _, low, high, unit, meaning in _BASE
        ),
        _key("uacc_delta", "higher", -_HIGHEST, _HIGHEST, "ratio", "Variant minus baseline UAcc, paired."),
        _key("set_size_delta", "lower", -5.0, 5.0, "options", "Variant minus baseline set size, paired."),
        _key("set_size_kept", "lower", 1.0, 6.0, "options", "Set size when the baseline's threshold is kept."),
        _key("coverage_kept", "higher", 0.0, 1.0, "share", "Coverage when the baseline's threshold is kept."),
    ),
    requires=(ITEMS, OPTION_SCORES, family("lettered_six")),
    source="LLM-Uncertainty-Bench; textbook rank of the quantile, where the published script takes the next one",
)
def uncertainty(inputs: MetricInputs) -> list[MetricResult]:
    """LAC and APS sets over six options, split by the items' ids, both models on the same split; bootstrap over items.

    Each task (dataset or prompt method) is calibrated by itself; the pooled value is the mean of the tasks' values, as
    in [LUB], where UAcc is a mean of ratios. The bootstrap draws calibration and test items, and takes the thresholds
    anew in every resample (percentiles): one that is held fixed has the luck of its calibration items, and intervals
    that cover 34 to 89 % in place of 93 to 98 %. Tasks of one size share their draws, which is right for tasks that
    hold the same items in one order. Items in groups are split and drawn by whole groups; fewer than 20 groups on a
    side have no interval. A share of 0 or 1, such as the coverage where every set holds the gold option, has
    Wilson's interval.
    """
    sides = models_of(inputs)
    results: list[MetricResult] = []
    tables: dict[str, list[_Table]] = {side: [] for side in sides}
    subsets: list[ItemSubset] = []
    n_unscored = 0
    for subset in inputs.subsets(("lettered_six",), categories=()):
        rows = scored_rows(inputs, subset)
        if len(rows) < 2:
            continue
        for side, table in _judge(inputs, rows, sides).items():
            tables[side].append(table)
        subsets.append(subset)
        n_unscored += len(subset.rows) - len(rows)
        tasks = {side: [tables[side][-1]] for side in sides}
        results += _report(inputs, subset, tasks, len(subset.rows) - len(rows))
    if subsets:
        pooled = ItemSubset(None, None, np.concatenate([p.rows for p in subsets]))
        results = _report(inputs, pooled, tables, n_unscored) + results
    return results


def models_of(inputs: MetricInputs) -> list[str]:
    """Return "baseline", and "variant" where there is one."""
    return ["baseline"] if inputs.variant is None else ["baseline", "variant"]


def scored_rows(inputs: MetricInputs, subset: ItemSubset) -> Int:
    """Return the six-option items of a subset that every model has scored.

    They are sorted by id, so that the seeded split does not depend on the order in which items were recorded.
    """
    scored = np.logical_and.reduce([inputs.grid(side).scored[subset.rows, 0] for side in models_of(inputs)])
    rows = subset.rows[scored]
    if (inputs.view.n_options[rows] != _N_OPTIONS).any():
        raise DataError("An item of the family lettered_six does not have six options", got=subset.task)
    return np.asarray(rows[np.argsort(inputs.view.item_id[rows].astype(str), kind="stable")], dtype=np.int64)


def six_probabilities(inputs: MetricInputs, side: str, rows: Int) -> Float:
    """Return the softmax over the six option logits of "baseline" or "variant", shape (n_rows, 6)."""
    return np.asarray(softmax(inputs.grid(side).loglik[rows, 0, :_N_OPTIONS], axis=-1), dtype=np.float64)


def split_seed(inputs: MetricInputs, rows: Int) -> int:
    """Return the seed of the split of some items: 32 bits of the SHA-256 of the settings' seed and the items' ids.

    The model is no part of it: all variants of an evaluation, and all prompts for the same items, share their splits.
    """
    drawn = "\x1f".join([str(inputs.settings.split_seed), *inputs.view.item_id[rows].astype(str)])
    return int.from_bytes(hashlib.sha256(drawn.encode()).digest()[:4], "big")


def _judge(inputs: MetricInputs, rows: Int, sides: list[str]) -> dict[str, _Table]:
    s, gold = inputs.settings, inputs.view.gold[rows]
    groups = split_groups(inputs, rows)
    seed, share = split_seed(inputs, rows), s.calibration_share
    calibration, test = split(len(rows), seed=seed, calibration_share=share, groups=groups)
    grouped = are_grouped(inputs.view.group[rows])
    sizes = [np.unique(groups[half], return_counts=True)[1] for half in (calibration, test)]
    n_groups = min(map(effective_groups, sizes)) if grouped else None
    tables: dict[str, _Table] = {}
    # The baseline's thresholds by score, and those of each resample of the calibration items; it comes first
    held: list[float] = []
    held_drawn: list[Float] = []
    for side in sides:
        p = six_probabilities(inputs, side, rows)
        own = [conformal(p, gold, calibration=calibration, test=test, score=k, alpha=s.alpha) for k in SCORES]
        kept = [
            conformal(p, gold, calibration=calibration, test=test, score=k, threshold=q)
            for k, q in zip(SCORES, held, strict=False)
        ]
        drawn = [
            np.concatenate(
                [
                    resampled_quantiles(conformity_scores(p[calibration], gold[calibration], k), counts, s.alpha)
                    for counts in _drawn(groups[calibration], s.resamples, s.seed + 1)
                ]
            )
            for k in SCORES
        ]
        by_score, by_held = ([column for r in sets for column in (r.size, r.covered)] for sets in (own, kept))
        answer = p[test].argmax(axis=1)
        rates = [answer == DONT_KNOW, answer == NONE_OF_THESE]
        columns = np.column_stack([own[0].correct, *by_score, *rates, *by_held]).astype(np.float64)
        means = _resampled(s, columns, p[test], gold[test], groups[test], drawn + held_drawn)
        tables[side] = _Table(columns, means, n_groups)
        held, held_drawn = [result.threshold for result in own], drawn
    return tables


def split_groups(inputs: MetricInputs, rows: Int) -> Int:
    """Return the code of the group that is on one side of the split, from 0: of the item where all share one group."""
    codes = np.unique(inputs.view.group[rows], return_inverse=True)[1]
    return np.asarray(codes if codes.max() else np.arange(len(rows)), dtype=np.int64)


def _drawn(groups: Int, resamples: int, seed: int) -> Iterator[Float]:
    """Iterate over how often each item is drawn, its group as a whole, in blocks of shape (some resamples, n)."""
    codes = np.unique(groups, return_inverse=True)[1]
    for counts in resample_counts(int(codes.max()) + 1, resamples, seed):
        yield counts[:, codes]


def _resampled(s: MetricSettings, columns: Float, p: Float, gold: Int, groups: Int, thresholds: list[Float]) -> Float:
    """Return the columns' means in each resample, with the sets that its thresholds make."""
    means: Float = np.concatenate(
        [counts @ columns / counts.sum(axis=1, keepdims=True) for counts in _drawn(groups, s.resamples, s.seed)]
    )
    places = [*range(1, 1 + 2 * len(SCORES), 2), *range(_WIDTH, columns.shape[1], 2)]
    for place, score, of_resample in zip(places, SCORES * 2, thresholds, strict=False):
        distinct, at = np.unique(of_resample, return_inverse=True)
        for column, table in enumerate(sizes_and_coverage(p, gold, distinct, score), start=place):
            start = 0
            for counts in _drawn(groups, s.resamples, s.seed):
                rows = slice(start, start + len(counts))
                means[rows, column] = np.einsum("rn,rn->r", counts, table[at[rows]]) / counts.sum(axis=1)
                start += len(counts)
    return means


def _report(
    inputs: MetricInputs, subset: ItemSubset, tables: dict[str, list[_Table]], n_unscored: int
) -> list[MetricResult]:
    s = inputs.settings
    subject = tables["variant"] if "variant" in tables else tables["baseline"]
    n = sum(len(t.columns) for t in subject)

    def result(name: str, statistic: Statistic, tasks: list[_Table]) -> MetricResult:
        interval = _interval(name, statistic, tasks, s.level)
        value = _mean_over_tasks(statistic, tasks)
        return subset.result(f"uncertainty/{name}", value, interval, n=n, level=s.level, n_unscored=n_unscored)

    results = [result(name, statistic, subject) for name, statistic in _STATISTICS.items()]
    if "variant" in tables:
        base = [t.first(_WIDTH) for t in tables["baseline"]]
        paired = [b.beside(v.first(_WIDTH)) for b, v in zip(base, subject, strict=True)]
        results += [result(f"{name}_baseline", statistic, base) for name, statistic in _STATISTICS.items()]
        results += [result(name, statistic, subject) for name, statistic in _KEPT.items()]
        results += [result(f"{name}_delta", difference_of(_STATISTICS[name]), paired) for name in ("uacc", "set_size")]
    return results
