"""A policy as gates, rules and a ranking: what `decide` takes, and which results of an evaluation they read."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from mlflow_compress.config.policy import AnomalyRule, MarginGate, MetricGate, Objective, Policy, Requirements
from mlflow_compress.decide.gates import (
    DELTA,
    FLIPS,
    GATE_DROP,
    KL,
    SIZE,
    SPEED,
    Check,
    DivergenceGate,
    Gate,
    upper_end_label,
)
from mlflow_compress.decide.promotion import Candidate, Rule, Score
from mlflow_compress.errors import ConfigError
from mlflow_compress.metrics.core.metric_registry import MetricKey, all_keys, key
from mlflow_compress.records import MetricResult

_OWN = ("size/", "gate/")  # metrics of the main run that no metric declares


@dataclass(frozen=True, kw_only=True, order=True)
class GateReading:
    """One number of an evaluation: an end of the interval of a metric, or its value."""

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

    def of(self, result: MetricResult) -> float | None:
        """Return the number of a result; None where it has no interval."""
        ends = {"upper": result.high, "lower": result.low, "value": result.value, "n": float(result.n)}
        return ends[self.end]


def read_gates(results: Iterable[MetricResult], readings: Iterable[GateReading]) -> dict[str, float]:
    """Return those of the wanted numbers that an evaluation has, by name."""
    by_place = {(r.name, r.task or "", r.category or ""): r for r in results}
    found: dict[str, float] = {}
    for reading in readings:
        result = by_place.get((reading.metric, reading.task, reading.category))
        value = reading.of(result) if result is not None else None
        if value is not None:
            found[reading.name] = value
    return found


@dataclass(frozen=True, kw_only=True)
class PolicyGates:
    """What a policy means for candidates."""

    gates: tuple[Gate | DivergenceGate, ...]
    rules: tuple[Rule, ...]
    # Numbers that must be read from the evaluations' results; the main runs have the others
    readings: frozenset[GateReading]

    @property
    def asks_speed(self) -> bool:
        """Whether a gate reads what the speed stage measures."""
        return any(reading.metric.startswith(SPEED) for reading in self.readings)


def _declared(metric: str) -> MetricKey | None:
    """Return a metric's declaration; None for what runs log beside metrics. An unknown name is a `ConfigError`."""
    return None if metric.startswith(_OWN) else key(metric)


def _gate(entry: MetricGate) -> tuple[Gate, GateReading | None]:
    """Return one bound as a gate, and what it reads where the main run does not show it."""
    at_least = entry.at_least is not None
    declared = _declared(entry.metric)
    if declared is None or declared.measured_once:
        if entry.task is not None or entry.bound in ("upper", "lower"):
            raise ConfigError(
                f"The gate on {entry.metric} reads what this number does not have",
                allowed="a value, without task, category and interval",
                got=entry.task or entry.bound,
            )
        label = entry.metric if declared is None else declared.gate_label or entry.metric
        found = None if declared is None else GateReading(metric=entry.metric, end="value")
        return Gate(metric=entry.metric, bound=entry.limit, label=label, at_least=at_least), found
    published = declared.gate
    # Of KL this is the upper end only where it can be trusted; of the accuracy change it is another number.
    if entry.task is None and entry.end == "upper" and published is not None and entry.metric != DELTA:
        label = upper_end_label(entry.metric)
        return Gate(metric=published.name, bound=entry.limit, label=label, at_least=at_least), None
    reading = GateReading(metric=entry.metric, end=entry.end, task=entry.task or "", category=entry.category or "")
    named = declared.gate_label and entry.task is None and entry.end == "lower" and published is None
    label = f"{declared.gate_label} (lower end)" if named else reading.name
    return Gate(metric=reading.name, bound=entry.limit, label=label, at_least=at_least), reading


def _margin(entry: MarginGate) -> tuple[Gate, GateReading | None]:
    """Return a non-inferiority margin as a gate: the interval's bad end is no further from "unchanged" than it."""
    declared = _declared(entry.metric)
    has_own_baseline = declared is not None and (declared.difference is not None or declared.direction == "neither")
    if declared is None or has_own_baseline:
        better = declared.difference if declared is not None else None
        raise ConfigError(
            f"A margin is the distance from a baseline, and {entry.metric} is none",
            allowed="distances and differences whose better direction is declared",
            fix=f"Use {better}" if better else "Use a gate with at_most or at_least",
        )
    if entry.metric == DELTA and entry.task is None:
        # What main runs show is the drop in points.
        return Gate(metric=GATE_DROP, bound=round(100.0 * entry.margin, 10), label=upper_end_label(DELTA)), None
    lower = declared.direction == "lower"
    at_most = declared.unchanged + entry.margin if lower else None
    at_least = None if lower else declared.unchanged - entry.margin
    return _gate(
        MetricGate(metric=entry.metric, at_most=at_most, at_least=at_least, task=entry.task, category=entry.category)
    )


@dataclass(frozen=True, kw_only=True)
class Measured:
    """The rule that stages have finished and that enough items have an answer."""

    required: Requirements

    def checks(self, candidate: Candidate) -> tuple[Check, ...]:
        """Return what is missing."""
        finished = candidate.stages or frozenset()
        lacks = [f"stage {name} has not finished" for name in self.required.stages if name not in finished]
        if self.required.items and (candidate.items is None or candidate.items < self.required.items):
            found = "an unknown number of" if candidate.items is None else candidate.items
            lacks.append(f"{found} items < {self.required.items}")
        for task, fewest in self.required.items_by_task.items():
            n = candidate.metrics.get(GateReading(metric=FLIPS, end="n", task=task).name)
            if n is None:
                lacks.append(f"items of {task} are missing")
            elif n < fewest:
                lacks.append(f"{n:.0f} items of {task} < {fewest}")
        return tuple(Check(passed=False, reason=f"required: {what}") for what in lacks)


@dataclass(frozen=True, kw_only=True)
class Plausible:
    """The rule that refuses gains which are too good to be true."""

    rule: AnomalyRule

    def checks(self, candidate: Candidate) -> tuple[Check, ...]:
        """Return what is anomalous."""
        found = []
        most = self.rule.max_accuracy_gain
        gain = candidate.metrics.get(GateReading(metric=DELTA, end="lower").name)
        if most is not None and gain is None:
            found.append(f"the lower end of {DELTA} is missing")
        elif most is not None and gain is not None and gain > most:
            found.append(f"accuracy rose by {gain:.4g} or more, which is above {most:g}")
        kl = candidate.metrics.get(GateReading(metric=KL, end="value").name)
        if self.rule.zero_kl and candidate.compresses and kl is not None and kl <= 0.0:
            found.append(f"KL is exactly 0, although method '{candidate.method}' changes weights")
        return tuple(Check(passed=False, reason=f"anomalous: {what}") for what in found)


def gates_of(policy: Policy) -> PolicyGates:
    """Return a policy's gates, rules and readings, after checking that its metrics exist.

    Raises `ConfigError`: a metric is unknown, or does not have what the policy reads of it.
    """
    gates: list[Gate | DivergenceGate] = []
    if policy.kl is not None:
        gates.append(DivergenceGate(max_kl=policy.kl.max_kl, max_outliers_pct=policy.kl.max_outliers_pct))
    readings = set()
    for gate, reading in [*map(_gate, policy.gates), *map(_margin, policy.margins)]:
        gates.append(gate)
        if reading is not None:
            readings.add(reading)
    rules: list[Rule] = []
    required = policy.require
    if required.stages or required.items or required.items_by_task:
        rules.append(Measured(required=required))
        readings |= {GateReading(metric=FLIPS, end="n", task=task) for task in required.items_by_task}
    if policy.anomalies.max_accuracy_gain is not None or policy.anomalies.zero_kl:
        rules.append(Plausible(rule=policy.anomalies))
        if policy.anomalies.max_accuracy_gain is not None:
            readings.add(GateReading(metric=DELTA, end="lower"))
        if policy.anomalies.zero_kl:
            readings.add(GateReading(metric=KL, end="value"))
    ranking_of(policy.objective)
    if policy.objective.by == "speed" and policy.objective.speed_metric in all_keys():
        readings.add(GateReading(metric=policy.objective.speed_metric, end="value"))
    return PolicyGates(gates=tuple(gates), rules=tuple(rules), readings=frozenset(readings))


def ranking_of(objective: Objective) -> tuple[Score, tuple[str, ...]]:
    """Return what ranks candidates, smaller first, and the metrics that it reads.

    Raises `ConfigError`: a metric of the utility has no better direction, and none is given.
    """
    if objective.by == "size":
        return (lambda candidate, passing: candidate.metrics[SIZE]), (SIZE, KL)
    if objective.by == "kl":
        return (lambda candidate, passing: candidate.metrics.get(KL, candidate.metrics.get(FLIPS, 0.0))), (KL, SIZE)
    if objective.by == "speed":
        metric, sign = objective.speed_metric, -1.0 if objective.speed_prefer == "higher" else 1.0
        return (lambda candidate, passing: sign * candidate.metrics[metric]), (metric, KL)
    signs = {term.metric: _sign(term.metric, term.prefer) for term in objective.utility}

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


def _sign(metric: str, prefer: str) -> float:
    """Return 1 where lower is better, and -1 where higher is."""
    known: Mapping[str, str] = {name: declared.direction for name, declared in all_keys().items()}
    sizes = {SIZE: "lower", "size/ratio": "higher", "size/bits_per_weight": "lower"}
    way = prefer if prefer != "auto" else sizes.get(metric) or known.get(metric, "neither")
    if way == "neither":
        raise ConfigError(f"The utility does not know which way {metric} is better", allowed="prefer: lower or higher")
    return 1.0 if way == "lower" else -1.0
