"""The verdict: one sentence about a variant, from the numbers alone."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from mlflow_compress.config.policy import MARGIN, Requirements
from mlflow_compress.decide.direction import harm_of
from mlflow_compress.decide.gates import DELTA, FLIPS, KL
from mlflow_compress.metrics.core.account import Account
from mlflow_compress.metrics.core.metric_registry import key
from mlflow_compress.metrics.health import DELTA as DEFECTS
from mlflow_compress.metrics.health import WORST_SLICE as WORST_DEFECTS
from mlflow_compress.metrics.kl_tail import ABOVE_CLIP, CLIP, CLIPPED, shows_clipped
from mlflow_compress.metrics.long_context import SLOPE
from mlflow_compress.metrics.slices import WORST_DROP, WORST_FLIPS, WORST_KL
from mlflow_compress.records import MetricResult
from mlflow_compress.reporting import numbers
from mlflow_compress.reporting.headline import noticed, only_generated

UNCOMPRESSED = "none"
_SIGNIFICANCE = 0.05
_REQUIRED = Requirements()
# Flips are stressed ("but") if they are at least twice the change of accuracy, and at least one point larger.
_TIMES, _POINTS = 2.0, 1.0

# Of each distance by slice: what it is called, the metric over all slices, and what turns that into the same unit.
_SLICED = {
    WORST_FLIPS.name: ("flips", FLIPS, 1.0),
    WORST_KL.name: ("KL, clipped,", CLIPPED.name, 1.0),
    WORST_DROP.name: ("accuracy lost", DELTA, -100.0),
    WORST_DEFECTS.name: ("answers with a defect", DEFECTS.name, 1.0),
}


@dataclass(frozen=True, kw_only=True)
class SliceFinding:
    """One distance in one slice, held against the other items."""

    name: str  # The task, its category, or a script
    measured: str
    result: MetricResult  # With the corrected p-value of "more than in the others"
    others: float | None  # The same of all other items, in the result's unit

    @property
    def text(self) -> str:
        """The finding, as in "Greek script: flips 11.3 % [9.0, 14.1], others 4.1 %"."""
        value = numbers.interval_text(self.result, numbers.scale_of(key(self.result.name).unit), difference=False)
        return f"{self.name}: {self.measured} {value}{f', others {self.others_text}' if self.others_text else ''}"

    @property
    def others_text(self) -> str:
        """The value of all other items, with as many digits."""
        if self.others is None:
            return ""
        scale = numbers.scale_of(key(self.result.name).unit)
        digits = numbers.decimals(self.result.value, self.result.low, self.result.high, fewest=scale.decimals)
        return numbers.plain(self.others, digits) + scale.suffix


def slice_findings(results: Sequence[MetricResult]) -> list[SliceFinding]:
    """Return every distance in every slice, that with the smallest corrected p-value first."""
    pooled = {r.name: r for r in results if r.task is None and r.category is None}
    findings = []
    for result in results:
        if result.name not in _SLICED or (result.task is None and result.category is None):
            continue
        measured, name, factor = _SLICED[result.name]
        whole, others = pooled.get(name), None
        if whole is not None and whole.n > result.n:
            others = (whole.n * factor * whole.value - result.n * result.value) / (whole.n - result.n)
        place = "/".join(filter(None, (result.task, result.category)))
        findings.append(SliceFinding(name=place, measured=measured, result=result, others=others))
    return sorted(findings, key=lambda one: (one.result.p, list(_SLICED).index(one.result.name), -one.result.value))


def worst_slice(results: Sequence[MetricResult]) -> str:
    """Return the slice that surely moves most against the others, with its test; empty where none does."""
    findings = slice_findings(results)
    if not findings or (p := findings[0].result.p) is None or p >= _SIGNIFICANCE:
        return ""
    tests = "1 test" if len(findings) == 1 else f"{len(findings)} tests"
    return f"worst slice: {findings[0].text} (p {p:.2g}, Holm over {tests})"


def moved(delta: MetricResult, p: MetricResult | None) -> bool | None:
    """Return whether an accuracy change is significant by McNemar's mid-p (0.05) or its interval; None without both."""
    if p is not None:
        return p.value < _SIGNIFICANCE
    if delta.low is None or delta.high is None:
        return None
    return not delta.low <= 0 <= delta.high


def _size(label: str, ratio: float | None, sparsity: float | None, cache_ratio: float | None) -> str:
    if ratio is None:
        return "size not known"
    words = numbers.size_text(ratio, sparsity)
    if cache_ratio is not None and cache_ratio != 1:
        return f"{words}, its cache {numbers.ratio_text(cache_ratio)}"
    return "not compressed" if label == UNCOMPRESSED and words == numbers.size_text(1.0) else words


def _flips(flips: MetricResult | None) -> str:
    if flips is None:
        return "flips not measured"
    if flips.value == 0:
        return f"none of {flips.n:,} answers flipped" + (f" (at most {flips.high:.2g} %)" if flips.high else "")
    return f"{numbers.interval_text(flips, numbers.PERCENT, difference=False)} of {flips.n:,} answers flipped"


def _kl(pooled: Mapping[str, MetricResult]) -> str:
    if shows_clipped(pooled):
        above = numbers.interval_text(pooled[ABOVE_CLIP.name], numbers.PERCENT, difference=False)
        clipped = numbers.interval_text(pooled[CLIPPED.name], numbers.NATS, difference=False)
        return f"KL per item, clipped, {clipped}; {above} of items above {CLIP:g} nat"
    for name, words in ((KL, "KL"), ("distance/corpus_kl_mean", "corpus KL")):
        if name in pooled:
            return f"{words} {numbers.interval_text(pooled[name], numbers.NATS, difference=False)}"
    bound = next((result for name, result in pooled.items() if name.startswith("distance/kl_top")), None)
    if bound is not None:  # of a served model
        return f"KL at least {numbers.interval_text(bound, numbers.NATS, difference=False)}"
    return "KL not measured" + (": answers are generated" if only_generated(pooled) else "")


def _growth(pooled: Mapping[str, MetricResult]) -> str:
    """Return how the KL grows in long contexts, where that is among what surely changed for users; else nothing."""
    slope = next((result for declared, result, sure in noticed(pooled) if sure and declared.name == SLOPE.name), None)
    if slope is None or slope.value <= 0.0:
        return ""
    growth = numbers.interval_text(slope, numbers.NATS, difference=False)
    return f" and grows by {growth} with each 1,000 tokens of a long context"


def _hidden(delta: MetricResult | None, flips: MetricResult | None, significant: bool | None) -> bool:
    """Return whether many answers flipped without a significant change of accuracy."""
    if delta is None or flips is None or significant is not False:
        return False
    points = abs(numbers.SHARE.factor * delta.value)
    return flips.value >= max(_TIMES * points, points + _POINTS)


def verdict(
    label: str,
    pooled: Mapping[str, MetricResult],
    *,
    size_ratio: float | None,
    sparsity: float | None = None,
    cache_ratio: float | None = None,
    account: Account | None = None,
    served_by: Sequence[str] | None = None,
    margin: float = MARGIN,
    slices: str = "",
) -> str:
    """Return one sentence about a variant.

    As in "awq-4bit-g128: no worse than 2 points; accuracy -0.4 pt [-1.9, 1.1], but 6.1 % [4.8, 7.8] of 1,000 answers
    flipped; KL 0.021 [0.019, 0.023]; 3.6x smaller; read by vllm": the direction, by a `margin` in points, then the
    volume, then the worst slice (see `worst_slice`), then what it saves, then who can serve it, where that is known.
    It also says what was not measured, and what of the `account` bears on it; there is no verdict where more items than
    the default policy accepts have no score.
    """
    size = _size(label, size_ratio, sparsity, cache_ratio)
    if served_by is not None:
        size += f"; read by {', '.join(served_by)}" if served_by else "; no server reads its format"
    seed = "" if account is None or "seed" not in account.setting else f"; seed {account.setting['seed']}"
    if account is not None and account.unscored_pct > _REQUIRED.max_unscored_pct:
        return f"{label}: no verdict, because {account.lacking}; {size}{seed}"
    remark = seed
    if account is not None and account.cut_pct > _REQUIRED.max_cut_pct:
        remark = f"; {account.shortened}{remark}"
    if account is not None and account.unscored:
        remark = f"; {account.lacking}{remark}"
    delta, flips = pooled.get(DELTA), pooled.get(FLIPS)
    kl, every = pooled.get(KL), pooled.get("distance/all_flips_pct")
    direction = harm_of(pooled, margin)
    unknown = "accuracy not measured" if delta is None else "no interval of the accuracy's change"
    harm = f"open ({unknown})" if direction is None else direction.text
    same_answers = flips is not None and flips.value == 0 and (every is None or every.value == 0)
    if flips is not None and same_answers and kl is not None and kl.value == 0:
        return f"{label}: {harm}; answers identical and KL 0 on all {flips.n:,} items; {size}{remark}"
    significant = None if delta is None else moved(delta, pooled.get("quality/mcnemar_p"))
    link = ", but " if _hidden(delta, flips, significant) else ", "
    accuracy = "" if delta is None else f"accuracy {numbers.interval_text(delta, numbers.SHARE, difference=True)}{link}"
    moves = f"{_flips(flips)}; {_kl(pooled)}{_growth(pooled)}"
    return f"{label}: {harm}; {accuracy}{moves}; {f'{slices}; ' if slices else ''}{size}{remark}"
