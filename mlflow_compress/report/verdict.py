"""The verdict: one line in plain words, from the numbers alone."""

from __future__ import annotations

from collections.abc import Mapping

from mlflow_compress.records import MetricResult
from mlflow_compress.report.numbers import NATS, SHARE, decimals, interval_text, plain, ratio_text

UNCOMPRESSED = "none"
_SIGNIFICANCE = 0.05
# Flips are called out beside a quiet accuracy when they are at least twice its change and a point more.
_TIMES, _POINTS = 2.0, 1.0


def moved(delta: MetricResult, p: MetricResult | None) -> bool | None:
    """Return whether an accuracy change is significant: by McNemar's p at 0.05, else by its interval, else unknown."""
    if p is not None:
        return p.value < _SIGNIFICANCE
    if delta.low is None or delta.high is None:
        return None
    return not delta.low <= 0 <= delta.high


def _size(label: str, ratio: float | None) -> str:
    if ratio is None:
        return "size not known"
    words = ratio_text(ratio)
    return "not compressed" if label == UNCOMPRESSED and words == "same size" else words


def _accuracy(delta: MetricResult | None, significant: bool | None) -> str:
    if delta is None:
        return "accuracy not measured"
    points = SHARE.factor * delta.value
    if points == 0:
        return "accuracy unchanged"
    # One decimal, more only where a small change would read as zero.
    digits = 1 if abs(points) >= 0.05 else decimals(points, None, None, fewest=1) - 2
    words = {True: "significant", False: "not significant", None: "significance unknown"}[significant]
    return f"accuracy {plain(points, digits, signed=True)} pt ({words})"


def _flips(flips: MetricResult | None) -> str:
    if flips is None:
        return "flips not measured"
    if flips.value == 0:
        return "no answer flipped"
    digits = 1 if flips.value >= 0.05 else decimals(flips.value, None, None, fewest=1) - 2
    return f"{plain(flips.value, digits)} % of answers flipped"


def _kl(pooled: Mapping[str, MetricResult]) -> str:
    for key, words in (("distance/kl_mean", "KL"), ("distance/corpus_kl_mean", "corpus KL")):
        if key in pooled:
            return f"{words} {interval_text(pooled[key], NATS, difference=False)}"
    return "KL not measured"


def _hidden(delta: MetricResult | None, flips: MetricResult | None, significant: bool | None) -> bool:
    """Whether answers moved much while accuracy did not: what accuracy alone would hide."""
    if delta is None or flips is None or significant is not False:
        return False
    points = abs(SHARE.factor * delta.value)
    return flips.value >= max(_TIMES * points, points + _POINTS)


def verdict(label: str, pooled: Mapping[str, MetricResult], *, size_ratio: float | None) -> str:
    """Return one line in plain words about a variant, as in "awq-4bit-g128: 3.6x smaller; accuracy -0.4 pt
    (not significant), but 6.1 % of answers flipped; KL 0.021 [0.019, 0.023]".

    Parameters
    ----------
    label : str
        Short name of the variant; "none" is the uncompressed control.
    pooled : mapping of str to MetricResult
        Pooled results by key: `metrics.headline(results)`. Read: `quality/accuracy_delta`, `quality/mcnemar_p`,
        `distance/flips_pct`, `distance/all_flips_pct`, `distance/kl_mean` (`distance/corpus_kl_mean` where there is
        none). What is missing is said to be missing.
    size_ratio : float or None
        Bytes of the baseline over bytes of the variant; None where it is not known.
    """
    size = _size(label, size_ratio)
    delta, flips = pooled.get("quality/accuracy_delta"), pooled.get("distance/flips_pct")
    kl, every = pooled.get("distance/kl_mean"), pooled.get("distance/all_flips_pct")
    same_answers = flips is not None and flips.value == 0 and (every is None or every.value == 0)
    if same_answers and kl is not None and kl.value == 0:
        return f"{label}: {size}; answers identical, KL 0"
    significant = None if delta is None else moved(delta, pooled.get("quality/mcnemar_p"))
    link = ", but " if _hidden(delta, flips, significant) else ", "
    return f"{label}: {size}; {_accuracy(delta, significant)}{link}{_flips(flips)}; {_kl(pooled)}"
