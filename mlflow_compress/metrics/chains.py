"""The baseline's own chains of thought under both models: where the KL sits, where they would part, and the answer."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import accumulate

import numpy as np

from mlflow_compress.metrics.core.estimates import (
    Estimate,
    Mean,
    Number,
    Proportion,
    Ratio,
    Resampled,
    of_subset,
    pooled,
)
from mlflow_compress.metrics.core.item_table import ItemSubset
from mlflow_compress.metrics.core.metric_inputs import MetricInputs
from mlflow_compress.metrics.core.metric_registry import MetricKey, keys_of, metric
from mlflow_compress.metrics.core.requirements import CHAIN_DISTANCES, CHAIN_SCORES, CHAINS, VARIANT
from mlflow_compress.metrics.core.token_groups import check_same_targets, matched
from mlflow_compress.metrics.greedy_answers import Forks, answer_places, still_equal
from mlflow_compress.metrics.hesitation import marker_starts
from mlflow_compress.metrics.stats.arrays import Bool, Float, Int, finite
from mlflow_compress.metrics.stats.bootstrap import ratio_of_ratios
from mlflow_compress.metrics.stats.intervals import group_sums
from mlflow_compress.records import Chains, MetricResult

SCORED_CHAINS = (VARIANT, CHAINS, CHAIN_SCORES, CHAIN_DISTANCES)
_SOURCE = "ours, after arXiv 2606.00206, which finds the KL on hesitation words where the baseline itself is uncertain"
_FORKING_SHARE = 0.2
"""Share of the tokens of thoughts, those of largest entropy, that are forking places, as in arXiv 2506.01939."""
_EDGE = 100  # tokens at the beginning of a thought, and at its end, that are looked at alone


@dataclass(frozen=True)
class _ChainTokens:
    """Both models on every token of the baseline's chains; every array has shape (n_tokens,)."""

    question: Int  # Number of the token's chain; every question has one
    index: Int  # Place in the chain, from 0
    n_thought: Int  # Tokens of the chain that are thought
    kl: Float  # ``KL(P_b || P_q)`` in nats
    entropy: Float  # Of the baseline, in nats
    same_top: Bool  # Whether the most probable token is the same
    gain: Float  # Log-probability of the token, the variant's minus the baseline's, in nats
    answer: Bool  # Whether the token is of the right answer
    marker: Bool  # Whether a hesitation marker begins with the token

    @property
    def thought(self) -> Bool:
        return np.asarray(self.index < self.n_thought)

    @property
    def forking(self) -> Bool:
        """Tokens of thoughts with an entropy above that of four fifths of them; ties at the limit are below."""
        thought = self.thought
        if not thought.any():
            return thought
        return np.asarray(thought & (self.entropy > np.quantile(self.entropy[thought], 1.0 - _FORKING_SHARE)))


def chain_tokens(inputs: MetricInputs) -> _ChainTokens:
    """Return what both models make of the baseline's chains; scores of other tokens are an error."""
    run, variant = inputs.baseline, inputs.variant
    assert run.chains is not None and run.chain_scores is not None  # `requires` has been checked
    assert variant is not None and variant.chain_scores is not None and variant.chain_distances is not None
    parts: dict[str, list[Float]] = {}
    n_before = 0
    for task in sorted(set(run.chains.column("task"))):
        chains, ours = run.chains.where(task=task), run.chain_scores.where(task=task)
        theirs, moved = variant.chain_scores.where(task=task), variant.chain_distances.where(task=task)
        check_same_targets(ours, theirs)
        places = answer_places(chains, ours)
        begin, end = (chains.column(f"answer_{side}")[places.answer].astype(float) for side in ("begin", "end"))
        firsts = _marker_tokens(chains)
        columns = {
            "question": n_before + places.answer,
            "index": places.index,
            "n_thought": chains.column("n_thought")[places.answer],
            "kl": finite("the KL of chains", matched(ours, moved, "kl")),
            "entropy": finite("the entropy of chains", ours.column("entropy").astype(np.float64)),
            "same_top": matched(ours, moved, "same_top") > 0.5,
            "gain": ours.column("nll") - matched(ours, theirs, "nll"),
            "answer": (begin <= places.index) & (places.index < end),  # NaN is not: there is no right answer
            "marker": [
                at in firsts[row] for row, at in zip(places.answer.tolist(), places.index.tolist(), strict=True)
            ],
        }
        for name, values in columns.items():
            parts.setdefault(name, []).append(np.asarray(values))
        n_before += len(chains)
    return _ChainTokens(**{name: np.concatenate(values) for name, values in parts.items()})  # type: ignore[arg-type]


def _marker_tokens(chains: Chains) -> list[set[int]]:
    """Return, per chain, the tokens of the thought with which a hesitation marker begins."""
    found = []
    for row in chains.table.select(["pieces", "n_thought"]).to_pylist():
        pieces = row["pieces"][: row["n_thought"]]
        ends = np.array([*accumulate(map(len, pieces))])
        starts = marker_starts("".join(pieces))
        found.append(set(np.searchsorted(ends, starts, side="right").tolist()))
    return found


def chain_parts(tokens: _ChainTokens) -> Iterator[tuple[str, Bool]]:
    """Iterate over the named parts of the chains, and which tokens belong to each."""
    thought, index, n = tokens.thought, tokens.index, tokens.n_thought
    tenth = np.where(thought, 10 * index // np.maximum(n, 1), -1)
    for number in range(10):
        yield f"tenth {number + 1} of the thought", tenth == number
    yield f"first {_EDGE} tokens of the thought", thought & (index < _EDGE)
    yield f"last {_EDGE} tokens of the thought", thought & (index >= n - _EDGE)
    yield "behind the thought", ~thought
    forking = tokens.forking
    yield "forking places", forking
    yield "other places of the thought", thought & ~forking
    yield "hesitation markers", tokens.marker
    yield "other words of the thought", thought & ~tokens.marker
    yield "hesitation markers at forking places", forking & tokens.marker
    yield "other forking places", forking & ~tokens.marker


_key = keys_of("reasoning", unit="nats", counted="tokens", on_request=True)
CHAIN_KL = _key(
    "chain_kl",
    "lower",
    "Mean KL(baseline || variant) per token of the baseline's own reasoning and answers; also by place.",
    label="KL, own thoughts (nats)",
    headline=134,
    floor="noise/chain_kl",
)

_times = keys_of("reasoning", unit="ratio", counted="tokens", on_request=True)
_FORKING_RATIO = _times(
    "chain_kl_forking_ratio",
    "neither",
    "Mean KL at forking places of the baseline's reasoning, relative to that at its other tokens.",
)
_MARKER_RATIO = _times(
    "chain_kl_hesitation_ratio",
    "neither",
    "Mean KL where hesitation markers begin in the baseline's reasoning, relative to that elsewhere.",
)
_MARKER_FORKING_RATIO = _times(
    "chain_kl_hesitation_forking_ratio",
    "neither",
    "The same at forking places alone: markers against other forking places.",
)

_PARTED = MetricKey.percent(
    "reasoning/chain_parted_pct",
    "lower",
    "Answers of the baseline, reasoning included, in which the most probable token differs at least once.",
    floor="noise/chain_parted_pct",
    counted="answers",
    on_request=True,
)
FIRST_PARTED = keys_of("reasoning", unit="tokens", counted="answers", on_request=True)(
    "chain_first_parted_token",
    "higher",
    "Median number of the first token of the baseline's chain at which the most probable token differs.",
    low=1.0,
    unchanged=np.inf,
)
_ANSWER = keys_of("reasoning", unit="nats", on_request=True)(
    "chain_answer_logprob_delta",
    "higher",
    "Log-probability of the right answer after the baseline's own reasoning: variant minus baseline.",
    low=-np.inf,
)


@metric("chain_kl", keys=(CHAIN_KL, _PARTED), requires=SCORED_CHAINS, source=_SOURCE, noise=True)
def chain_kl(inputs: MetricInputs) -> list[MetricResult]:
    """``chain_kl = sum_t KL(P_b(.|x_<t) || P_q(.|x_<t))/T`` in nats, over the T tokens x of the baseline's chains.

    One pass without decoding, over the whole vocabulary. The prompt is not scored, the end token is. It is a mean over
    tokens, so long chains count more. The studentised bootstrap draws questions; fewer than `FEWEST_GROUPS` have no
    interval.

    The categories are places: tenths of each thought, its first and last 100 tokens, and what is behind it; forking
    places, which are the tokens of all thoughts with an entropy of the baseline above that of four fifths of them, and
    the others; tokens with which a hesitation marker begins, and the others. Which tokens fork is taken as known by the
    intervals. ``chain_parted_pct = 100 #(chains in which the argmax differs)/n``.
    """
    tokens = chain_tokens(inputs)
    parted = np.zeros(int(tokens.question.max()) + 1, dtype=bool)
    parted[tokens.question[~tokens.same_top]] = True
    everything = np.ones(len(tokens.kl), dtype=bool)
    results = pooled(inputs, {CHAIN_KL: _mean(tokens, everything), _PARTED: Proportion.of(parted)})
    for name, rows in () if inputs.settings.pooled_only else chain_parts(tokens):
        if rows.any():
            subset = ItemSubset("own thoughts", name, np.empty(0, dtype=np.int64))
            results += of_subset(inputs, subset, {CHAIN_KL: _mean(tokens, rows)})
    return results


def _mean(tokens: _ChainTokens, rows: Bool) -> Ratio:
    return Ratio(*group_sums(tokens.kl[rows], tokens.question[rows]))


@metric(
    "chain_places",
    keys=(_FORKING_RATIO, _MARKER_RATIO, _MARKER_FORKING_RATIO, FIRST_PARTED, _ANSWER),
    requires=SCORED_CHAINS,
    source=f"{_SOURCE}; first divergent token of arXiv 2311.01544, here on a drawn chain",
)
def chain_places(inputs: MetricInputs) -> list[MetricResult]:
    """Ratios of the mean KL of two parts of the thoughts (see `chain_kl`); the bootstrap draws questions.

    There is no ratio where a part has no tokens, or the KL of the second is 0.

    `chain_first_parted_token` counts from 1: there greedy decoding of both models, which have read the chain so far,
    would write different tokens. It is the median with Brookmeyer and Crowley's interval; chains in which this never
    happens do not part, and there is no result where fewer than half ever do.

    ``chain_answer_logprob_delta = mean_i sum_t log q(x_t|x_<t) - log p(x_t|x_<t)`` in nats, over the tokens of the
    answer that is read behind the thought, of the questions i whose chain answers right. The thought before it is the
    baseline's for both models: so it says how far the answer moved, not the way. Others have no value and are counted.
    """
    tokens = chain_tokens(inputs)
    thought, forking, marker = tokens.thought, tokens.forking, tokens.marker
    estimates: dict[MetricKey, Estimate] = {}
    for key, part, other in (
        (_FORKING_RATIO, forking, thought & ~forking),
        (_MARKER_RATIO, marker, thought & ~marker),
        (_MARKER_FORKING_RATIO, forking & marker, forking & ~marker),
    ):
        columns = [column for rows in (part, other) for column in (tokens.kl * rows, rows)]
        sums = [np.bincount(tokens.question, weights=column) for column in columns]
        if part.any() and sums[2].sum() > 0.0:
            estimates[key] = Resampled(np.column_stack(sums), ratio_of_ratios)
    n_tokens = np.bincount(tokens.question)
    time = n_tokens.copy()
    np.minimum.at(time, tokens.question[~tokens.same_top], tokens.index[~tokens.same_top] + 1)
    parted = np.bincount(tokens.question, weights=~tokens.same_top) > 0
    curve = still_equal(Forks(time, parted), level=inputs.settings.level)
    right = np.bincount(tokens.question, weights=tokens.answer) > 0
    gain = np.where(right, np.bincount(tokens.question, weights=tokens.gain * tokens.answer), np.nan)
    estimates[_ANSWER] = Mean.of_scored(gain, skewed=True)
    results = pooled(inputs, estimates)
    if curve.median is not None:
        low, high = curve.median_interval
        [found] = pooled(inputs, {FIRST_PARTED: Number(curve.median, len(time))})
        results.append(replace(found, low=low, high=high))
    return results
