"""Comparisons in pairs: the variant's win rate against the baseline, and the judge's bias by position."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from mlflow_compress.errors import DataError
from mlflow_compress.metrics.core.metric_inputs import MetricInputs
from mlflow_compress.metrics.core.metric_registry import METRICS, MetricKey, metric
from mlflow_compress.metrics.core.requirements import is_of
from mlflow_compress.metrics.stats.bootstrap import bootstrap, ratio
from mlflow_compress.records import Judgments, MetricResult

JUDGE = "pairwise"


def _share(name: str, meaning: str, **more: Any) -> MetricKey:
    return MetricKey.share(
        f"judge/{name}", more.pop("direction", "neither"), meaning, counted="answers", by_task=True, **more
    )


WIN_RATE = _share(
    "win_rate",
    "Share of answers in which the judge prefers the variant's; a tie counts half.",
    direction="higher",
    label="Win rate against baseline",
    headline=132,
    unchanged=0.5,
    on_request=True,
    unscored="the judge gave no verdict that can be read",
)
WINS = _share("wins", "Share of answers in which the variant's is better in both orders.")
LOSSES = _share("losses", "Share of answers in which the baseline's is better in both orders.")
CONSISTENCY = _share("pairwise_consistency", "Share of compared answers with the same verdict in both orders.")
FIRST = _share("pairwise_first", "Share of compared answers in which the first place is preferred in both orders.")
SECOND = _share("pairwise_second", "Share of compared answers in which the second place is preferred in both orders.")


@METRICS.register("win_rate")
@metric(
    keys=(WIN_RATE, WINS, LOSSES, CONSISTENCY, FIRST, SECOND),
    requires=("variant", "comparisons"),
    source="FastChat llm_judge show_result, pairwise mode: win_rate is its win_rate_adjusted; a pair whose orders "
    "disagree is a tie. Position bias as in arXiv 2306.05685, section 3.3, without identical answers",
)
def win_rate(inputs: MetricInputs) -> list[MetricResult]:
    """Win rate, wins and losses of all answers; position bias of those that were compared; by category too.

    Bootstrap over questions, whose two turns stay together. Several judge models have results of their own, with the
    model as `task`. A pair with an unreadable verdict in either order counts as unscored.
    """
    assert inputs.variant is not None and inputs.variant.judgments is not None  # required
    judgments = inputs.variant.judgments
    results = []
    for task in sorted({t for t in judgments.table.column("task").to_pylist() if is_of(JUDGE, t)}):
        model = task.removeprefix(JUDGE).removeprefix("/") or None
        results += [replace(result, task=model) for result in _results(inputs, judgments.where(task=task))]
    return results


def _results(inputs: MetricInputs, judgments: Judgments) -> list[MetricResult]:
    pairs: dict[tuple[str, int], dict[int, dict[str, Any]]] = {}
    for row in judgments.table.to_pylist():
        if row["score"] not in (None, 0.0, 0.5, 1.0) or row["repeat"] not in (0, 1):
            raise DataError("Comparisons need verdicts of 0, 0.5 or 1 (or none), in two orders", got=row["item_id"])
        pairs.setdefault((row["item_id"], row["turn"]), {})[row["repeat"]] = row
    questions = sorted({item for item, _ in pairs})
    place = {item: i for i, item in enumerate(questions)}
    category = np.full(len(questions), "", dtype=object)
    # Per question: sum and count of each share, and the number of pairs without a verdict.
    sums = {key: np.zeros((len(questions), 2)) for key in (WIN_RATE, WINS, LOSSES, CONSISTENCY, FIRST, SECOND)}
    unscored = np.zeros(len(questions), dtype=np.int64)
    for (item, _), orders in pairs.items():
        row = place[item]
        category[row] = orders[min(orders)]["category"] or ""
        first, second = (orders[order]["score"] if order in orders else None for order in (0, 1))
        if first is None or second is None:
            unscored[row] += 1
            continue
        for key, value in _outcome(first, second, asked=orders[0]["judge"] != "none").items():
            sums[key][row] += (value, 1)
    results = []
    s = inputs.settings
    for part in [None, *sorted({c for c in category if c})]:
        rows = np.arange(len(questions)) if part is None else np.flatnonzero(category == part)
        for key, columns in sums.items():
            total, n = columns[rows].sum(axis=0)
            if n == 0:
                continue
            interval = bootstrap(
                columns[rows], ratio, resamples=s.resamples, level=s.level, seed=s.seed, method=s.method
            )
            low, high = (None, None) if interval is None else interval
            counted = {"level": s.level, "n": int(n), "n_unscored": int(unscored[rows].sum()), "category": part}
            results.append(MetricResult(name=key.name, value=float(total / n), low=low, high=high, **counted))
    return results


def _outcome(first: float, second: float, *, asked: bool) -> dict[MetricKey, float]:
    """Return what one pair adds to each share. A verdict for the variant is 1: it is B in the first order, then A."""
    won, lost = first == second == 1.0, first == second == 0.0
    outcome = {WIN_RATE: 1.0 if won else 0.0 if lost else 0.5, WINS: float(won), LOSSES: float(lost)}
    if asked:
        outcome[CONSISTENCY] = float(first == second)
        outcome[FIRST] = float(first == 0.0 and second == 1.0)
        outcome[SECOND] = float(first == 1.0 and second == 0.0)
    return outcome
