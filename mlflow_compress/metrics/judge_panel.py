"""Several judge models: their mean grade, and how far they agree."""

from __future__ import annotations

from collections.abc import Hashable, Mapping

import numpy as np

from mlflow_compress.errors import AlignmentError
from mlflow_compress.metrics.core.metric_inputs import MetricInputs
from mlflow_compress.metrics.core.metric_registry import METRICS, MetricKey, metric
from mlflow_compress.metrics.core.requirements import SEVERAL_JUDGES, rated_by
from mlflow_compress.metrics.judge_scores import TurnScores, by_judge_model, compared, judge_key, turn_scores
from mlflow_compress.metrics.raters import rater_agreement
from mlflow_compress.records import Judgments, MetricResult

PANEL = "mt_bench_panel"


def _agreement_key(name: str, meaning: str) -> MetricKey:
    return MetricKey(
        name=f"judge/{name}",
        direction="neither",
        low=-1.0,
        high=1.0,
        unit="correlation",
        meaning=meaning,
        by_task=True,
        by_category=False,
        counted="answers",
    )


KAPPA = _agreement_key(
    "agreement_kappa", "Cohen's kappa of two judge models' grades, quadratic weights; of several, the pairs' mean."
)
ALPHA = _agreement_key(
    "agreement_alpha", "Krippendorff's alpha of all judge models' grades, on the interval scale; by pair too."
)


@METRICS.register("judge_panel")
@metric(
    keys=(
        judge_key(
            PANEL,
            "higher",
            1.0,
            "Mean over the judge models of the answers that all of them have graded.",
            label="MT-Bench, mean of judges",
            headline=131,
            on_request=True,
            difference=f"judge/{PANEL}_delta",
        ),
        judge_key(f"{PANEL}_baseline", "neither", 1.0, "The baseline's mean over the judge models."),
        judge_key(f"{PANEL}_delta", "higher", -9.0, "Variant minus baseline, by the mean of the judge models."),
        KAPPA,
        ALPHA,
    ),
    requires=(rated_by("mt_bench"), SEVERAL_JUDGES),
    source="Panel of judges: arXiv 2404.18796 (average pooling). Kappa: Cohen 1968, statsmodels. Alpha: Krippendorff "
    "2011, nltk. Grades of baseline and variant count alike, each repeat by itself",
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
    return compared(inputs, subject, baseline, name=PANEL) + rater_agreement(
        _ratings(runs), _question, inputs.settings, kappa=KAPPA.name, alpha=ALPHA.name
    )


def _panel(by_model: Mapping[str, Judgments]) -> TurnScores:
    """Return the mean over the judge models of what all of them have scored."""
    each = [turn_scores(judgments) for judgments in by_model.values()]
    first = each[0]
    ids = [[item for _, item in scores.question] for scores in each]
    if any(other != ids[0] for other in ids):
        raise AlignmentError("The judge models have graded different questions")
    # NaN, where a judge model has no score, stays NaN.
    scores = np.mean([scores.score for scores in each], axis=0)
    return TurnScores(
        [("", item) for item in ids[0]], first.category, scores, sum(s.n_unscored for s in each[1:]) + first.n_unscored
    )


def _ratings(runs: Mapping[str, Judgments]) -> dict[str, dict[Hashable, float]]:
    """Return each judge model's readable ratings, by question, and then answer and repeat."""
    found: dict[str, dict[Hashable, float]] = {}
    for who, judgments in runs.items():
        for model, part in by_judge_model(judgments).items():
            rows = found.setdefault(model, {})
            for row in part.table.to_pylist():
                if row["score"] is not None:
                    rows[row["item_id"], who, row["turn"], row["repeat"]] = row["score"]
    return found


def _question(rated: tuple[str, ...]) -> str:
    return rated[0]
