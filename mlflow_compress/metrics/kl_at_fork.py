"""KL along the baseline's own greedy answers, up to the token where the answers part and behind it."""

from __future__ import annotations

import numpy as np

from mlflow_compress.metrics.core.greedy_tokens import REQUIRES, forced_tokens, forks
from mlflow_compress.metrics.core.item_table import ItemSubset
from mlflow_compress.metrics.core.metric_inputs import MetricInputs
from mlflow_compress.metrics.core.metric_registry import METRICS, MetricKey, metric
from mlflow_compress.metrics.stats.bootstrap import cluster_sums, studentized_interval
from mlflow_compress.records import MetricResult


def _key(name: str, meaning: str) -> MetricKey:
    return MetricKey(
        name=f"judge/{name}",
        direction="lower",
        low=0.0,
        high=np.inf,
        unit="nats",
        meaning=meaning,
        counted="tokens",
    )


ALL = _key(
    "kl_greedy",
    "Mean KL(baseline || variant) per token of the baseline's greedy answers, over the whole vocabulary.",
)
BEFORE = _key(
    "kl_to_fork", "Mean KL per token of the baseline's greedy answers, up to the first divergent token and with it."
)
BEHIND = _key("kl_behind_fork", "Mean KL per token of the baseline's greedy answers, behind the first divergent token.")


@METRICS.register("kl_at_fork")
@metric(
    keys=(ALL, BEFORE, BEHIND),
    requires=REQUIRES,
    source="ours; the divergence of eq. 1 of Accuracy is Not All You Need, on the text of arXiv 2311.01544",
)
def kl_at_fork(inputs: MetricInputs) -> list[MetricResult]:
    """Means over tokens under teacher forcing; the studentised bootstrap draws answers.

    The token at which the answers part counts to the part before: there both models still read the same text that both
    would have written. Equal answers are wholly before. Behind the fork the variant reads a text that it would not have
    written. There is no result for a part without tokens.
    """
    found, s = forced_tokens(inputs), inputs.settings
    before = found.places.index < forks(inputs).time[found.places.answer]
    everything = ItemSubset(None, None, np.empty(0, dtype=np.int64))
    results = []
    for key, part in ((ALL, np.ones(len(before), dtype=bool)), (BEFORE, before), (BEHIND, ~before)):
        if not part.any():
            continue
        sums = cluster_sums(found.kl[part], found.places.answer[part])
        interval = studentized_interval(sums[:, 0], sums[:, 1], resamples=s.resamples, level=s.level, seed=s.seed)
        value = float(found.kl[part].mean())
        results.append(everything.result(key.name, value, interval, n=int(part.sum()), level=s.level))
    return results
