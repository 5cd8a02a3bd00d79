"""Corpus metrics from token records: perplexities, their ratio, and the distance from the baseline token by token."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from mlflow_compress.metrics.core.estimates import Estimate, Number, OverClusters, of_subset
from mlflow_compress.metrics.core.item_table import ItemSubset
from mlflow_compress.metrics.core.metric_inputs import MetricInputs
from mlflow_compress.metrics.core.metric_registry import METRICS, MetricKey, metric
from mlflow_compress.metrics.core.requirements import TOKEN_DISTANCES, TOKEN_SCORES, VARIANT
from mlflow_compress.metrics.core.token_groups import check_same_targets, matched, token_groups
from mlflow_compress.metrics.stats.arrays import Float, finite
from mlflow_compress.metrics.stats.bootstrap import Statistic, cluster_sums
from mlflow_compress.metrics.stats.corpus_statistics import CorpusStatistics, corpus_statistics
from mlflow_compress.records import MetricResult, RunRecords, TokenDistances, TokenScores


def _scores(run: RunRecords) -> TokenScores:
    assert run.token_scores is not None  # `requires` has been checked
    return run.token_scores


def _subsets(inputs: MetricInputs, tokens: TokenScores) -> Iterator[tuple[ItemSubset, Float]]:
    groups = token_groups(tokens)
    yield ItemSubset(None, None, np.arange(len(tokens))), groups.window.astype(np.float64)
    if inputs.settings.pooled_only:
        return
    for code in np.argsort(groups.tasks.astype(str)):
        rows = np.flatnonzero(groups.task == code)
        yield ItemSubset(str(groups.tasks[code]), None, rows), groups.window[rows].astype(np.float64)


def _perplexity(column: int) -> Statistic:
    return lambda sums: np.asarray(np.exp(sums[..., column] / sums[..., -1]), dtype=np.float64)


def _perplexity_ratio(sums: Float) -> Float:
    return np.asarray(np.exp((sums[..., 1] - sums[..., 0]) / sums[..., -1]), dtype=np.float64)


RATIO = MetricKey(
    name="quality/perplexity_ratio",
    direction="lower",
    unit="ratio",
    meaning="Variant over baseline perplexity, paired by token.",
    unchanged=1.0,
)
PERPLEXITY = MetricKey(
    name="quality/perplexity",
    direction="lower",
    low=1.0,
    unit="perplexity",
    meaning="exp of the mean nll per scored token.",
    label="Perplexity",
    headline=60,
    leaderboard=True,
    difference=RATIO.name,
    counted="tokens",
)
BASELINE = MetricKey(
    name="quality/perplexity_baseline",
    low=1.0,
    unit="perplexity",
    meaning="The baseline's perplexity on the same tokens.",
)


@METRICS.register("perplexity")
@metric(
    keys=(PERPLEXITY, BASELINE, RATIO),
    requires=(TOKEN_SCORES,),
    source="llama.cpp tools/perplexity; intervals from a bootstrap over windows, because tokens are not independent",
)
def perplexity(inputs: MetricInputs) -> list[MetricResult]:
    """``exp(mean nll)`` pooled over all corpora's tokens and by corpus; no interval where there is one window only."""
    ours = _scores(inputs.baseline)
    columns = [finite("the baseline's nll", ours.column("nll"))]
    if inputs.variant is not None:
        theirs = _scores(inputs.variant)
        check_same_targets(ours, theirs)
        columns.append(finite("the variant's nll", matched(ours, theirs, "nll")))
    nll = np.column_stack(columns)
    wanted = {PERPLEXITY: _perplexity(len(columns) - 1)}
    if inputs.variant is not None:
        wanted |= {BASELINE: _perplexity(0), RATIO: _perplexity_ratio}
    results = []
    for subset, windows in _subsets(inputs, ours):
        sums = cluster_sums(nll[subset.rows], windows)
        results += of_subset(inputs, subset, {key: OverClusters(sums, of_key) for key, of_key in wanted.items()})
    return results


def statistics(baseline: TokenScores, variant: TokenScores, distances: TokenDistances) -> CorpusStatistics:
    """Return every llama.cpp statistic of two runs' token records, over all their corpora.

    Raises `AlignmentError`: when the records do not hold the same tokens, or the targets differ.
    """
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


def corpus_confidence(inputs: MetricInputs) -> tuple[Float, Float]:
    """Return the baseline's probability of each corpus token and the KL there, shapes (n_tokens,)."""
    ours = _scores(inputs.baseline)
    assert inputs.variant is not None and inputs.variant.token_distances is not None
    kl = matched(ours, inputs.variant.token_distances, "kl")
    return np.asarray(ours.column("p_target"), dtype=np.float64), kl


def _mean_of(column: int) -> Statistic:
    return lambda sums: np.asarray(sums[..., column] / sums[..., -1], dtype=np.float64)


def _percent_mean(sums: Float) -> Float:
    return np.asarray(100.0 * sums[..., 3] / sums[..., -1], dtype=np.float64)


def _percent_rms(sums: Float) -> Float:
    return np.asarray(100.0 * np.sqrt(sums[..., 4] / sums[..., -1]), dtype=np.float64)


def _nats(name: str, meaning: str, **more: Any) -> MetricKey:
    name = f"distance/corpus_{name}"
    return MetricKey(name=name, direction="lower", unit="nats", meaning=meaning, counted="tokens", **more)


def _agreement(name: str, meaning: str, **more: Any) -> MetricKey:
    return MetricKey.share(f"distance/corpus_{name}", "higher", meaning, unchanged=1.0, counted="tokens", **more)


KL = _nats(
    "kl_mean",
    "Mean KL(baseline || variant) per corpus token.",
    label="KL, corpus (nats)",
    headline=70,
    floor="noise/corpus_kl_mean",
)
KL_P99 = _nats("kl_p99", "99th percentile of the KL over corpus tokens.")
KL_MAX = _nats("kl_max", "Largest KL of any corpus token.")
ACCEPTANCE = _agreement("acceptance", "Expected acceptance rate 1 - TV on corpus tokens.")
TOP1 = _agreement(
    "top1_agreement",
    "Corpus tokens with the same most probable token.",
    label="Same top token, corpus",
    headline=80,
    floor="noise/corpus_top1_agreement",
)
TOP10 = _agreement("top10_agreement", "Ten most probable corpus tokens that both have.")
RBO10 = _agreement("rbo10", "Rank-biased overlap of the ten most probable tokens.")
DP_MEAN = MetricKey.percent(
    "distance/corpus_dp_mean_pct", "neither", "Mean change of the target's probability.", low=-100.0, counted="tokens"
)
DP_RMS = MetricKey.percent(
    "distance/corpus_dp_rms_pct",
    "lower",
    "RMS change of the target's probability.",
    floor="noise/corpus_dp_rms_pct",
    counted="tokens",
)
# Columns: kl, tv complement, same_top, dp, dp², top10, rbo10; `cluster_sums` appends the token count as the last.
_STATISTICS: dict[MetricKey, Statistic] = {
    KL: _mean_of(0),
    ACCEPTANCE: _mean_of(1),
    TOP1: _mean_of(2),
    DP_MEAN: _percent_mean,
    DP_RMS: _percent_rms,
    TOP10: _mean_of(5),
    RBO10: _mean_of(6),
}


@METRICS.register("corpus_distance")
@metric(
    keys=(KL, KL_P99, KL_MAX, ACCEPTANCE, TOP1, TOP10, RBO10, DP_MEAN, DP_RMS),
    requires=(VARIANT, TOKEN_SCORES, TOKEN_DISTANCES),
    source="llama.cpp tools/perplexity --kl-divergence; intervals from a bootstrap over windows",
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
    accepted = 1.0 - matched(ours, distances, "tv")
    top, top10, rbo10 = (matched(ours, distances, name) for name in ("same_top", "top10", "rbo10"))
    columns = np.column_stack([kl, accepted, top, dp, dp * dp, top10, rbo10])
    results = []
    for subset, windows in _subsets(inputs, ours):
        sums, n = cluster_sums(columns[subset.rows], windows), len(subset.rows)
        p99, highest = np.quantile(kl[subset.rows], [0.99, 1.0])
        estimates: dict[MetricKey, Estimate] = {
            key: OverClusters(sums, statistic, skewed=key is KL) for key, statistic in _STATISTICS.items()
        }
        estimates |= {KL_P99: Number(float(p99), n), KL_MAX: Number(float(highest), n)}
        results += of_subset(inputs, subset, estimates)
    return results
