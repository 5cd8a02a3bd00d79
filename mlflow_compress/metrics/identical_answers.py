"""Share of prompts to which both models give the same greedy answer, token for token."""

from __future__ import annotations

from mlflow_compress.metrics.core.estimates import Proportion, pooled
from mlflow_compress.metrics.core.greedy_tokens import forks
from mlflow_compress.metrics.core.metric_inputs import MetricInputs
from mlflow_compress.metrics.core.metric_registry import METRICS, MetricKey, metric
from mlflow_compress.metrics.core.requirements import GREEDY_ANSWERS, VARIANT
from mlflow_compress.records import MetricResult

IDENTICAL = MetricKey.percent(
    "judge/identical_answers_pct",
    "higher",
    "Greedy answers of the variant that equal the baseline's, token for token to the end.",
    label="Same greedy answer",
    headline=160,
    unchanged=100.0,
    counted="answers",
)


@METRICS.register("identical_answers")
@metric(
    keys=(IDENTICAL,),
    requires=(VARIANT, GREEDY_ANSWERS),
    source="ours; the answers without a first divergent token (arXiv 2311.01544)",
)
def identical_answers(inputs: MetricInputs) -> list[MetricResult]:
    """``100 #(equal answers)/n`` with Wilson's interval; two answers cut at the token limit are equal up to there."""
    found = forks(inputs)
    return pooled(inputs, {IDENTICAL: Proportion(int((~found.differs).sum()), len(found.time))})
