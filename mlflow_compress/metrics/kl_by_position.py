"""KL on the text that the baseline itself wrote: as a whole, by place in the answer, inside and outside reasoning."""

from collections.abc import Iterator

import numpy as np

from mlflow_compress.metrics.core.estimates import Ratio, of_subset
from mlflow_compress.metrics.core.item_table import ItemSubset
from mlflow_compress.metrics.core.metric_inputs import MetricInputs
from mlflow_compress.metrics.core.metric_registry import MetricKey, metric
from mlflow_compress.metrics.core.requirements import TOKEN_DISTANCES, TOKEN_SCORES, TRACES, VARIANT
from mlflow_compress.metrics.core.token_groups import matched
from mlflow_compress.metrics.greedy_answers import AnswerPlaces, answer_places
from mlflow_compress.metrics.stats.arrays import Bool, finite
from mlflow_compress.metrics.stats.intervals import group_sums
from mlflow_compress.records import MetricResult, Traces

TRACES_KL = MetricKey(
    name="distance/traces_kl",
    direction="lower",
    unit="nats",
    meaning="Mean KL(baseline || variant) per token of text that the baseline wrote; also by place in the answer.",
    label="KL, own text (nats)",
    headline=75,
    floor="noise/traces_kl",
    counted="tokens",
    on_request=True,
)
REASONING, ANSWER = "reasoning", "answer"


def position_names(n_tokens: int) -> list[str]:
    """Return the names of the places in answers of up to `n_tokens`: 1, 2-3, 4-7, ..., counted from 1."""
    starts = [2**k for k in range(int(n_tokens).bit_length())]
    return [f"tokens {start}-{2 * start - 1}" if start > 1 else "token 1" for start in starts]


def _parts(traces: Traces, places: AnswerPlaces) -> Iterator[tuple[str | None, Bool]]:
    """Iterate over the named parts of the text, and which tokens belong to each; None is everything."""
    n = len(places.index)
    yield None, np.ones(n, dtype=bool)
    bucket = np.frexp(places.index + 1)[1] - 1  # floor(log2(number of the token))
    for number, name in enumerate(position_names(int(places.index.max()) + 1)):
        yield name, bucket == number
    begin, end = (traces.column(f"reasoning_{side}")[places.answer].astype(float) for side in ("begin", "end"))
    if np.isfinite(begin).any():
        inside = (begin <= places.index) & (places.index < end)  # NaN is not: there is no reasoning
        yield REASONING, inside
        yield ANSWER, ~inside


@metric(
    "kl_by_position",
    keys=(TRACES_KL,),
    requires=(VARIANT, TRACES, TOKEN_SCORES, TOKEN_DISTANCES),
    source="ours; the divergence of Accuracy is Not All You Need, eq. 1, on text that the baseline has sampled",
    noise=True,
)
def kl_by_position(inputs: MetricInputs) -> list[MetricResult]:
    """Means over tokens; the studentised bootstrap draws prompts, with all samples of a prompt together. Fewer than
    `FEWEST_GROUPS` prompts have no interval.

    The categories are places in the answer ("tokens 4-7"), and "reasoning" and "answer" where any answer has <think>
    tags. At temperature 1 the sum over an answer's tokens, averaged over answers, estimates the KL between both models'
    distributions of whole answers (chain rule).
    """
    traces, variant = inputs.baseline.traces, inputs.variant
    assert traces is not None and inputs.baseline.token_scores is not None  # `requires` has been checked
    assert variant is not None and variant.token_distances is not None
    [task] = set(traces.column("task"))
    scores = inputs.baseline.token_scores.where(task=task)
    kl = finite("the KL of traces", matched(scores, variant.token_distances.where(task=task), "kl"))
    places = answer_places(traces, scores)
    _, prompt = np.unique(traces.column("item_id").astype(str), return_inverse=True)
    results = []
    for name, rows in _parts(traces, places):
        if rows.any() and (name is None or not inputs.settings.pooled_only):
            mean = Ratio(*group_sums(kl[rows], prompt[places.answer[rows]]))
            subset = ItemSubset(None if name is None else task, name, np.empty(0, dtype=np.int64))
            results += of_subset(inputs, subset, {TRACES_KL: mean})
    return results
