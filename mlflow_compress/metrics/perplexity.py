"""Corpus metrics from token records: perplexities, their ratio, and the distance from the baseline token by token."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from mlflow_compress.metrics.core.item_table import ItemSubset
from mlflow_compress.metrics.core.metric_inputs import MetricInputs
from mlflow_compress.metrics.core.metric_registry import METRICS, Direction, MetricKey, metric
from mlflow_compress.metrics.core.requirements import TOKEN_DISTANCES, TOKEN_SCORES, VARIANT
from mlflow_compress.metrics.core.token_groups import check_same_targets, matched, token_groups
from mlflow_compress.metrics.stats.arrays import Float, finite
from mlflow_compress.metrics.stats.bootstrap import Statistic, bootstrap, cluster_sums, studentized_interval
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


def _ppl_key(name: str, direction: Direction, low: float, unit: str, meaning: str, **more: Any) -> MetricKey:
    return MetricKey(
        name=f"quality/{name}", direction=direction, low=low, high=np.inf, unit=unit, meaning=meaning, **more
    )


@METRICS.register("perplexity")
@metric(
    keys=(
        _ppl_key(
            "perplexity",
            "lower",
            1.0,
            "perplexity",
            "exp of the mean nll per scored token.",
            label="Perplexity",
            headline=60,
            leaderboard=True,
            difference="quality/perplexity_ratio",
            counted="tokens",
        ),
        _ppl_key("perplexity_baseline", "neither", 1.0, "perplexity", "The baseline's perplexity on the same tokens."),
        _ppl_key(
            "perplexity_ratio",
            "lower",
            0.0,
            "ratio",
            "Variant over baseline perplexity, paired by token.",
            unchanged=1.0,
        ),
    ),
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
    wanted = [("quality/perplexity", _perplexity(len(columns) - 1))]
    if inputs.variant is not None:
        wanted += [("quality/perplexity_baseline", _perplexity(0)), ("quality/perplexity_ratio", _perplexity_ratio)]
    s = inputs.settings
    results = []
    for subset, windows in _subsets(inputs, ours):
        sums = cluster_sums(nll[subset.rows], windows)
        for name, statistic in wanted:
            value = float(statistic(sums.sum(axis=0)))
            interval = bootstrap(sums, statistic, resamples=s.resamples, level=s.level, seed=s.seed, method=s.method)
            results.append(subset.result(name, value, interval, n=len(subset.rows), level=s.level))
    return results


def statistics(baseline: TokenScores, variant: TokenScores, distances: TokenDistances) -> CorpusStatistics:
    """Return every llama.cpp statistic of two runs' token records, over all their corpora.

    Raises
    ------
    AlignmentError
        When the records do not hold the same tokens, or the targets differ.
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


# Columns: kl, tv complement, same_top, dp, dp², top10, rbo10; `cluster_sums` appends the token count as the last.
_STATISTICS: dict[str, Callable[[Float], Float]] = {
    "corpus_kl_mean": _mean_of(0),
    "corpus_acceptance": _mean_of(1),
    "corpus_top1_agreement": _mean_of(2),
    "corpus_dp_mean_pct": _percent_mean,
    "corpus_dp_rms_pct": _percent_rms,
    "corpus_top10_agreement": _mean_of(5),
    "corpus_rbo10": _mean_of(6),
}


def _key(name: str, direction: Direction, low: float, high: float, unit: str, meaning: str, **more: Any) -> MetricKey:
    unchanged = 1.0 if direction == "higher" else 0.0
    return MetricKey(
        name=f"distance/{name}",
        direction=direction,
        low=low,
        high=high,
        unit=unit,
        meaning=meaning,
        unchanged=unchanged,
        counted="tokens",
        **more,
    )


@METRICS.register("corpus_distance")
@metric(
    keys=(
        _key(
            "corpus_kl_mean",
            "lower",
            0.0,
            np.inf,
            "nats",
            "Mean KL(baseline || variant) per corpus token.",
            label="KL, corpus (nats)",
            headline=70,
            floor="noise/corpus_kl_mean",
        ),
        _key("corpus_kl_p99", "lower", 0.0, np.inf, "nats", "99th percentile of the KL over corpus tokens."),
        _key("corpus_kl_max", "lower", 0.0, np.inf, "nats", "Largest KL of any corpus token."),
        _key("corpus_acceptance", "higher", 0.0, 1.0, "share", "Expected acceptance rate 1 - TV on corpus tokens."),
        _key(
            "corpus_top1_agreement",
            "higher",
            0.0,
            1.0,
            "share",
            "Corpus tokens with the same most probable token.",
            label="Same top token, corpus",
            headline=80,
            floor="noise/corpus_top1_agreement",
        ),
        _key("corpus_top10_agreement", "higher", 0.0, 1.0, "share", "Ten most probable corpus tokens that both have."),
        _key("corpus_rbo10", "higher", 0.0, 1.0, "share", "Rank-biased overlap of the ten most probable tokens."),
        _key("corpus_dp_mean_pct", "neither", -100.0, 100.0, "percent", "Mean change of the target's probability."),
        _key(
            "corpus_dp_rms_pct",
            "lower",
            0.0,
            100.0,
            "percent",
            "RMS change of the target's probability.",
            floor="noise/corpus_dp_rms_pct",
        ),
    ),
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
    s = inputs.settings
    results = []
    for subset, windows in _subsets(inputs, ours):
        sums = cluster_sums(columns[subset.rows], windows)
        n = len(subset.rows)
        for name, statistic in _STATISTICS.items():
            value = float(statistic(sums.sum(axis=0)))
            if name == "corpus_kl_mean":  # skewed
                interval = studentized_interval(
                    sums[:, 0], sums[:, -1], resamples=s.resamples, level=s.level, seed=s.seed
                )
            else:
                interval = bootstrap(
                    sums, statistic, resamples=s.resamples, level=s.level, seed=s.seed, method=s.method
                )
            results.append(subset.result(f"distance/{name}", value, interval, n=n, level=s.level))
        p99, highest = np.quantile(kl[subset.rows], [0.99, 1.0])
        results.append(subset.result("distance/corpus_kl_p99", float(p99), n=n, level=s.level))
        results.append(subset.result("distance/corpus_kl_max", float(highest), n=n, level=s.level))
    return results
