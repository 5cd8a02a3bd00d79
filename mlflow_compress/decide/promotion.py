"""The promotion policy: its gates and rules, then ranks. Numbers in, a decision with reasons out."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Literal

from mlflow_compress.config.policy import AnomalyRule, MarginGate, MetricGate, Objective, Policy, Requirements
from mlflow_compress.decide.gates import (
    CACHE,
    CACHE_RATIO,
    CORPUS_KL,
    DELTA,
    FLIPS,
    GATE_KL_ITEMS,
    KL,
    RATIO,
    SIZE,
    SPEED,
    Check,
    DivergenceGate,
    Gate,
    GateNumber,
    gate_values,
    in_words,
    published_gate,
)
from mlflow_compress.errors import ConfigError, raise_together
from mlflow_compress.metrics.core.account import CUT_PCT, UNSCORED_PCT
from mlflow_compress.metrics.core.metric_inputs import headline
from mlflow_compress.metrics.core.metric_registry import MetricKey, all_keys, key
from mlflow_compress.metrics.perplexity import GATED_DOCUMENTS, GATED_TOP_PCT, TOP_DOCUMENT
from mlflow_compress.metrics.stats.sample_size import MOST_TIMES, round_up
from mlflow_compress.metrics.stats.significance import ERROR_RATE, holm
from mlflow_compress.records import MetricResult

NO_KL_OF_SERVED = (
    "KL: a server shows its most probable tokens alone, so KL has a lower bound and no upper end: give a policy with "
    "'kl: none', which bounds flips and accuracy"
)
"""Why a served model passes no gate on KL, and what to do."""
_NO_KL_OF_SERVED = Check(
    passed=False, reason=NO_KL_OF_SERVED, is_open=True, short="KL has no upper end, as a server shows it"
)

_SAME_SIZE = 1.005
"""Size ratio up to which a checkpoint counts as not smaller, because file headers differ in size."""


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A variant that may be promoted."""

    name: str  # The variant and the method that made it
    run_id: str  # The variant's run
    version: str | None  # Its version in the registry; None where it has none
    method: str
    metrics: Mapping[str, float]  # The metrics of its run, and what else gates read
    items: int | None = None  # Number of items with a prediction; None if the run does not have it
    compresses: bool = True  # False for a control, whose method leaves the weights unchanged
    # Who can serve it; none: only this package reads it. None where nobody knows
    served_by: tuple[str, ...] | None = None
    makes: int | None = 1  # With other calibration samples; None where another make would be the same
    served: bool = False  # Whether a server has the variant, so that neither its size nor its KL is known
    stages: frozenset[str] | None = None  # The stages that have finished; None where the policy does not ask
    # Why metrics are missing, by the beginning of their names: "speed/"
    absent: Mapping[str, str] = field(default_factory=dict)


Rule = Callable[[Candidate], list[Check]]
"""What a policy asks of a candidate besides gates; returns failed checks, or none."""

RankBy = Callable[[Candidate, Sequence[Candidate]], float]
"""What ranks candidates, smaller first: from one of them, and all that pass."""


@dataclass(frozen=True, kw_only=True)
class PolicyAnswer:
    """A policy's answer about one variant: ship it, do not, or measure more."""

    word: Literal["passes", "fails", "open"]
    why: str = ""  # What it fails, or what it needs

    def text(self, policy: str = "") -> str:
        """Return the answer in words, as in "fails: flips 12.2 % > 5"; `policy` is a name, where it must be said."""
        of = f" {'under ' if self.word == 'open' else ''}{policy}" if policy else ""
        return f"{self.word}{of}{f': {self.why}' if self.why else ''}"


def policy_answer(checks: Iterable[Check], items: int | None) -> PolicyAnswer:
    """Return the answer that follows from a policy's checks on one variant, measured on so many items.

    It fails where a measured value is beyond its limit, or something is refused that no measuring changes. It is open
    where every measured value is within its limit, and too few items, or a missing value, leave it unsure; and where
    too many items have no score, so that no value tells anything.

    The number of items is what the check that needs most needs: see `Gate`.

    Examples
    --------
    >>> flips = Check(passed=False, reason="flips: 5.287 > 5", is_open=True, short="flips", times_items=3.0)
    >>> policy_answer([flips], 1620).text()
    'open: needs about 3,300 more items for flips'
    """
    failed = [check for check in checks if not check.passed]
    if not failed:
        return PolicyAnswer(word="passes")
    if void := [check.short for check in failed if check.is_void]:
        return PolicyAnswer(word="open", why="; ".join(void))
    sure = [check.short or check.reason for check in failed if not check.is_open]
    if sure:
        return PolicyAnswer(word="fails", why="; ".join(dict.fromkeys(sure)))
    times = {check.short: check.times_items for check in failed if check.times_items is not None}
    why = [check.short or check.reason for check in failed if check.times_items is None]
    if times:
        named, most = " and ".join(", ".join(times).rsplit(", ", 1)), max(times.values())
        if math.isinf(most):
            known = f"more than {MOST_TIMES:g} times as many"
        else:
            known = f"about {round_up((most - 1.0) * items):,} more" if items else "more"
        why = [f"needs {known} items for {named}", *why]
    return PolicyAnswer(word="open", why="; ".join(why))


@dataclass(frozen=True, kw_only=True)
class CandidateOutcome:
    """The decision on one candidate, with every reason."""

    candidate: Candidate
    passed: bool
    answer: PolicyAnswer  # What a reader sees first
    reasons: tuple[str, ...]
    failed: tuple[str, ...] = ()  # The reasons of the checks that failed
    rank: int | None = None
    numbers: tuple[GateNumber, ...] = ()  # What its gates have read
    # Its p-value for "some gate is not kept"; None for one that fails whatever was measured: it is not smaller than the
    # baseline, a metric is missing, or a rule refuses it
    p_value: float | None = None


@dataclass(frozen=True, kw_only=True)
class Decision:
    """The champion (None if no candidate passes), and the outcome of every candidate, passing ones first."""

    champion: Candidate | None
    outcomes: tuple[CandidateOutcome, ...]

    @property
    def competing(self) -> int:
        """How many of them could be promoted: the family whose gates hold their error together."""
        return sum(outcome.p_value is not None for outcome in self.outcomes)

    def with_version(self, run_id: str, version: str) -> "Decision":
        """Return the decision after one candidate, named by its run, was registered."""
        outcomes = tuple(
            replace(o, candidate=replace(o.candidate, version=version)) if o.candidate.run_id == run_id else o
            for o in self.outcomes
        )
        return Decision(champion=outcomes[0].candidate if self.champion else None, outcomes=outcomes)

    def as_table(self) -> dict[str, list[object]]:
        """Return the outcomes as columns of a table."""
        return {
            "rank": [o.rank for o in self.outcomes],
            "variant": [o.candidate.name for o in self.outcomes],
            "version": [o.candidate.version for o in self.outcomes],
            "items": [o.candidate.items for o in self.outcomes],
            "passed": [o.passed for o in self.outcomes],
            "answer": [o.answer.text() for o in self.outcomes],
            "reasons": ["; ".join(o.reasons) for o in self.outcomes],
            "run_id": [o.candidate.run_id for o in self.outcomes],
        }


def _failed(reason: str, missing: str = "", *, is_open: bool = False) -> Check:
    return Check(passed=False, reason=reason, missing=missing, is_open=is_open)


def _size_checks(candidate: Candidate) -> list[Check]:
    """Return a failed check for controls, and for variants that are smaller neither in weights nor in their cache."""
    if not candidate.compresses:
        left = f"method '{candidate.method}' leaves the weights as they are, and cannot be promoted"
        return [Check(passed=False, reason=f"not compressed: {left}", short="not compressed")]
    ratio = candidate.metrics.get(RATIO)
    if ratio is None and candidate.served:
        return [Check(passed=True, reason="size: not known of a served model, and not asked for")]
    if ratio is None:
        return [_failed(f"size: {RATIO} is missing", is_open=True)]
    if ratio > _SAME_SIZE:
        return []
    if ratio < 2 - _SAME_SIZE:
        return [_failed(f"not smaller than the baseline: {1 / ratio:.3g} times its size")]
    cache = candidate.metrics.get(CACHE_RATIO, 1.0)  # main runs have it where it differs
    if cache > _SAME_SIZE:
        shown = f"weights as large as the baseline's, a cache {cache:.3g} times smaller"
        return [Check(passed=True, reason=f"size: {shown}")]
    return [_failed("not smaller than the baseline: the same size on disk")]


def _rank_checks(candidate: Candidate, ranked_by: Sequence[str]) -> list[Check]:
    """Return a failed check per missing metric of the ranking. KL is not needed if the evaluation has none."""
    without_kl = candidate.served or candidate.metrics.get(GATE_KL_ITEMS) == 0
    needed = [FLIPS if metric == KL and without_kl else metric for metric in ranked_by]
    checks = []
    for metric in dict.fromkeys(one for one in needed if one not in candidate.metrics):
        why = "missing"
        if candidate.served and metric == SIZE:
            why = "not known of a served model: let the policy's objective rank by 'utility' or 'speed'"
        checks.append(_failed(f"rank: {metric} is {why}", missing=metric, is_open=True))
    return checks


_ALIKE_SIZE = 1.02
"""Size ratio up to which the closer of two variants is chosen: half a percent of a disk is worth no distance."""


def _by_size(candidate: Candidate, passing: Sequence[Candidate]) -> float:
    """Return the size; that of the smallest for those that are hardly larger, so that the closest of them is first."""
    smallest = min(other.metrics[SIZE] for other in passing)
    return smallest if candidate.metrics[SIZE] <= _ALIKE_SIZE * smallest else candidate.metrics[SIZE]


def checks_of(candidate: Candidate, gates: Iterable[Gate | DivergenceGate], rules: Iterable[Rule] = ()) -> list[Check]:
    """Return what a policy checks of one candidate by itself: its size, every gate and every rule."""
    checks = _size_checks(candidate)
    for gate in gates:
        unknown = candidate.served and isinstance(gate, DivergenceGate) and GATE_KL_ITEMS not in candidate.metrics
        checks += [_NO_KL_OF_SERVED] if unknown else gate.checks(candidate.metrics)
    for rule in rules:
        checks += rule(candidate)
    return checks


def decide(
    candidates: Sequence[Candidate],
    gates: Sequence[Gate | DivergenceGate],
    *,
    rules: Sequence[Rule] = (),
    score: RankBy = _by_size,
    ranked_by: Sequence[str] = (SIZE, KL),
) -> Decision:
    """Gate every candidate of one evaluation, and rank the passing ones.

    Ties are ranked by KL, then flips, then name; one that no server reads ranks behind all others. The decision does
    not depend on the order of the candidates. One passes when it is smaller than the baseline (in its cache, where the
    weights are as large) and passes every gate and rule; a metric that a gate or the ranking (`ranked_by`) reads and
    that is missing or NaN fails. The size of a served model is not known, and not asked for. The champion has rank 1.

    The gates of all candidates hold their error together: that any passes although it is beyond a limit has a
    probability of at most 2.5 %, as for one alone. A candidate's p-value is the largest of its gates' (it is within all
    limits only if within each: an intersection-union test); those of the family are adjusted by Holm's rule.

    Source: Berger, "Multiparameter hypothesis testing and acceptance sampling", Technometrics 1982; for Holm's rule see
    `holm`. benchmarks/family_errors.py shows the error.
    """

    def outcome(candidate: Candidate) -> CandidateOutcome:
        checks = [*checks_of(candidate, gates, rules), *_rank_checks(candidate, ranked_by)]
        reasons = tuple(in_words(check, candidate.absent) for check in checks)
        failed = tuple(reason for reason, check in zip(reasons, checks, strict=True) if not check.passed)
        competes = all(check.passed or check.p_value is not None for check in checks)
        p_value = max((check.p_value or 0.0 for check in checks), default=0.0) if competes else None
        return CandidateOutcome(
            candidate=candidate,
            passed=not failed,
            answer=policy_answer(checks, candidate.items),
            reasons=reasons,
            failed=failed,
            numbers=tuple(check.number for check in checks if check.number is not None),
            p_value=p_value,
        )

    outcomes = _held_together([outcome(candidate) for candidate in candidates])
    through = [o.candidate for o in outcomes if o.passed]

    def order(passed: CandidateOutcome) -> tuple[bool, float, float, float, str]:
        metrics = passed.candidate.metrics
        ties = metrics.get(KL, math.inf), metrics.get(FLIPS, math.inf)
        return passed.candidate.served_by == (), score(passed.candidate, through), *ties, passed.candidate.name

    passing = sorted((o for o in outcomes if o.passed), key=order)
    failing = sorted((o for o in outcomes if not o.passed), key=lambda o: (o.candidate.name, o.candidate.run_id))
    ranked = tuple(replace(o, rank=rank) for rank, o in enumerate(passing, start=1))
    return Decision(champion=ranked[0].candidate if ranked else None, outcomes=(*ranked, *failing))


def _held_together(outcomes: Sequence[CandidateOutcome]) -> list[CandidateOutcome]:
    """Refuse candidates that pass by themselves, but not with the error of all together (Holm)."""
    family = [outcome.p_value for outcome in outcomes if outcome.p_value is not None]
    adjusted = iter(holm(family).tolist() if family else [])

    def held(outcome: CandidateOutcome) -> CandidateOutcome:
        p = 0.0 if outcome.p_value is None else next(adjusted)
        if not outcome.passed or p <= ERROR_RATE * (1 + 1e-9):  # an end that is the limit keeps to it
            return outcome
        reason = (
            f"passes alone, not as one of {len(family)}: with so many to choose from, one beyond a limit would pass "
            f"with a probability of up to {100 * p:.3g} % (at most {100 * ERROR_RATE:g} % is accepted)"
        )
        answer = PolicyAnswer(word="open", why=f"passes alone, not as one of {len(family)}")
        return replace(outcome, passed=False, answer=answer, reasons=(*outcome.reasons, reason), failed=(reason,))

    return [held(outcome) for outcome in outcomes]


def ends_for_all(decision: Decision, gates: Iterable[Gate | DivergenceGate]) -> str:
    """Return the ends of the champion's intervals that hold whichever candidate was chosen, in one sentence.

    The best of several looks better than it is, and its own interval does not know that it was chosen. Empty where
    there was no choice. See `OneEnd.for_all`.
    """
    if decision.champion is None or decision.competing < 2:
        return ""
    metrics, n = decision.champion.metrics, decision.competing
    read = [one for gate in gates for one in (gate.reads() if isinstance(gate, DivergenceGate) else (gate,))]
    told = [
        f"{gate.label.partition(' (')[0]} at {'least' if gate.at_least else 'most'} {end.for_all(n):.4g}"
        for gate in read
        if (end := gate.one_end(metrics)) is not None
    ]
    return f"Chosen among {n}, with 95 % for all of them at once: {', '.join(told)}." if told else ""


_BETTER_SIZES = {SIZE: "lower", RATIO: "higher", "size/bits_per_weight": "lower", CACHE: "lower", CACHE_RATIO: "higher"}


def _better(metric: str) -> str:
    """Return which way a metric, or what runs log beside metrics, is better."""
    declared = all_keys().get(metric)
    return _BETTER_SIZES.get(metric, "neither") if declared is None else declared.direction


EVERY_SLICE = "*"
"""In place of a task: wherever an evaluation has results of the metric, beside the pooled one."""


@dataclass(frozen=True, kw_only=True, order=True)
class GateReading:
    """One number of an evaluation: an end of the interval of a metric, or its value; of `EVERY_SLICE` several."""

    metric: str  # The metric, and "upper", "lower", "value" or "n"
    end: str
    task: str = ""  # Of which task and category; "" for the pooled one
    category: str = ""

    @property
    def name(self) -> str:
        """The name under which gates find the number, such as "distance/flips_pct of mmlu/law (upper end)"."""
        place = "/".join(part for part in (self.task, self.category) if part)
        ends = {"upper": " (upper end)", "lower": " (lower end)", "value": "", "n": " (items)"}
        return f"{self.metric}{f' of {place}' if place else ''}{ends[self.end]}"


def read_gates(results: Iterable[MetricResult], readings: Iterable[GateReading]) -> dict[str, float]:
    """Return those of the wanted numbers that an evaluation has, by name.

    The mean KL of corpora has an interval from 20 documents on, which holds for documents like those seen. A gate reads
    its upper end where `GATED_DOCUMENTS` were seen: a few without an outlier look harmless.
    """
    by_place = {(r.name, r.task or "", r.category or ""): r for r in results}
    values: dict[str, float] = {}
    wanted = list(readings)
    for reading in [one for one in wanted if one.task == EVERY_SLICE]:
        places = [(task, part) for name, task, part in by_place if name == reading.metric and (task or part)]
        wanted += [replace(reading, task=task, category=part) for task, part in places]
    for reading in wanted:
        result = by_place.get((reading.metric, reading.task, reading.category))
        top = by_place.get((TOP_DOCUMENT.name, reading.task, reading.category))
        enough = top is not None and top.n >= GATED_DOCUMENTS and top.value < GATED_TOP_PCT
        if result is not None and (enough or reading.metric != CORPUS_KL or reading.end != "upper"):
            ends = {"upper": result.high, "lower": result.low, "value": result.value, "n": float(result.n)}
            if (value := ends[reading.end]) is not None:
                values[reading.name] = value
    return values


def gate_numbers(results: Sequence[MetricResult], readings: Iterable[GateReading]) -> dict[str, float]:
    """Return all that gates find of an evaluation: pooled values, what metrics publish for gates, and the readings."""
    pooled = headline(results)
    values = {name: result.value for name, result in pooled.items()}
    return values | gate_values(pooled) | read_gates(results, readings)


@dataclass(frozen=True, kw_only=True)
class PolicyGates:
    """What a policy means for candidates."""

    gates: tuple[Gate | DivergenceGate, ...]
    rules: tuple[Rule, ...]
    score: RankBy  # What ranks the candidates that pass, and the metrics that it reads
    ranked_by: tuple[str, ...]
    # Numbers that must be read from the evaluations' results; the main runs have the others
    readings: frozenset[GateReading]
    asks_stages: bool = False  # Whether a rule asks which stages have finished
    asks_sizes: bool = False  # Whether sizes are read: the quantize runs have those that main runs leave out

    @property
    def asks_speed(self) -> bool:
        """Whether a gate reads what the speed stage measures."""
        return any(reading.metric.startswith(SPEED) for reading in self.readings)

    def decide(self, candidates: Sequence[Candidate]) -> Decision:
        """Return what `decide` does by this policy."""
        return decide(candidates, self.gates, rules=self.rules, score=self.score, ranked_by=self.ranked_by)


def _declared(metric: str) -> MetricKey | None:
    """Return a metric's declaration; None for what runs log beside metrics. An unknown name is a `ConfigError`."""
    return None if metric.startswith(("size/", "gate/")) else key(metric)


def _check_sense(entry: MetricGate, declared: MetricKey | None) -> None:
    """Refuse a limit on the side that is better, and one that the metric cannot reach."""
    better = _better(entry.metric)
    given, other = ("at_least", "at_most") if entry.at_least is not None else ("at_most", "at_least")
    if better == ("lower" if given == "at_least" else "higher"):
        raise ConfigError(
            f"Of {entry.metric} {better} is better, so {given} would require a variant that moved further",
            allowed=other,
            got=f"{given}: {entry.limit:g}",
        )
    if declared is not None and not declared.low <= entry.limit <= declared.high:
        raise ConfigError(
            f"No value of {entry.metric} is beyond the limit, or every one is",
            allowed=f"{declared.low:g} to {declared.high:g} ({declared.unit})",
            got=f"{given}: {entry.limit:g}",
        )


def _gate(entry: MetricGate) -> tuple[Gate, tuple[GateReading, ...]]:
    """Return one bound as a gate, and what it reads where the main run does not show it."""
    at_least = entry.at_least is not None
    declared = _declared(entry.metric)
    _check_sense(entry, declared)
    if declared is None:
        if entry.task is not None or entry.bound in ("upper", "lower"):
            raise ConfigError(
                f"The gate on {entry.metric} reads something that this number does not have",
                allowed="a value, without task, category and interval",
                got=entry.task or entry.bound,
            )
        return Gate(metric=entry.metric, bound=entry.limit, label=entry.metric, at_least=at_least), ()
    # What every main run publishes
    if entry.task is None and entry.end == "upper" and entry.metric == FLIPS:
        return published_gate(entry.metric, entry.limit, at_least=at_least), ()
    reading = GateReading(metric=entry.metric, end=entry.end, task=entry.task or "", category=entry.category or "")
    value = replace(reading, end="value")
    named = declared.gate_label and entry.task is None and entry.end != "value" and declared.gate is None
    gate = Gate(
        metric=reading.name,
        bound=entry.limit,
        label=f"{declared.gate_label} ({entry.end} end)" if named else reading.name,
        at_least=at_least,
        value="" if entry.end == "value" else value.name,
        low=declared.low,
        high=declared.high,
        by_slice=declared.worst_of_slices and entry.end == "upper",
    )
    if not gate.by_slice:
        return gate, (reading, value)
    return gate, (reading, value, replace(reading, task=EVERY_SLICE), replace(value, task=EVERY_SLICE))


def _margin(entry: MarginGate) -> tuple[Gate, tuple[GateReading, ...]]:
    """Return a non-inferiority margin as a gate: the interval's bad end is no further from "unchanged" than it."""
    declared = _declared(entry.metric)
    if declared is None or declared.difference is not None or declared.direction == "neither":
        better = declared.difference if declared is not None else None
        raise ConfigError(
            f"A margin is the distance from a baseline, and {entry.metric} is none",
            allowed="distances and differences whose better direction is declared",
            fix=f"Use {better}" if better else "Use a gate with at_most or at_least",
        )
    lower = declared.direction == "lower"
    most = declared.high - declared.unchanged if lower else declared.unchanged - declared.low
    if entry.margin > most:
        raise ConfigError(
            f"With this margin on {entry.metric} everything passes",
            allowed=f"0 to {most:g}",
            got=entry.margin,
            fix="It is in the metric's unit: 0.02 of accuracy are 2 points" if most == 1 else None,
        )
    if entry.metric == DELTA and entry.task is None:
        # What main runs show is the drop in points.
        return published_gate(DELTA, round(100.0 * entry.margin, 10)), ()
    at_most = declared.unchanged + entry.margin if lower else None
    at_least = None if lower else declared.unchanged - entry.margin
    return _gate(
        MetricGate(metric=entry.metric, at_most=at_most, at_least=at_least, task=entry.task, category=entry.category)
    )


def lacking_shares(required: Requirements, metrics: Mapping[str, float]) -> list[str]:
    """Return what a policy finds wrong with the account of an evaluation: too many items without a score, or cut."""
    wrong = []
    for metric, bound, what in (
        (UNSCORED_PCT, required.max_unscored_pct, "of the items have no score"),
        (CUT_PCT, required.max_cut_pct, "of the prompts were cut to the model's context"),
    ):
        share = metrics.get(metric)
        if share is None:
            wrong.append(f"{metric} is missing")
        elif share > bound:
            wrong.append(f"{share:.3g} % {what} > {bound:g} %")
    return wrong


def _lacking(required: Requirements, candidate: Candidate) -> list[Check]:
    """Return a failed check per requirement that is not kept: on stages, items, makes, and items without a score."""
    finished = candidate.stages or frozenset()
    void: list[str] = []
    lacks = [f"stage {name} has not finished" for name in required.stages if name not in finished]
    if required.items and (candidate.items is None or candidate.items < required.items):
        n_items = "an unknown number of" if candidate.items is None else candidate.items
        lacks.append(f"{n_items} items < {required.items}")
    if candidate.makes is not None and candidate.makes < required.replicates:
        lacks.append(f"{candidate.makes} replicates < {required.replicates}")
    if candidate.items != 0:  # an evaluation of running text alone has none
        void = lacking_shares(required, candidate.metrics)
    for task, fewest in required.items_by_task.items():
        n = candidate.metrics.get(GateReading(metric=FLIPS, end="n", task=task).name)
        if n is None:
            lacks.append(f"items of {task} are missing")
        elif n < fewest:
            lacks.append(f"{n:.0f} items of {task} < {fewest}")
    return [
        Check(passed=False, reason=f"required: {what}", is_open=True, is_void=what in void, short=what)
        for what in [*lacks, *void]
    ]


def _unread(target: str, candidate: Candidate) -> list[Check]:
    """Return a failed check where the wanted server does not read the variant. One that is served has a server."""
    by = candidate.served_by
    if candidate.served or target in (by or ()):
        return []
    known = "it is not known what loads it" if by is None else f"read by {', '.join(by) or 'this package alone'}"
    return [_failed(f"target: {target} does not read it ({known})")]


def _anomalous(anomalies: AnomalyRule, candidate: Candidate) -> list[Check]:
    """Return a failed check per gain that is too good to be true."""
    reasons = []
    if (most := anomalies.max_accuracy_gain) is not None:
        gain = candidate.metrics.get(GateReading(metric=DELTA, end="lower").name)
        if gain is None:
            reasons.append(f"the lower end of {DELTA} is missing")
        elif gain > most:
            reasons.append(f"accuracy rose by {gain:.4g} or more, which is above {most:g}")
    kl = candidate.metrics.get(GateReading(metric=KL, end="value").name)
    if anomalies.zero_kl and candidate.compresses and kl is not None and kl <= 0.0:
        reasons.append(f"KL is exactly 0, although method '{candidate.method}' changes weights")
    return [_failed(f"anomalous: {what}") for what in reasons]


@contextmanager
def _noted(wrong: list[ConfigError], place: str, file: str | None) -> Iterator[None]:
    """Note what a part of a policy is refused for, with its place."""
    try:
        yield
    except ConfigError as error:
        whose = f"The policy {file}" if file else "The policy"
        wrong.append(ConfigError(f"{whose} cannot be used: {place}: {error}"))


def gates_of(policy: Policy, file: str | None = None) -> PolicyGates:
    """Return a policy's gates, rules and readings, after checking that they make sense; `file` is where it is from.

    Raises `ConfigError`, with a line for every wrong entry: a metric is unknown, or does not have what the policy reads
    of it; a limit is on the side that is better, or out of the metric's range.
    """
    gates: list[Gate | DivergenceGate] = []
    if policy.kl is not None:
        gates.append(DivergenceGate(max_kl=policy.kl.max_kl, max_outliers_pct=policy.kl.max_outliers_pct))
    wrong: list[ConfigError] = []
    declared: list[tuple[Gate, tuple[GateReading, ...]]] = []
    for number, gate in enumerate(policy.gates, start=1):
        with _noted(wrong, f"gates, entry {number}", file):
            declared.append(_gate(gate))
    for number, margin in enumerate(policy.margins, start=1):
        with _noted(wrong, f"margins, entry {number}", file):
            declared.append(_margin(margin))
    with _noted(wrong, "objective", file):
        score, ranked_by = ranking_of(policy.objective)
    raise_together(wrong)
    gates += [gate for gate, _ in declared]
    readings = {reading for _, read in declared for reading in read}
    rules: list[Rule] = [partial(_lacking, policy.require)]

    if policy.target != "any":
        rules.append(partial(_unread, policy.target))
    rules.append(partial(_anomalous, policy.anomalies))
    readings |= {GateReading(metric=FLIPS, end="n", task=task) for task in policy.require.items_by_task}
    if policy.anomalies.max_accuracy_gain is not None:
        readings.add(GateReading(metric=DELTA, end="lower"))
    if policy.anomalies.zero_kl:
        readings.add(GateReading(metric=KL, end="value"))
    if policy.objective.by == "speed" and policy.objective.speed_metric in all_keys():
        readings.add(GateReading(metric=policy.objective.speed_metric, end="value"))
    bounded_or_weighed = [*(one.metric for one in policy.gates), *(term.metric for term in policy.objective.utility)]
    return PolicyGates(
        gates=tuple(gates),
        rules=tuple(rules),
        score=score,
        ranked_by=ranked_by,
        readings=frozenset(readings),
        asks_stages=bool(policy.require.stages),
        asks_sizes=any(name.startswith("size/") for name in bounded_or_weighed),
    )


def ranking_of(objective: Objective) -> tuple[RankBy, tuple[str, ...]]:
    """Return what ranks candidates, smaller first, and the metrics that it reads."""
    if objective.by == "size":
        return _by_size, (SIZE, KL)
    if objective.by == "kl":
        return (lambda candidate, passing: candidate.metrics.get(KL, candidate.metrics.get(FLIPS, 0.0))), (KL, SIZE)
    if objective.by == "speed":
        metric, sign = objective.speed_metric, -1.0 if objective.speed_prefer == "higher" else 1.0
        return (lambda candidate, passing: sign * candidate.metrics[metric]), (metric, KL)
    signs: dict[str, float] = {}
    for term in objective.utility:
        way = term.prefer if term.prefer != "auto" else _better(term.metric)
        if way == "neither":
            raise ConfigError(
                f"The utility needs to know which way {term.metric} is better", allowed="prefer: lower or higher"
            )
        signs[term.metric] = 1.0 if way == "lower" else -1.0

    def loss(candidate: Candidate, passing: Sequence[Candidate]) -> float:
        total = 0.0
        for term in objective.utility:
            value = signs[term.metric] * candidate.metrics[term.metric]
            if objective.normalisation == "scale":
                total += term.weight * value / term.scale
            else:
                every = [signs[term.metric] * other.metrics[term.metric] for other in passing]
                low, high = min(every), max(every)
                total += term.weight * ((value - low) / (high - low) if high > low else 0.0)
        return total

    return loss, tuple(signs)
