"""Divergences between both models' distributions, averaged over items as in equation 1 of the flips paper."""

import numpy as np

from mlflow_compress.errors import DataError
from mlflow_compress.metrics.core.estimates import Estimates, Mean, Number, by_subset
from mlflow_compress.metrics.core.item_table import option_means
from mlflow_compress.metrics.core.metric_inputs import MetricInputs
from mlflow_compress.metrics.core.metric_registry import (
    TOO_LONG,
    MetricKey,
    keys_of,
    metric,
)
from mlflow_compress.metrics.core.requirements import ITEMS, OPTION_BOUNDS, OPTION_DISTANCES, VARIANT
from mlflow_compress.metrics.kl_tail import mean_kl
from mlflow_compress.metrics.stats.arrays import Int
from mlflow_compress.records import TOP_LADDER, MetricResult

LN2 = float(np.log(2.0))

_nats = keys_of("distance", unit="nats")
_agreement = keys_of("distance", unit="share", high=1.0, unchanged=1.0, by_category=False)
ITEM_KL = _nats(
    "kl_mean",
    "lower",
    "KL(baseline || variant): the mean over items of the mean over options of the mean over tokens.",
    label="KL, items (nats)",
    headline=30,
    floor="noise/kl_mean",
    leaderboard=True,
    by_task=True,
    unscored=TOO_LONG,
)
_KL_REVERSE = _nats("kl_reverse_mean", "lower", "KL(variant || baseline), weighted as the KL.", by_category=False)
JS = _nats("js_mean", "lower", "Jensen-Shannon divergence, weighted as the KL.", high=LN2, by_category=False)
ACCEPTANCE = _agreement("acceptance", "higher", "Expected acceptance rate 1 - TV, weighted as the KL.")
_TOP1 = _agreement(
    "top1_agreement",
    "higher",
    "Share of tokens with the same most probable token.",
    label="Same top token, items",
    headline=40,
    floor="noise/top1_agreement",
)
_TOP10 = _agreement("top10_agreement", "higher", "Share of the ten most probable tokens that both models have.")
_RBO10 = _agreement("rbo10", "higher", "Rank-biased overlap (p = 0.9) of the ten most probable tokens.")

ITEM_COLUMNS = {ITEM_KL: "kl", _KL_REVERSE: "kl_reverse", JS: "js", _TOP1: "same_top", _TOP10: "top10", _RBO10: "rbo10"}


@metric(
    "divergence",
    keys=(ITEM_KL, _KL_REVERSE, JS, ACCEPTANCE, _TOP1, _TOP10, _RBO10),
    requires=(ITEMS, VARIANT, OPTION_DISTANCES),
    source="Accuracy is Not All You Need, eq. 1; natural log, full vocabulary",
    noise=True,
    weighted=True,
)
def divergence(inputs: MetricInputs) -> list[MetricResult]:
    """Mean over items of the mean over options of the mean over tokens.

    A mean KL has an interval where no item is above the clip: that of the clipped mean (see `mean_kl`).

    Lettered options of one token share a context, so that the mean over them is one divergence per question.
    """

    def means(rows: Int) -> Estimates:
        of_item = {key: inputs.distance(column)[rows] for key, column in ITEM_COLUMNS.items()}
        of_item[ACCEPTANCE] = 1.0 - inputs.distance("tv")[rows]
        groups = inputs.units(rows)
        estimates = {key: Mean.of_scored(of_item[key], groups) for key in divergence.keys}
        return estimates | {key: mean_kl(of_item[key], groups) for key in (ITEM_KL, _KL_REVERSE)}

    return by_subset(inputs, means, families=inputs.view.scored)


_BOUNDS = {
    k: _nats(
        f"kl_top{k}",
        "lower",
        f"Lower bound of KL(baseline || variant), from both lists of the {k} most probable tokens.",
        label=f"KL, at least (top {k}, nats)",
        headline=place,
        floor=f"noise/kl_top{k}",
        unscored=TOO_LONG,
        by_task=True,
        on_request=True,
    )
    for place, k in enumerate(TOP_LADDER, start=31)
}
_KEPT = MetricKey.share(
    "distance/top_kept_mass",
    "neither",
    "The baseline's probability of the tokens in both lists; if it is 1, the bound is the exact KL.",
    unchanged=1.0,
    by_category=False,
    on_request=True,
)
_CLIPPED_RESTS = MetricKey(
    name="distance/top_rests_clipped",
    unit="items",
    meaning="Items whose remaining probability is below 0 by rounding; the bound takes it as 0.",
    by_category=False,
    on_request=True,
)


@metric(
    "kl_top_k",
    keys=(*_BOUNDS.values(), _KEPT, _CLIPPED_RESTS),
    requires=(ITEMS, VARIANT, OPTION_BOUNDS),
    source="ours, by the data-processing inequality; weighted as Accuracy is Not All You Need, eq. 1",
    noise=True,
)
def kl_top_k(inputs: MetricInputs) -> list[MetricResult]:
    """Mean over items of the mean over options of the mean over tokens, of the KL after merging what is not in both.

    The tokens in both lists keep their mass; all others are one token. Merging never raises a divergence. Items are
    those that were asked with lists: of long options a sample, because lists cost a server more than the answers. The
    interval is that of `mean_kl`.
    """
    assert inputs.variant is not None and inputs.variant.option_bounds is not None  # `requires` has been checked
    bounds = inputs.variant.option_bounds
    lengths = set(bounds.column("k").tolist())
    if not lengths <= set(_BOUNDS):
        return []  # lists that are too short for a bound of their own
    if len(lengths) > 1:
        raise DataError("Bounds from lists of several lengths cannot be averaged", got=sorted(lengths))
    key = _BOUNDS[lengths.pop()]
    kl, kept, clipped = (option_means(inputs.view, bounds, name) for name in ("kl", "kept_baseline", "clipped"))
    asked = np.zeros(len(kl), dtype=bool)
    asked[inputs.view.locate(bounds)] = True  # with lists: other items are not in the sample, and not unscored

    def means(rows: Int) -> Estimates:
        rows = rows[asked[rows]]
        scored = np.isfinite(kl[rows])
        left, groups = int((~scored).sum()), inputs.view.group[rows]
        return {
            key: mean_kl(kl[rows], groups),
            _KEPT: Mean.of_scored(np.minimum(kept[rows], 1.0), groups),
            _CLIPPED_RESTS: Number(float((clipped[rows][scored] > 0).sum()), int(scored.sum()), left),
        }

    return by_subset(inputs, means, families=inputs.view.scored)
