"""Long contexts: the KL of running text at several depths, and how it grows with the tokens before."""

import numpy as np

from mlflow_compress.metrics.core.estimates import Estimate, Mean, Number, of_subset
from mlflow_compress.metrics.core.metric_inputs import MetricInputs
from mlflow_compress.metrics.core.metric_registry import GateValue, MetricKey, metric, upper_end
from mlflow_compress.metrics.core.requirements import ITEMS, OPTION_DISTANCES, VARIANT, family
from mlflow_compress.metrics.stats.arrays import Float, Int
from mlflow_compress.metrics.stats.intervals import FEWEST_GROUPS
from mlflow_compress.records import MetricResult

LONG_TEXT = "long_text"
LONG_KL = MetricKey(
    name="distance/long_kl",
    direction="lower",
    unit="nats",
    meaning="Mean KL(baseline || variant) of text in long contexts; also by length (task) and depth (category).",
    label="KL, long contexts (nats)",
    headline=71,
    floor="noise/long_kl",
    on_main_run=False,
    by_task=True,
    on_request=True,
)
SLOPE = MetricKey(
    name="distance/long_kl_slope",
    direction="lower",
    low=-np.inf,
    unit="nats per 1,000 tokens",
    meaning="How much that KL grows per 1,000 tokens of context, within a text (least squares).",
    label="KL, growth per 1,000 tokens",
    headline=72,
    counted="texts",
    floor="noise/long_kl_slope",
    on_main_run=False,
    by_category=False,
    by_task=True,
    on_request=True,
    gate=GateValue("gate/long_kl_slope_upper", upper_end),
    gate_label="growth of the KL per 1,000 tokens",
    noticed="growth of the KL per 1,000 tokens of context",
)


def slope_parts(kl: Float, tokens: Float, text: Int) -> tuple[Float, Float]:
    """Return what each text adds to numerator and denominator of the slope, both of shape (n_texts,).

    With x the thousands of tokens before, y the KL, and bars for a text's own means:
    ``sum((x - x̄)(y - ȳ))`` and ``sum((x - x̄)²)``. Texts with a value at one depth only say nothing, and are left out.
    """
    _, code = np.unique(text, return_inverse=True)
    count = np.bincount(code)
    x = tokens / 1000.0
    x = x - (np.bincount(code, weights=x) / count)[code]
    y = kl - (np.bincount(code, weights=kl) / count)[code]
    above, below = (np.bincount(code, weights=part).astype(np.float64) for part in (x * y, x * x))
    return above[below > 0], below[below > 0]


def tokens_before(item_id: str) -> int:
    """Return the number of tokens before an item of running text, in which its id ends: 512 of "3 text@512"."""
    return int(item_id.rpartition("@")[2])


@metric(
    "long_context",
    keys=(LONG_KL, SLOPE),
    requires=(ITEMS, VARIANT, OPTION_DISTANCES, family(LONG_TEXT)),
    source="ours; least squares with a mean per text (within estimator), intervals from a bootstrap over texts",
    noise=True,
)
def long_context(inputs: MetricInputs) -> list[MetricResult]:
    """Mean over items of the mean KL of their tokens, and the slope ``sum_d a_d / sum_d b_d`` of `slope_parts`.

    The slope is that of least squares with an intercept per text, so that texts that are harder than others do not
    count as growth. Its interval is the studentised bootstrap's, which draws texts; fewer than `FEWEST_GROUPS` have
    none. Accuracy, flips and KL of needles and copies by depth and length are those of every task and category.
    """
    view = inputs.view
    kl = inputs.distance("kl")
    before = np.array(
        [tokens_before(i) if f == LONG_TEXT else 0 for i, f in zip(view.item_id, view.family, strict=True)]
    )
    results = []
    for subset in inputs.subsets((LONG_TEXT,), pooled=(LONG_TEXT,)):
        rows = subset.rows[np.isfinite(kl[subset.rows])]
        if not len(rows):
            continue
        estimates: dict[MetricKey, Estimate] = {LONG_KL: Mean.of(kl[rows], inputs.units(rows), skewed=True)}
        above, below = slope_parts(kl[rows], before[rows].astype(np.float64), view.group[rows])
        if subset.category is None and len(above):
            interval = inputs.settings.skewed_interval(above, below) if len(above) >= FEWEST_GROUPS else None
            estimates[SLOPE] = Number(float(above.sum() / below.sum()), len(above), interval=interval)
        results += of_subset(inputs, subset, estimates, n_unscored=len(subset.rows) - len(rows))
    return results
