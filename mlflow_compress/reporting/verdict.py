"""The verdict: one sentence about a variant, from the numbers alone."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from mlflow_compress.config.policy import MARGIN, Policy, Requirements
from mlflow_compress.decide.direction import harm_of
from mlflow_compress.decide.gates import CACHE_RATIO, DELTA, FLIPS, KL, RATIO
from mlflow_compress.decide.promotion import Candidate, PolicyAnswer, checks_of, gate_numbers, gates_of, policy_answer
from mlflow_compress.metrics.core.account import Account
from mlflow_compress.metrics.core.metric_registry import key
from mlflow_compress.metrics.health import DEFECTS_DELTA
from mlflow_compress.metrics.health import WORST_SLICE as WORST_DEFECTS
from mlflow_compress.metrics.kl_tail import ABOVE_CLIP, CLIP, CLIPPED_KL, shows_clipped
from mlflow_compress.metrics.long_context import SLOPE
from mlflow_compress.metrics.slices import WORST_DROP, WORST_FLIPS, WORST_KL
from mlflow_compress.metrics.thinking import PASS_DELTA
from mlflow_compress.metrics.thought_length import COST_RATIO
from mlflow_compress.records import MetricResult
from mlflow_compress.reporting import numbers
from mlflow_compress.reporting.headline import noticed, only_generated

_UNCOMPRESSED = "none"
_SIGNIFICANCE = 0.05
_REQUIRED = Requirements()
_GATES = gates_of(Policy())

# Of each distance by slice: what it is called, the metric over all slices, and what turns that into the same unit.
_SLICED = {
    WORST_FLIPS.name: ("flips", FLIPS, 1.0),
    WORST_KL.name: ("KL, clipped,", CLIPPED_KL.name, 1.0),
    WORST_DROP.name: ("accuracy lost", DELTA, -100.0),
    WORST_DEFECTS.name: ("answers with a defect", DEFECTS_DELTA.name, 1.0),
}


@dataclass(frozen=True, kw_only=True)
class _SliceFinding:
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


def slice_findings(results: Sequence[MetricResult]) -> list[_SliceFinding]:
    """Return every distance in every slice, that with the smallest corrected p-value first.

    The slice with the largest value of a distance has the interval of the headline's worst slice: it was looked for.
    """
    pooled = {r.name: r for r in results if r.task is None and r.category is None}
    findings = []
    for result in results:
        if result.name not in _SLICED or (result.task is None and result.category is None):
            continue
        measured, name, factor = _SLICED[result.name]
        whole, others = pooled.get(name), None
        if whole is not None and whole.n > result.n:
            others = (whole.n * factor * whole.value - result.n * result.value) / (whole.n - result.n)
        worst = pooled.get(result.name)
        if worst is not None and worst.value == result.value:
            result = replace(result, low=worst.low, high=worst.high)
        place = "/".join(filter(None, (result.task, result.category)))
        findings.append(_SliceFinding(name=place, measured=measured, result=result, others=others))
    return sorted(findings, key=lambda one: (one.result.p, list(_SLICED).index(one.result.name), -one.result.value))


def worst_slice(results: Sequence[MetricResult]) -> str:
    """Return the slice that surely moves most against the others, with its test; empty where none does."""
    findings = slice_findings(results)
    if not findings or (p := findings[0].result.p) is None or p >= _SIGNIFICANCE:
        return ""
    tests = "1 test" if len(findings) == 1 else f"{len(findings)} tests"
    return f"worst slice: {findings[0].text} (p {p:.2g}, Holm over {tests})"


def _size(label: str, ratio: float | None, sparsity: float | None, cache_ratio: float | None) -> str:
    if ratio is None:
        return "size not known"
    words = numbers.size_text(ratio, sparsity)
    if cache_ratio is not None and cache_ratio != 1:
        return f"{words}, its cache {numbers.ratio_text(cache_ratio)}"
    return "not compressed" if label == _UNCOMPRESSED and words == numbers.size_text(1.0) else words


def _flips(flips: MetricResult | None, choices: MetricResult | None) -> str:
    """Return how many answers flipped, and of which kind they are; `choices` are flips of multiple choice alone."""
    if flips is None:
        return "flips not measured"
    answers = "multiple-choice answers" if choices is not None and choices.n == flips.n else "answers"
    if flips.value == 0:
        return f"none of {flips.n:,} {answers} flipped" + (f" (at most {flips.high:.2g} %)" if flips.high else "")
    return f"{numbers.interval_text(flips, numbers.PERCENT, difference=False)} of {flips.n:,} {answers} flipped"


def _kl(pooled: Mapping[str, MetricResult]) -> str:
    if shows_clipped(pooled):
        above = numbers.interval_text(pooled[ABOVE_CLIP.name], numbers.PERCENT, difference=False)
        clipped = numbers.interval_text(pooled[CLIPPED_KL.name], numbers.NATS, difference=False)
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
    return f" and grows by {growth} per 1,000 tokens of a long context"


def _problems(pooled: Mapping[str, MetricResult]) -> str:
    """Return what became of answers behind a thought; empty where none was asked for."""
    right = pooled.get(PASS_DELTA.name)
    if right is None:
        return ""
    return f"right answers to problems {numbers.interval_text(right, numbers.SHARE, difference=True)}; "


def tokens_words(cost: MetricResult | None) -> str:
    """Return what follows a size, as in ", but 1.4x [1.2, 1.6] as many tokens to a right answer"; empty without."""
    if cost is None:
        return ""
    times = numbers.number_text(cost, COST_RATIO.unit)
    return f", {'but' if (cost.low or 0.0) > 1.0 else 'and'} {times} as many tokens to a right answer"


def answer_by_default(
    label: str,
    pooled: Mapping[str, MetricResult],
    *,
    size_ratio: float | None,
    cache_ratio: float | None = None,
    account: Account | None = None,
) -> PolicyAnswer:
    """Return the default policy's answer about a variant that was evaluated alone; None of a size is a served model."""
    sizes = {} if size_ratio is None else {RATIO: size_ratio, CACHE_RATIO: cache_ratio or 1.0}
    flips = pooled.get(FLIPS, pooled.get(KL))
    items = None if flips is None else flips.n
    candidate = Candidate(
        name=label,
        run_id="",
        version=None,
        method=label,
        metrics={
            **gate_numbers(list(pooled.values()), _GATES.readings),
            **sizes,
            **(account.values() if account else {}),
        },
        items=items,
        compresses=label != _UNCOMPRESSED,
        makes=None,
        served=size_ratio is None,
    )
    return policy_answer(checks_of(candidate, _GATES.gates, _GATES.rules if account else ()), items)


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

    As in "awq-4bit-g128: fails the default policy: flips 6.1 % > 5; 6.1 % [4.8, 7.8] of 1,000 multiple-choice answers
    flipped; KL 0.021 [0.019, 0.023]; accuracy open, -0.4 pt [-1.9, 1.1]; 3.6x smaller; read by vllm": what the default
    policy answers, then how far the answers have moved, then the worst slice (see `worst_slice`), then what became of
    problems that are thought about, then the accuracy, which hides it, with its direction by a `margin` in points, then
    what it saves, then who can serve it, where that is known. It also says what was not measured, and what of the
    `account` bears on it.
    """
    answer = answer_by_default(label, pooled, size_ratio=size_ratio, cache_ratio=cache_ratio, account=account)
    size = _size(label, size_ratio, sparsity, cache_ratio) + tokens_words(pooled.get(COST_RATIO.name))
    if served_by is not None:
        size += f"; read by {', '.join(served_by)}" if served_by else "; no server reads its format"
    remark = "" if account is None or "seed" not in account.setting else f"; seed {account.setting['seed']}"
    if account is not None and account.cut_pct > _REQUIRED.max_cut_pct:
        remark = f"; {account.shortened}{remark}"
    if account is not None and account.unscored:
        remark = f"; {account.lacking}{remark}"
    start = f"{label}: {answer.text('the default policy')}"
    if account is not None and account.unscored_pct > _REQUIRED.max_unscored_pct:
        return f"{start}; {size}{remark}"
    flips, every, kl = pooled.get(FLIPS), pooled.get("distance/all_flips_pct"), pooled.get(KL)
    same_answers = flips is not None and flips.value == 0 and (every is None or every.value == 0)
    if flips is not None and same_answers and kl is not None and kl.value == 0:
        return f"{start}; answers identical and KL 0 on all {flips.n:,} items; {size}{remark}"
    moves = f"{_flips(flips, every)}; {_kl(pooled)}{_growth(pooled)}"
    after = f"{f'{slices}; ' if slices else ''}{_problems(pooled)}{_accuracy(pooled, margin)}"
    return f"{start}; {moves}; {after}; {size}{remark}"


def _accuracy(pooled: Mapping[str, MetricResult], margin: float) -> str:
    """Return the change of accuracy after its direction, as in "accuracy open, -0.4 pt [-1.9, 1.1]"."""
    delta, direction = pooled.get(DELTA), harm_of(pooled, margin)
    if delta is None:
        return "accuracy not measured"
    word = "without an interval" if direction is None else "open" if direction.word == "open" else direction.text
    return f"accuracy {word}, {numbers.interval_text(delta, numbers.SHARE, difference=True)}"
