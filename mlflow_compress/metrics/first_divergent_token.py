"""First divergent token (FDT): where the variant's greedy answer leaves the baseline's."""

from __future__ import annotations

import numpy as np

from mlflow_compress.metrics.core.greedy_tokens import SOURCE, forks
from mlflow_compress.metrics.core.item_table import ItemSubset
from mlflow_compress.metrics.core.metric_inputs import MetricInputs
from mlflow_compress.metrics.core.metric_registry import METRICS, MetricKey, metric
from mlflow_compress.metrics.core.requirements import GREEDY_ANSWERS, VARIANT
from mlflow_compress.metrics.core.survival import Survival, kaplan_meier
from mlflow_compress.records import MetricResult

FDT = MetricKey(
    name="judge/first_divergent_token",
    direction="higher",
    low=1.0,
    high=np.inf,
    unit="tokens",
    meaning="Median number of the first token that differs between both models' greedy answers (FDT).",
    label="First divergent token",
    headline=161,
    unchanged=np.inf,
    counted="answers",
)


def survival(inputs: MetricInputs) -> Survival:
    """Return the share of greedy answers that are still equal beyond each token, with its interval."""
    found = forks(inputs)
    return kaplan_meier(found.time, found.differs, level=inputs.settings.level)


@METRICS.register("first_divergent_token")
@metric(
    keys=(FDT,),
    requires=(VARIANT, GREEDY_ANSWERS),
    source=f"{SOURCE}; here tokens are counted from 1, both models decode freely, and the median is Kaplan-Meier's: "
    "equal answers are censored at their length",
)
def first_divergent_token(inputs: MetricInputs) -> list[MetricResult]:
    """``FDT = min {t : G_b(t) != G_q(t)}`` for the greedy answers G of both models to one prompt; its median.

    The end token counts: an answer that ends where the other goes on differs there. There is no result where so few
    answers differ that the median lies beyond what was observed, and no interval where its upper end does.
    """
    curve = survival(inputs)
    if curve.median is None:
        return []
    everything = ItemSubset(None, None, np.empty(0, dtype=np.int64))
    n = len(forks(inputs).time)
    return [everything.result(FDT.name, curve.median, curve.median_interval, n=n, level=inputs.settings.level)]
