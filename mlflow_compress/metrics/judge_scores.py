"""Judge scores, with the paired difference to the baseline; the mean of several judges; the judge's own noise."""

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from operator import itemgetter

import numpy as np
from scipy import special

from mlflow_compress.errors import AlignmentError, DataError
from mlflow_compress.metrics.core.item_table import ItemSubset
from mlflow_compress.metrics.core.metric_inputs import MetricInputs
from mlflow_compress.metrics.core.metric_registry import keys_of, metric
from mlflow_compress.metrics.core.requirements import JUDGE_REPEATS, SEVERAL_JUDGES, is_of, rated_by
from mlflow_compress.metrics.raters import rater_agreement
from mlflow_compress.metrics.stats.arrays import Float, Int, Objects
from mlflow_compress.metrics.stats.bootstrap import jackknife_interval, ratio
from mlflow_compress.metrics.stats.intervals import Interval, bounded_mean_interval
from mlflow_compress.records import Judgments, MetricResult

GRADED_TASK = "mt_bench"
_TURNS = 2


def by_judge_model(judgments: Judgments, judge: str = GRADED_TASK) -> dict[str, Judgments]:
    """Return a judge's ratings by its model; "" is the only one, where no other was asked.

    Several judge models write their ratings under "mt_bench/<model>", so that one is never taken for another.
    """
    tasks = sorted({task for task in judgments.table.column("task").to_pylist() if is_of(judge, task)})
    return {task.removeprefix(judge).removeprefix("/"): judgments.where(task=task) for task in tasks}


@dataclass(frozen=True)
class _TurnScores:
    """A judge's scores, one row per question."""

    question: list[tuple[str, str]]  # The questions, sorted
    category: Objects  # Each question's category; shape (n,)
    score: Float  # Mean over repeats of the readable scores of each turn; NaN where there is none; shape (n, 2)
    n_unscored: Int  # Judgments of each turn without a readable score; shape (n, 2)


def turn_scores(judgments: Judgments) -> _TurnScores:
    """Average the repeats of each question and turn; a judgment without a readable score is counted, never averaged."""
    if len(judgments) == 0:
        raise DataError("The judgments records are empty")
    keys = judgments.key_rows()
    if len(set(keys)) != len(keys):
        raise AlignmentError("Duplicate keys in the judgments records", fix="Every key must be unique")
    score, turn = judgments.column("score").astype(np.float64), judgments.column("turn").astype(np.int64)
    read = ~np.isnan(score)
    if (score[read] < 1).any() or (score[read] > 10).any() or not np.isin(turn, range(_TURNS)).all():
        raise DataError("Judgments need turns 0 or 1 and scores from 1 to 10 (or none)")
    names = [(task, item) for task, item, *_ in keys]
    question = sorted(set(names))
    index = {name: row for row, name in enumerate(question)}
    row = np.array([index[name] for name in names], dtype=np.int64)
    shape = (len(question), _TURNS)
    total, count, unread = np.zeros(shape), np.zeros(shape), np.zeros(shape, dtype=np.int64)
    np.add.at(total, (row[read], turn[read]), score[read])
    np.add.at(count, (row[read], turn[read]), 1.0)
    np.add.at(unread, (row[~read], turn[~read]), 1)
    category = np.full(len(question), "", dtype=object)
    category[row] = [c or "" for c in judgments.table.column("category").to_pylist()]
    with np.errstate(invalid="ignore"):
        return _TurnScores(question, category, np.where(count > 0, total / count, np.nan), unread)


_grade = keys_of("judge", low=1.0, high=10.0, unit="points", counted="answers")
_grade_difference = partial(_grade, low=-9.0, high=9.0)


@metric(
    "judge_scores",
    keys=(
        _grade(
            "mt_bench",
            "higher",
            "Mean score of the graded answers of both turns, each counting once.",
            label="MT-Bench",
            headline=130,
            leaderboard=True,
            difference="judge/mt_bench_delta",
            floor="judge/mt_bench_noise",
            unscored="the judge gave no grade that can be read",
            by_task=True,
        ),
        _grade("mt_bench_turn1", "higher", "Mean score of the first turn."),
        _grade("mt_bench_turn2", "higher", "Mean score of the second turn."),
        _grade("mt_bench_baseline", "neither", "The baseline's mean."),
        _grade_difference(
            "mt_bench_delta",
            "higher",
            "Variant minus baseline, on question turns that both have scores for.",
            by_task=True,
        ),
    ),
    requires=(rated_by(GRADED_TASK),),
    source="FastChat llm_judge show_result, which pools the graded answers of both turns; unreadable ratings are "
    "counted as unscored, never as -1; repeated gradings of an answer are averaged first",
)
def judge_scores(inputs: MetricInputs) -> list[MetricResult]:
    """Mean scores of all answers and by turn, by category too; `n` counts scored answers. See `score_interval`.

    The difference is paired: over the answers that have a score of both models. Several judge models have results of
    their own, with the model as `task`, and no pooled one: `judge_panel` has their mean, under a name of its own.
    """
    assert inputs.subject.judgments is not None and inputs.baseline.judgments is not None  # required
    subject, baseline = by_judge_model(inputs.subject.judgments), by_judge_model(inputs.baseline.judgments)
    results = []
    for model, judgments in subject.items():
        other = turn_scores(baseline[model]) if inputs.variant is not None else None
        results += [replace(result, task=model or None) for result in _compared(inputs, turn_scores(judgments), other)]
    return results


def _compared(
    inputs: MetricInputs, subject: _TurnScores, baseline: _TurnScores | None, *, name: str = GRADED_TASK
) -> list[MetricResult]:
    """Return the mean scores of a model, and its baseline's and the difference where there is one, under `name`."""
    results = _mean_scores(inputs, subject, name, with_turns=name == GRADED_TASK)
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
    delta = _TurnScores(subject.question, subject.category, shared, subject.n_unscored + baseline.n_unscored)
    return results + _mean_scores(inputs, delta, f"{name}_delta")


def _mean_scores(
    inputs: MetricInputs, scores: _TurnScores, key: str, *, with_turns: bool = False
) -> list[MetricResult]:
    s = inputs.settings
    bounds = Interval(-9.0, 9.0) if key.endswith("_delta") else Interval(1.0, 10.0)
    wanted = {key: [0, 1]} | ({"mt_bench_turn1": [0], "mt_bench_turn2": [1]} if with_turns else {})
    categories = [None, *sorted({c for c in scores.category if c})]
    results = []
    for category in categories:
        rows = np.arange(len(scores.question)) if category is None else np.flatnonzero(scores.category == category)
        for name, turns in wanted.items():
            grades = scores.score[rows][:, turns]
            sums, counts = np.nansum(grades, axis=1), np.isfinite(grades).sum(axis=1)
            if not counts.any():  # nothing readable here
                continue
            # All graded answers weigh the same, as FastChat pools them, not the two turns.
            value, n = float(sums.sum() / counts.sum()), counts.sum()
            interval = score_interval(sums, counts, bounds=bounds, level=s.level)
            n_unscored = scores.n_unscored[rows][:, turns].sum()
            of = ItemSubset(None, category, rows)
            results.append(of.result(f"judge/{name}", value, interval, n=n, level=s.level, n_unscored=n_unscored))
    return results


_FEWEST_DIFFERENT = 20  # questions, for an interval that asks nothing but how much the grades differ


def score_interval(sums: Float, counts: Int, *, bounds: Interval, level: float) -> Interval | None:
    """Return the interval of a mean grade over questions, within the `bounds` that a grade has.

    The jackknife's with Student's t, where 20 questions and more have another mean than the most frequent one, and
    further out by ``|g| (2 t^2 + 1)/(6 sqrt(n))`` standard errors on the side of the longer tail, g being the skewness
    (Cornish and Fisher's correction): grades pile up below the best one, so that 4 % of the intervals of 80 questions
    lay above the truth without it. Of fewer, a grade that was not seen matters more than those that were: the interval
    is `bounded_mean_interval`'s. None for a single question.

    Source: Hall, "On the removal of skewness by transformation", JRSS-B 1992, for the correction.

    - `sums`, `counts` (n_questions,): The sum of a question's grades, and their number.
    """
    graded = counts > 0
    sums, sizes = sums[graded], counts[graded].astype(np.float64)
    if len(sums) < 2:
        return None
    _, same = np.unique(np.round(sums / sizes, 9), return_counts=True)
    if len(sums) - same.max() < _FEWEST_DIFFERENT:
        return bounded_mean_interval(sums, sizes, low=bounds.low, high=bounds.high, level=level)
    found = jackknife_interval(np.column_stack([sums, sizes]), ratio, level=level)
    if found is None:
        return None

    e, t = sums - sums.sum() / sizes.sum() * sizes, float(special.stdtrit(len(sums) - 1, 0.5 + level / 2.0))
    skewness = float((e**3).mean() / (e**2).mean() ** 1.5)
    further = skewness * (2.0 * t**2 + 1.0) / (6.0 * len(sums) ** 0.5) * (found.high - found.low) / (2.0 * t)
    low, high = found.low + min(further, 0.0), found.high + max(further, 0.0)
    return Interval(max(low, bounds.low), min(high, bounds.high))


_PANEL = "mt_bench_panel"
_agreement = keys_of(
    "judge", low=-1.0, high=1.0, unit="correlation", by_task=True, by_category=False, counted="answers"
)
_KAPPA = _agreement(
    "agreement_kappa",
    "neither",
    "Cohen's kappa of two judge models' grades, quadratic weights; of several, the pairs' mean.",
)
_ALPHA = _agreement(
    "agreement_alpha",
    "neither",
    "Krippendorff's alpha of all judge models' grades, on the interval scale; by pair too.",
)


@metric(
    "judge_panel",
    keys=(
        _grade(
            _PANEL,
            "higher",
            "Mean over the judge models of the answers that all of them have graded.",
            label="MT-Bench, mean of judges",
            headline=131,
            on_request=True,
            difference=f"judge/{_PANEL}_delta",
        ),
        _grade(f"{_PANEL}_baseline", "neither", "The baseline's mean over the judge models."),
        _grade_difference(f"{_PANEL}_delta", "higher", "Variant minus baseline, by the mean of the judge models."),
        _KAPPA,
        _ALPHA,
    ),
    requires=(rated_by("mt_bench"), SEVERAL_JUDGES),
    source="Panel of judges: arXiv 2404.18796 (average pooling). Kappa: Cohen 1968. Alpha: Krippendorff 2011. "
    "Grades of baseline and variant count alike, each repeat by itself",
)
def judge_panel(inputs: MetricInputs) -> list[MetricResult]:
    """Mean of the judge models' scores, and agreement over the answers that two graded; bootstrap over questions.

    The pooled agreement is that of all judges, the one with a pair as `task` that of two.
    """
    assert inputs.subject.judgments is not None and inputs.baseline.judgments is not None  # required
    subject = _panel(by_judge_model(inputs.subject.judgments))
    both = inputs.variant is not None
    baseline = _panel(by_judge_model(inputs.baseline.judgments)) if both else None
    runs = {"subject": inputs.subject.judgments, **({"baseline": inputs.baseline.judgments} if both else {})}
    ratings: dict[str, dict[Hashable, float]] = {}
    for who, judgments in runs.items():
        for model, part in by_judge_model(judgments).items():
            rows = ratings.setdefault(model, {})
            for row in part.table.to_pylist():
                if row["score"] is not None:
                    rows[row["item_id"], who, row["turn"], row["repeat"]] = row["score"]
    return _compared(inputs, subject, baseline, name=_PANEL) + rater_agreement(
        ratings, itemgetter(0), inputs.settings, kappa=_KAPPA.name, alpha=_ALPHA.name
    )


def _panel(by_model: Mapping[str, Judgments]) -> _TurnScores:
    """Return the mean over the judge models of what all of them have scored."""
    each = [turn_scores(judgments) for judgments in by_model.values()]
    first = each[0]
    ids = [[item for _, item in scores.question] for scores in each]
    if any(other != ids[0] for other in ids):
        raise AlignmentError("The judge models have graded different questions")
    # NaN, where a judge model has no score, stays NaN.
    scores = np.mean([scores.score for scores in each], axis=0)
    return _TurnScores(
        [("", item) for item in ids[0]], first.category, scores, sum(s.n_unscored for s in each[1:]) + first.n_unscored
    )


_noise_key = keys_of("judge", high=9.0, unit="points", by_task=True, by_category=False, counted="answers")
_SPREAD = _noise_key(
    "mt_bench_noise_sd", "neither", "Standard deviation of the judge's grades of one and the same answer."
)
_FLOOR = _noise_key(
    "mt_bench_noise",
    "neither",
    "Standard deviation of the difference between two gradings of the same answers: the noise floor.",
)


@metric(
    "judge_noise",
    keys=(_SPREAD, _FLOOR),
    requires=(rated_by("mt_bench"), JUDGE_REPEATS),
    source="Analysis of variance within answers, pooled over both models' answers",
)
def judge_noise(inputs: MetricInputs) -> list[MetricResult]:
    """The judge's noise, from answers with two readable grades or more; several judge models one by one.

    Within-answer variance: s^2 = sum_a sum_r (x_ar - mean_a)^2 / sum_a (r_a - 1). The mean of the N answers' mean
    grades then has the variance s^2 sum_a(1 / r_a) / N^2 from the judge alone, and the difference of two such means
    twice that.
    """
    subject = inputs.subject.judgments
    assert subject is not None and inputs.baseline.judgments is not None  # required
    baseline = by_judge_model(inputs.baseline.judgments) if inputs.variant is not None else {}
    results = []
    for model, judgments in by_judge_model(subject).items():
        groups = _grades(judgments)
        every = groups + (_grades(baseline[model]) if model in baseline else [])
        results += [replace(result, task=model or None) for result in _noise(groups, every)]
    return results


def _grades(judgments: Judgments) -> list[list[float]]:
    """Return the readable grades of each answer that has any."""
    grades: dict[tuple[str, int], list[float]] = {}
    for row in judgments.table.to_pylist():
        if row["score"] is not None:
            grades.setdefault((row["item_id"], row["turn"]), []).append(row["score"])
    return list(grades.values())


def _noise(subject: list[list[float]], every: list[list[float]]) -> list[MetricResult]:
    repeated = [grades for grades in every if len(grades) > 1]
    freedom = sum(len(grades) - 1 for grades in repeated)
    if freedom == 0:
        return []
    variance = sum(float(np.var(grades)) * len(grades) for grades in repeated) / freedom
    of_mean = variance * sum(1 / len(grades) for grades in subject) / len(subject) ** 2
    return [
        MetricResult(name=_SPREAD.name, value=float(np.sqrt(variance)), n=len(repeated)),
        MetricResult(name=_FLOOR.name, value=float(np.sqrt(2 * of_mean)), n=len(subject)),
    ]
