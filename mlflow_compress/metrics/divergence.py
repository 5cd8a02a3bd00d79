"""Divergences between both models' distributions, averaged over items as in equation 1 of the flips paper."""

from typing import Any

import numpy as np

from mlflow_compress.metrics.core.estimates import Estimates, Mean, by_subset
from mlflow_compress.metrics.core.metric_inputs import MetricInputs
from mlflow_compress.metrics.core.metric_registry import METRICS, TOO_LONG, GateValue, MetricKey, metric, upper_end
from mlflow_compress.metrics.core.requirements import ITEMS, OPTION_DISTANCES, VARIANT
from mlflow_compress.metrics.kl_tail import mean_kl
from mlflow_compress.metrics.stats.arrays import Int
from mlflow_compress.records import MetricResult

LN2 = float(np.log(2.0))


def _nats(name: str, meaning: str, *, high: float = np.inf, **more: Any) -> MetricKey:
    return MetricKey(name=name, direction="lower", low=0.0, high=high, unit="nats", meaning=meaning, **more)


def _agreement(name: str, meaning: str, **more: Any) -> MetricKey:
    return MetricKey.share(name, "higher", meaning, unchanged=1.0, by_category=False, **more)


KL = _nats(
    "distance/kl_mean",
    "KL(baseline || variant), eq. 1: items, then options, then tokens.",
    label="KL, items (nats)",
    headline=30,
    floor="noise/kl_mean",
    leaderboard=True,
    by_task=True,
    unscored=TOO_LONG,
    gate=GateValue("gate/kl_upper", upper_end),
)
KL_REVERSE = _nats("distance/kl_reverse_mean", "KL(variant || baseline), weighted as eq. 1.", by_category=False)
JS = _nats("distance/js_mean", "Jensen-Shannon divergence, weighted as eq. 1.", high=LN2, by_category=False)
ACCEPTANCE = _agreement("distance/acceptance", "Expected acceptance rate 1 - TV, weighted as eq. 1.")
TOP1 = _agreement(
    "distance/top1_agreement",
    "Share of tokens with the same most probable token.",
    label="Same top token, items",
    headline=40,
    floor="noise/top1_agreement",
)
TOP10 = _agreement("distance/top10_agreement", "Share of the ten most probable tokens that both models have.")
RBO10 = _agreement("distance/rbo10", "Rank-biased overlap (p = 0.9) of the ten most probable tokens.")

ITEM_COLUMNS = {KL: "kl", KL_REVERSE: "kl_reverse", JS: "js", TOP1: "same_top", TOP10: "top10", RBO10: "rbo10"}


@METRICS.register("divergence")
@metric(
    keys=(KL, KL_REVERSE, JS, ACCEPTANCE, TOP1, TOP10, RBO10),
    requires=(ITEMS, VARIANT, OPTION_DISTANCES),
    source="Accuracy is Not All You Need, eq. 1; natural log, full vocabulary",
    noise=True,
    weighted=True,
)
def divergence(inputs: MetricInputs) -> list[MetricResult]:
    """Mean over items of the mean over options of the mean over tokens; bootstrap over items.

    Divergences are skewed: their interval is the studentised bootstrap's. A mean KL has one where `mean_is_trusted`.

    Lettered options of one token share a context, so that the mean over them is one divergence per question.
    """

    def means(rows: Int) -> Estimates:
        of_item = {key: inputs.distance(column)[rows] for key, column in ITEM_COLUMNS.items()}
        of_item[ACCEPTANCE] = 1.0 - inputs.distance("tv")[rows]
        groups = inputs.units(rows)
        found = {key: Mean.of_scored(of_item[key], groups, skewed=key.unit == "nats") for key in divergence.keys}
        return found | {key: mean_kl(of_item[key], groups) for key in (KL, KL_REVERSE)}

    return by_subset(inputs, means, families=inputs.view.scored)
