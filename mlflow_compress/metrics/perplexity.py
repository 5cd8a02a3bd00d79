"""Corpus metrics from token records: perplexities, their ratio, and the distance from the baseline token by token."""

import math
from collections.abc import Callable, Iterator
from functools import partial

import numpy as np

from mlflow_compress.metrics.core.estimates import Estimate, Number, Ratio, of_subset
from mlflow_compress.metrics.core.item_table import ItemSubset
from mlflow_compress.metrics.core.metric_inputs import MetricInputs, Requirement
from mlflow_compress.metrics.core.metric_registry import MetricKey, keys_of, metric
from mlflow_compress.metrics.core.requirements import TOKEN_DISTANCES, TOKEN_SCORES, VARIANT
from mlflow_compress.metrics.core.token_groups import check_same_targets, matched, token_groups
from mlflow_compress.metrics.kl_tail import top_share_pct
from mlflow_compress.metrics.stats.arrays import Float, Int, finite
from mlflow_compress.metrics.stats.corpus_statistics import CorpusStatistics, corpus_statistics
from mlflow_compress.metrics.stats.intervals import group_sums
from mlflow_compress.records import MetricResult, RunRecords, TokenDistances, TokenScores


def _scores(run: RunRecords) -> TokenScores:
    assert run.token_scores is not None  # `requires` has been checked
    return run.token_scores


def _subsets(inputs: MetricInputs, tokens: TokenScores) -> Iterator[tuple[ItemSubset, Callable[..., Ratio]]]:
    """Iterate over all tokens and those of each corpus, with what makes an estimate of values, by document."""
    groups = token_groups(tokens)
    subsets = [ItemSubset(None, None, np.arange(len(tokens)))]
    if not inputs.settings.pooled_only:
        subsets += [
            ItemSubset(str(groups.tasks[code]), None, np.flatnonzero(groups.task == code))
            for code in np.argsort(groups.tasks.astype(str))
        ]
    for subset in subsets:
        yield subset, partial(_ratio, rows=subset.rows, documents=groups.document[subset.rows])


def _ratio(values: Float, transform: Callable[[float], float] = float, *, rows: Int, documents: Int) -> Ratio:
    return Ratio(*group_sums(values[rows], documents), transform)


def _rest(share: float) -> float:
    """Return what a share leaves: agreement has the interval of disagreement, whose large values are the rare ones."""
    return 1.0 - share


_MOST_NATS = 709.0
"""A mean negative log-likelihood above it has a perplexity above 8e307, and soon above every float."""


def _too_unlikely(inputs: MetricInputs) -> str | None:
    """Return which text has no perplexity that a float can hold, and how far its mean is above `_MOST_NATS`."""
    if TOKEN_SCORES.missing(inputs):
        return None  # which is said of the tokens
    for who, run in (("baseline", inputs.baseline), ("variant", inputs.variant)):
        if run is None or not ((nll := _scores(run).column("nll")) > _MOST_NATS).any():
            continue
        groups = token_groups(_scores(run))
        texts = {name: groups.task == code for code, name in enumerate(groups.tasks)}
        for name, rows in {**texts, "all texts": np.ones(len(nll), dtype=np.bool_)}.items():
            if (mean := nll[rows].mean()) > _MOST_NATS:
                return (
                    f"the {who}'s mean negative log-likelihood on {name} is {mean:,.1f} nats per token: above "
                    f"{_MOST_NATS:g}, the perplexity is larger than any number that can be stored"
                )
    return None


PERPLEXITY_EXISTS = Requirement("perplexity_exists", _too_unlikely)

_key = keys_of("quality", unit="perplexity", low=1.0)
_RATIO = keys_of("quality", unit="ratio")(
    "perplexity_ratio", "lower", "Variant over baseline perplexity, paired by token.", unchanged=1.0
)
_PERPLEXITY = _key(
    "perplexity",
    "lower",
    "exp of the mean nll per scored token.",
    label="Perplexity",
    headline=60,
    leaderboard=True,
    difference=_RATIO.name,
    counted="tokens",
)
PERPLEXITY_BASELINE = _key("perplexity_baseline", "neither", "The baseline's perplexity on the same tokens.")


@metric(
    "perplexity",
    keys=(_PERPLEXITY, PERPLEXITY_BASELINE, _RATIO),
    requires=(TOKEN_SCORES, PERPLEXITY_EXISTS),
    source="llama.cpp tools/perplexity; intervals from a bootstrap over documents, because tokens are not independent",
)
def perplexity(inputs: MetricInputs) -> list[MetricResult]:
    """``exp(mean nll)`` pooled over all corpora's tokens and by corpus; no interval of fewer than 20 documents.

    The studentised bootstrap draws documents, and its ends are those of the mean nll, transformed. Of a text of 5,000
    windows and more whose documents are not known 20 stretches are drawn. An interval with an end that no float can
    hold is left out.
    """
    ours = _scores(inputs.baseline)
    columns = [finite("the baseline's nll", ours.column("nll"))]
    if inputs.variant is not None:
        theirs = _scores(inputs.variant)
        check_same_targets(ours, theirs)
        columns.append(finite("the variant's nll", matched(ours, theirs, "nll")))
    results = []
    for subset, mean in _subsets(inputs, ours):
        estimates: dict[MetricKey, Estimate] = {_PERPLEXITY: mean(columns[-1], math.exp)}
        if inputs.variant is not None:
            estimates |= {
                PERPLEXITY_BASELINE: mean(columns[0], math.exp),
                _RATIO: mean(columns[1] - columns[0], math.exp),
            }
        results += of_subset(inputs, subset, estimates)
    return results


def statistics(baseline: TokenScores, variant: TokenScores, distances: TokenDistances) -> CorpusStatistics:
    """Return every llama.cpp statistic of two runs' token records; other tokens or targets are an `AlignmentError`."""
    token_groups(baseline)  # refuses repeated tokens
    check_same_targets(baseline, variant)
    return corpus_statistics(
        nll_baseline=baseline.column("nll"),
        nll_variant=matched(baseline, variant, "nll"),
        kl=matched(baseline, distances, "kl"),
        p_baseline=baseline.column("p_target"),
        p_variant=matched(baseline, variant, "p_target"),
        same_top=matched(baseline, distances, "same_top"),
    )


_nats = keys_of("distance", unit="nats", counted="tokens")
_agreement = keys_of("distance", unit="share", high=1.0, unchanged=1.0, counted="tokens")
CORPUS_KL = _nats(
    "corpus_kl_mean",
    "lower",
    "Mean KL(baseline || variant) per corpus token; also by the number of tokens before it.",
    label="KL, corpus (nats)",
    headline=70,
    floor="noise/corpus_kl_mean",
)
_CONTEXTS = 8
"""Most ranges of the number of tokens before; their width is a power of two."""
GATED_DOCUMENTS, GATED_TOP_PCT = 200, 2.5
"""Fewest documents, and the share of the mean KL that each holds less of, where a gate reads the mean's upper end.

Chosen by simulation on real samples (`benchmarks/interval_coverage.py`): no such end is too low in more than 2.9 % of
the draws. With 5 % one is in 11 %, because a sample that missed the largest document looks harmless.
"""
TOP_DOCUMENT = MetricKey.percent(
    "distance/corpus_kl_share_top_document_pct",
    "neither",
    f"Share of the mean KL that one document holds; a gate needs less than {GATED_TOP_PCT:g} %, and "
    f"{GATED_DOCUMENTS} documents or more.",
    counted="documents",
)
_KL_P99 = _nats("corpus_kl_p99", "lower", "99th percentile of the KL over corpus tokens.")
_KL_MAX = _nats("corpus_kl_max", "lower", "Largest KL of any corpus token.")
_ACCEPTANCE = _agreement("corpus_acceptance", "higher", "Expected acceptance rate 1 - TV on corpus tokens.")
_TOP1 = _agreement(
    "corpus_top1_agreement",
    "higher",
    "Corpus tokens with the same most probable token.",
    label="Same top token, corpus",
    headline=80,
    floor="noise/corpus_top1_agreement",
)
_TOP10 = _agreement("corpus_top10_agreement", "higher", "Ten most probable corpus tokens that both have.")
_RBO10 = _agreement("corpus_rbo10", "higher", "Rank-biased overlap of the ten most probable tokens.")
_DP_MEAN = MetricKey.percent(
    "distance/corpus_dp_mean_pct", "neither", "Mean change of the target's probability.", low=-100.0, counted="tokens"
)
_DP_RMS = MetricKey.percent(
    "distance/corpus_dp_rms_pct",
    "lower",
    "RMS change of the target's probability.",
    floor="noise/corpus_dp_rms_pct",
    counted="tokens",
)


@metric(
    "corpus_distance",
    keys=(CORPUS_KL, TOP_DOCUMENT, _KL_P99, _KL_MAX, _ACCEPTANCE, _TOP1, _TOP10, _RBO10, _DP_MEAN, _DP_RMS),
    requires=(VARIANT, TOKEN_SCORES, TOKEN_DISTANCES),
    source="llama.cpp tools/perplexity --kl-divergence; intervals from a bootstrap over documents",
    noise=True,
)
def corpus_distance(inputs: MetricInputs) -> list[MetricResult]:
    """Token-level distances pooled over all corpora's tokens and by corpus; `statistics` has every llama.cpp number."""
    ours = _scores(inputs.baseline)
    assert inputs.variant is not None and inputs.variant.token_distances is not None
    theirs, distances = _scores(inputs.variant), inputs.variant.token_distances
    check_same_targets(ours, theirs)
    dp = matched(ours, theirs, "p_target") - ours.column("p_target")
    kl = finite("the corpus KL", matched(ours, distances, "kl"))
    rejected = matched(ours, distances, "tv")
    top, top10, rbo10 = (matched(ours, distances, name) for name in ("same_top", "top10", "rbo10"))
    results = []
    for subset, mean in _subsets(inputs, ours):
        n = len(subset.rows)
        p99, highest = np.quantile(kl[subset.rows], [0.99, 1.0])
        estimates: dict[MetricKey, Estimate] = {
            CORPUS_KL: (mean_kl := mean(kl)),
            _ACCEPTANCE: mean(rejected, _rest),
            _TOP1: mean(1.0 - top, _rest),
            _DP_MEAN: mean(100.0 * dp),
            _DP_RMS: mean(1e4 * dp * dp, math.sqrt),
            _TOP10: mean(1.0 - top10, _rest),
            _RBO10: mean(1.0 - rbo10, _rest),
            _KL_P99: Number(float(p99), n),
            _KL_MAX: Number(float(highest), n),
        }
        sums = np.maximum(mean_kl.sums, 0.0)
        if sums.sum() > 0.0:
            estimates[TOP_DOCUMENT] = Number(top_share_pct(sums, 1), len(sums))
        results += of_subset(inputs, subset, estimates)
        if subset.task is not None:
            results += _by_context(inputs, subset, kl)
    return results


def _by_context(inputs: MetricInputs, subset: ItemSubset, kl: Float) -> list[MetricResult]:
    """Return the mean KL of one corpus in at most `_CONTEXTS` equally wide ranges of the number of tokens before."""
    scores = _scores(inputs.baseline)
    position = scores.column("position").astype(np.int64)[subset.rows]
    document = token_groups(scores).document[subset.rows]
    first, last = int(position.min()), int(position.max())
    width = 1
    while last // width - first // width >= _CONTEXTS:
        width *= 2
    results = []
    for number in range(first // width, last // width + 1):
        rows = subset.rows[inside := position // width == number]
        if len(rows):
            mean = _ratio(kl, rows=rows, documents=document[inside])
            name = f"tokens {number * width}-{(number + 1) * width - 1}"
            results += of_subset(inputs, ItemSubset(subset.task, name, rows), {CORPUS_KL: mean})
    return results
