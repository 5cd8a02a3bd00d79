"""Judge scores: mean, per turn and per category, with the paired difference to the baseline."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from mlflow_compress.errors import AlignmentError, DataError
from mlflow_compress.metrics.core.metric_inputs import MetricInputs
from mlflow_compress.metrics.core.metric_registry import METRICS, Direction, MetricKey, metric
from mlflow_compress.metrics.core.requirements import is_of, rated_by
from mlflow_compress.metrics.stats.arrays import Float, Int, Objects
from mlflow_compress.metrics.stats.bootstrap import Statistic, bootstrap
from mlflow_compress.records import Judgments, MetricResult

JUDGE = "mt_bench"
TURNS = 2


def by_judge_model(judgments: Judgments) -> dict[str, Judgments]:
    """Return the MT-Bench ratings of each judge model, by model; "" is the only one, where no other was asked.

    Several judge models write their ratings under "mt_bench/<model>", so that one is never taken for another.
    """
    tasks = sorted({task for task in judgments.table.column("task").to_pylist() if is_of(JUDGE, task)})
    return {task.removeprefix(JUDGE).removeprefix("/"): judgments.where(task=task) for task in tasks}


@dataclass(frozen=True)
class TurnScores:
    """A judge's scores, one row per question."""

    question: list[tuple[str, str]]  # The questions, sorted
    category: Objects  # Each question's category; shape (n,)
    score: Float  # Mean over repeats of the readable scores of each turn; NaN where there is none; shape (n, 2)
    n_unscored: Int  # Judgments of each turn without a readable score; shape (n, 2)


def turn_scores(judgments: Judgments) -> TurnScores:
    """Average the repeats of each question and turn; a judgment without a readable score is counted, never averaged.

    Raises
    ------
    DataError
        For no judgments, a turn outside 0 and 1, or a score outside 1..10.
    """
    if len(judgments) == 0:
        raise DataError("The judgments records are empty")
    keys = judgments.key_rows()
    if len(set(keys)) != len(keys):
        raise AlignmentError("Duplicate keys in the judgments records", fix="Every key must be unique")
    score, turn = judgments.column("score").astype(np.float64), judgments.column("turn").astype(np.int64)
    read = ~np.isnan(score)
    if (score[read] < 1).any() or (score[read] > 10).any() or not np.isin(turn, range(TURNS)).all():
        raise DataError("Judgments need turns 0 or 1 and scores from 1 to 10 (or none)")
    names = [(task, item) for task, item, *_ in keys]
    question = sorted(set(names))
    index = {name: row for row, name in enumerate(question)}
    row = np.array([index[name] for name in names], dtype=np.int64)
    shape = (len(question), TURNS)
    total, count, unread = np.zeros(shape), np.zeros(shape), np.zeros(shape, dtype=np.int64)
    np.add.at(total, (row[read], turn[read]), score[read])
    np.add.at(count, (row[read], turn[read]), 1.0)
    np.add.at(unread, (row[~read], turn[~read]), 1)
    category = np.full(len(question), "", dtype=object)
    category[row] = [c or "" for c in judgments.table.column("category").to_pylist()]
    with np.errstate(invalid="ignore"):
        return TurnScores(question, category, np.where(count > 0, total / count, np.nan), unread)


def _columns(score: Float) -> Float:
    """Score and presence of each turn: (n, 4) columns score1, has1, score2, has2."""
    there = np.isfinite(score)
    filled = np.where(there, score, 0.0)
    return np.column_stack([filled[:, 0], there[:, 0], filled[:, 1], there[:, 1]]).astype(np.float64)


def _turn(turn: int) -> Statistic:
    def statistic(means: Float) -> Float:
        with np.errstate(divide="ignore", invalid="ignore"):
            return np.asarray(means[..., 2 * turn] / means[..., 2 * turn + 1], dtype=np.float64)

    return statistic


def _pooled(means: Float) -> Float:
    """All scored answers weigh the same, as FastChat pools them, not the two turns."""
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.asarray((means[..., 0] + means[..., 2]) / (means[..., 1] + means[..., 3]), dtype=np.float64)


def judge_key(name: str, direction: Direction, low: float, meaning: str, **more: Any) -> MetricKey:
    """Return the key of a mean grade, or of a difference between two (`low` below 0)."""
    high = 9.0 if low < 0 else 10.0
    return MetricKey(
        name=f"judge/{name}",
        direction=direction,
        low=low,
        high=high,
        unit="points",
        meaning=meaning,
        counted="answers",
        **more,
    )


@METRICS.register("judge_scores")
@metric(
    keys=(
        judge_key(
            "mt_bench",
            "higher",
            1.0,
            "Mean score of the graded answers of both turns, each counting once.",
            label="MT-Bench",
            headline=130,
            leaderboard=True,
            difference="judge/mt_bench_delta",
            floor="judge/mt_bench_noise",
            unscored="the judge gave no grade that can be read",
            by_task=True,
        ),
        judge_key("mt_bench_turn1", "higher", 1.0, "Mean score of the first turn."),
        judge_key("mt_bench_turn2", "higher", 1.0, "Mean score of the second turn."),
        judge_key("mt_bench_baseline", "neither", 1.0, "The baseline's mean."),
        judge_key(
            "mt_bench_delta",
            "higher",
            -9.0,
            "Variant minus baseline, on question turns that both have scores for.",
            by_task=True,
        ),
    ),
    requires=(rated_by(JUDGE),),
    source="FastChat llm_judge show_result, which pools the graded answers of both turns; unreadable ratings are "
    "counted as unscored, never as -1; repeated gradings of an answer are averaged first",
)
def judge_scores(inputs: MetricInputs) -> list[MetricResult]:
    """Mean scores of all answers and by turn, by category too; bootstrap over questions, `n` counts scored answers.

    The difference is paired: over the answers that have a score of both models. Several judge models have results of
    their own, with the model as `task`, and no pooled one: `judge_panel` has their mean, under a name of its own.
    """
    assert inputs.subject.judgments is not None and inputs.baseline.judgments is not None  # required
    subject, baseline = by_judge_model(inputs.subject.judgments), by_judge_model(inputs.baseline.judgments)
    results = []
    for model, judgments in subject.items():
        other = turn_scores(baseline[model]) if inputs.variant is not None else None
        results += [replace(result, task=model or None) for result in compared(inputs, turn_scores(judgments), other)]
    return results


def compared(
    inputs: MetricInputs, subject: TurnScores, baseline: TurnScores | None, *, name: str = JUDGE
) -> list[MetricResult]:
    """Return the mean scores of a model, and its baseline's and the difference where there is one, under `name`."""
    results = _mean_scores(inputs, subject, name, with_turns=name == JUDGE)
    if baseline is None:
        return results
    if baseline.question != subject.question:
        raise AlignmentError(
            "Baseline and variant were judged on different questions",
            got=str(sorted(set(baseline.question) ^ set(subject.question))[:3]),
            fix="Judge both on the same questions",
        )
    results += _mean_scores(inputs, baseline, f"{name}_baseline")
    shared = np.where(np.isfinite(baseline.score), subject.score - baseline.score, np.nan)
    delta = TurnScores(subject.question, subject.category, shared, subject.n_unscored + baseline.n_unscored)
    return results + _mean_scores(inputs, delta, f"{name}_delta")


def _mean_scores(inputs: MetricInputs, scores: TurnScores, key: str, *, with_turns: bool = False) -> list[MetricResult]:
    s = inputs.settings
    has_second = bool(np.isfinite(scores.score[:, 1]).any())
    wanted: dict[str, tuple[Statistic, list[int]]] = {key: (_pooled, [0, 1])}
    if with_turns:
        wanted["mt_bench_turn1"] = (_turn(0), [0])
        if has_second:
            wanted["mt_bench_turn2"] = (_turn(1), [1])
    categories = [None, *sorted({c for c in scores.category if c})]
    results = []
    for category in categories:
        rows = np.arange(len(scores.question)) if category is None else np.flatnonzero(scores.category == category)
        columns = _columns(scores.score[rows])
        for name, (statistic, turns) in wanted.items():
            value = float(statistic(columns.mean(axis=0)))
            if not np.isfinite(value):  # nothing readable here
                continue
            interval = bootstrap(columns, statistic, resamples=s.resamples, level=s.level, seed=s.seed, method=s.method)
            low, high = (None, None) if interval is None else interval
            results.append(
                MetricResult(
                    name=f"judge/{name}",
                    value=value,
                    low=low,
                    high=high,
                    level=s.level,
                    n=int(np.isfinite(scores.score[rows][:, turns]).sum()),
                    n_unscored=int(scores.n_unscored[rows][:, turns].sum()),
                    category=category,
                )
            )
    return results
