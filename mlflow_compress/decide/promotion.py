"""The promotion policy: gates on interval bounds, then ranks. Numbers in, a decision with reasons out."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from mlflow_compress.decide.gates import FLIPS, GATE_KL_ITEMS, KL, RATIO, SIZE, Check, DivergenceGate, Gate, in_words

NO_KL_OF_SERVED = (
    "KL: a server shows its most probable tokens alone, so KL has a lower bound and no upper end: give a policy with "
    "'kl: none', which bounds flips and accuracy"
)
"""Why a served model passes no gate on KL, and what to do."""

SAME_SIZE = 1.005
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
    served: bool = False  # Whether a server has the variant, so that neither its size nor its KL is known
    stages: frozenset[str] | None = None  # The stages that have finished; None where the policy does not ask
    # Why metrics are missing, by the beginning of their names: "speed/"
    absent: Mapping[str, str] = field(default_factory=dict)


class Rule(Protocol):
    """What a policy asks of a candidate besides gates; returns failed checks, or none."""

    def checks(self, candidate: Candidate) -> tuple[Check, ...]:
        """Return what is wrong with a candidate."""


@dataclass(frozen=True, kw_only=True)
class CandidateOutcome:
    """The decision on one candidate, with every reason."""

    candidate: Candidate
    passed: bool
    reasons: tuple[str, ...]
    rank: int | None = None


@dataclass(frozen=True, kw_only=True)
class Decision:
    """The champion (None if no candidate passes), and the outcome of every candidate, passing ones first."""

    champion: Candidate | None
    outcomes: tuple[CandidateOutcome, ...]

    def with_version(self, run_id: str, version: str) -> Decision:
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
            "reasons": ["; ".join(o.reasons) for o in self.outcomes],
            "run_id": [o.candidate.run_id for o in self.outcomes],
        }


def _size_checks(candidate: Candidate) -> list[Check]:
    """Return a failed check for controls, and for checkpoints that are not smaller than the baseline."""
    if not candidate.compresses:
        reason = f"not compressed: method '{candidate.method}' leaves the weights as they are, and cannot be promoted"
        return [Check(passed=False, reason=reason)]
    ratio = candidate.metrics.get(RATIO)
    if ratio is None and candidate.served:
        return [Check(passed=True, reason="size: not known of a served model, and not asked for")]
    if ratio is None:
        return [Check(passed=False, reason=f"size: {RATIO} is missing")]
    if ratio > SAME_SIZE:
        return []
    if ratio >= 2 - SAME_SIZE:
        return [Check(passed=False, reason="not smaller than the baseline: saved dense, same size")]
    return [Check(passed=False, reason=f"not smaller than the baseline: {1 / ratio:.3g} times its size")]


def _rankable(candidate: Candidate, ranked_by: Sequence[str]) -> list[Check]:
    """Return a failed check per missing metric of the ranking. KL is not needed if the evaluation has none."""
    metrics = candidate.metrics
    without_kl = candidate.served or metrics.get(GATE_KL_ITEMS) == 0
    needed = [FLIPS if metric == KL and without_kl else metric for metric in ranked_by]
    missing = [metric for metric in dict.fromkeys(needed) if metric not in metrics]
    return [
        Check(passed=False, reason=f"rank: {metric} is {_why_missing(candidate, metric)}", missing=metric)
        for metric in missing
    ]


def _why_missing(candidate: Candidate, metric: str) -> str:
    if candidate.served and metric == SIZE:
        return "not known of a served model: let the policy's objective rank by 'utility' or 'speed'"
    return "missing"


def _gate_checks(candidate: Candidate, gate: Gate | DivergenceGate) -> tuple[Check, ...]:
    """Return the checks of a gate; one on KL says why a served model cannot pass it."""
    if candidate.served and isinstance(gate, DivergenceGate) and GATE_KL_ITEMS not in candidate.metrics:
        return (Check(passed=False, reason=NO_KL_OF_SERVED),)
    return gate.checks(candidate.metrics)


Score = Callable[[Candidate, Sequence[Candidate]], float]
"""What ranks candidates, smaller first: from one of them, and all that pass."""


def _by_size(candidate: Candidate, passing: Sequence[Candidate]) -> float:
    return candidate.metrics[SIZE]


def decide(
    candidates: Sequence[Candidate],
    gates: Sequence[Gate | DivergenceGate],
    *,
    rules: Sequence[Rule] = (),
    score: Score = _by_size,
    ranked_by: Sequence[str] = (SIZE, KL),
) -> Decision:
    """Gate every candidate, and rank the passing ones by size. Ties are ranked by KL, then flips, then name.

    - `candidates`: Candidates of one evaluation. The decision does not depend on their order.
    - `gates`: A candidate passes when it is smaller than the baseline and passes every gate. A missing or NaN metric
      fails. The size of a served model is not known, and not asked for.
    - `ranked_by`: The metrics that the ranking reads. A candidate that lacks one fails.

    `champion` is the passing candidate with rank 1.
    """

    def outcome(candidate: Candidate) -> CandidateOutcome:
        checks = _size_checks(candidate)
        for gate in gates:
            checks += _gate_checks(candidate, gate)
        for rule in rules:
            checks += rule.checks(candidate)
        checks += _rankable(candidate, ranked_by)
        reasons = tuple(in_words(check, candidate.absent) for check in checks)
        return CandidateOutcome(candidate=candidate, passed=all(c.passed for c in checks), reasons=reasons)

    outcomes = [outcome(candidate) for candidate in candidates]
    through = [o.candidate for o in outcomes if o.passed]

    def order(found: CandidateOutcome) -> tuple[float, float, float, str]:
        metrics = found.candidate.metrics
        ties = metrics.get(KL, math.inf), metrics.get(FLIPS, math.inf)
        return score(found.candidate, through), *ties, found.candidate.name

    passing = sorted((o for o in outcomes if o.passed), key=order)
    failing = sorted((o for o in outcomes if not o.passed), key=lambda o: (o.candidate.name, o.candidate.run_id))
    ranked = tuple(
        CandidateOutcome(candidate=o.candidate, passed=True, reasons=o.reasons, rank=rank)
        for rank, o in enumerate(passing, start=1)
    )
    return Decision(champion=ranked[0].candidate if ranked else None, outcomes=(*ranked, *failing))
