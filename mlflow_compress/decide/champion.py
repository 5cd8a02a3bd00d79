"""Challenger against champion: the direct comparison, paired on items, and whether the alias moves."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal

import numpy as np

from mlflow_compress.config.policy import ReplacementRule
from mlflow_compress.decide.gates import KL, SIZE, DivergenceGate, Gate
from mlflow_compress.decide.promotion import Candidate, CandidateOutcome, Decision, ends_for_all
from mlflow_compress.decide.scoreboard import Scoreboard
from mlflow_compress.decide.separation import Separation
from mlflow_compress.metrics.core.estimates import Mean, PairedDifference
from mlflow_compress.metrics.core.item_table import option_means
from mlflow_compress.metrics.core.metric_inputs import MetricInputs, MetricSettings
from mlflow_compress.metrics.stats.intervals import Interval
from mlflow_compress.metrics.stats.significance import non_inferior
from mlflow_compress.records import RunRecords


@dataclass(frozen=True, kw_only=True)
class HeadToHead:
    """Challenger minus champion, on the items that both answered."""

    # Mean difference of the KL to the baseline, in nats; None where no item has a KL, or too few differ
    kl: float | None
    kl_interval: Interval | None
    kl_items: int  # Items with a KL of both
    kl_is_same: bool  # Whether both have the same KL on every item, as two copies of one variant have
    accuracy: float  # Difference of accuracy, as a share
    accuracy_interval: Interval | None  # Tango's paired score interval; None where too few groups hold the items
    items: int  # Items that both answered
    gained: int  # Items that only the challenger, and only the champion, has right
    lost: int

    @property
    def described(self) -> str:
        """Both differences with their intervals, in one sentence."""
        points = None if self.accuracy_interval is None else [100 * end for end in self.accuracy_interval]
        ends = "no interval" if points is None else "[{:+.2f}, {:+.2f}]".format(*points)
        accuracy = f"accuracy {100 * self.accuracy:+.2f} points {ends} on {self.items} items"
        if self.kl is None:
            return f"{accuracy}; no item has a KL"
        ends = "no interval" if self.kl_interval is None else "[{:+.4g}, {:+.4g}]".format(*self.kl_interval)
        ends = "on every item" if self.kl_is_same else ends
        return f"KL {self.kl:+.4g} nats {ends}; {accuracy}"


def head_to_head(champion: RunRecords, challenger: RunRecords) -> HeadToHead | str:
    """Return the direct comparison of two variants of one baseline, or the reason why there is none.

    Per item, the difference of both models' KL to the baseline and of their correctness; intervals at 95 %, over groups
    of items where they share a text. Other items are an `AlignmentError`.
    """
    if champion.items is None or challenger.items is None:
        return "no items were evaluated"
    if champion.draws is not None or challenger.draws is not None:
        return "their items were drawn with unequal probabilities, so they are compared by their intervals only"
    inputs = MetricInputs(baseline=champion, variant=challenger)
    rows = inputs.headline_rows[inputs.scored_by_both[inputs.headline_rows]]
    if not len(rows):
        return "no item was answered by both"
    settings, groups = MetricSettings(), inputs.view.group[rows]
    before, after = inputs.baseline_predictions.correct[rows, 0], inputs.variant_predictions.correct[rows, 0]
    moved = PairedDifference.of(before, after, groups)
    accuracy, accuracy_ends = moved.at(settings, 1.0)
    n_kl, kl, kl_ends, is_same = 0, None, None, False
    if champion.option_distances is not None and challenger.option_distances is not None:
        of_champion = option_means(inputs.view, champion.option_distances, "kl")[rows]
        both = np.maximum(inputs.distance("kl")[rows], 0.0) - np.maximum(of_champion, 0.0)
        differences = Mean.of_scored(both, groups, skewed=True)
        n_kl, is_same = differences.n, not differences.values.any()
        kl, kl_ends = differences.at(settings, 1.0) if n_kl else (None, None)
    return HeadToHead(
        kl=kl,
        kl_interval=Interval(*kl_ends) if kl_ends else None,
        kl_items=n_kl,
        kl_is_same=is_same,
        accuracy=accuracy,
        accuracy_interval=Interval(*accuracy_ends) if accuracy_ends else None,
        items=moved.n,
        gained=int(moved.gained),
        lost=int(moved.lost),
    )


@dataclass(frozen=True, kw_only=True)
class Incumbent:
    """The version that has the alias now."""

    name: str  # Its variant
    version: str  # Its version in the registry, and its main run
    run_id: str
    evaluation: str | None  # Its evaluation id; None where the version does not say
    pinned: bool  # Whether it has the alias "pinned", and is never replaced


@dataclass(frozen=True, kw_only=True)
class Settlement:
    """What becomes of the alias."""

    # It moves, stays where it is until somebody approves, stays where it is, or no candidate passes
    outcome: Literal["promoted", "waiting", "unchanged", "nothing"]
    winner: Candidate | None  # The candidate that gets or has the alias; None where nobody of this evaluation does
    # Why candidates that rank higher did not get it, and how the winner compares with the champion
    reasons: tuple[str, ...] = ()
    compared: HeadToHead | None = None  # The winner against the champion; None where they were not compared


Compare = Callable[[Candidate], HeadToHead | str]
"""From a challenger to its comparison with the champion, or to the reason why there is none."""


def settle(
    decision: Decision, incumbent: Incumbent | None, rule: ReplacementRule, evaluation: str, compare: Compare
) -> Settlement:
    """Return what becomes of the alias: the first passing candidate that may replace the champion gets it."""
    passing = [outcome.candidate for outcome in decision.outcomes if outcome.passed]
    if not passing:
        return Settlement(outcome="nothing", winner=None)
    if incumbent is None:
        return Settlement(outcome="promoted", winner=passing[0])
    held = f"'{incumbent.name}' (version {incumbent.version})"
    reasons: list[str] = []
    for candidate in passing:
        if candidate.run_id == incumbent.run_id:
            return Settlement(outcome="unchanged", winner=candidate, reasons=tuple(reasons))
        if incumbent.pinned:
            return Settlement(outcome="unchanged", winner=None, reasons=(f"{held} is pinned and is not replaced",))
        if rule.replace == "same_evaluation" and incumbent.evaluation != evaluation:
            of = f"evaluation {incumbent.evaluation[:8]}" if incumbent.evaluation else "an unknown evaluation"
            reason = f"{held} was measured in {of}, and only a champion of the same evaluation may be replaced"
            return Settlement(outcome="unchanged", winner=None, reasons=(reason,))
        comparison = compare(candidate)
        allowed, reason = _may_replace(comparison, rule)
        reasons.append(f"{candidate.name} against the champion {held}: {reason}")
        if allowed:
            compared = None if isinstance(comparison, str) else comparison
            return Settlement(outcome="promoted", winner=candidate, reasons=tuple(reasons), compared=compared)
    return Settlement(outcome="unchanged", winner=None, reasons=tuple(reasons))


def _may_replace(pair: HeadToHead | str, rule: ReplacementRule) -> tuple[bool, str]:
    """Return whether a challenger may replace the champion, and why."""
    if isinstance(pair, str):
        return rule.require == "none", f"not compared directly, because {pair}"
    if rule.require == "none":
        return True, pair.described
    better, because = rule.require == "better", ""
    change = pair.accuracy_interval
    shown = change is not None and non_inferior(*change, margin=rule.accuracy_margin, direction="higher")
    if change is None:
        because = ", because the accuracy has no interval"
    elif pair.kl_items == 0:
        shown = change.low > 0.0 if better else shown
    elif pair.kl_is_same:
        shown = shown and not better
    elif pair.kl_interval is None:
        shown, because = False, ", because KL has no interval"
    elif better:
        shown = shown and pair.kl_interval.high < 0.0
    else:
        shown = shown and non_inferior(*pair.kl_interval, margin=rule.kl_margin, direction="lower")
    what = "better" if better else "not worse than the margins allow"
    return shown, f"{pair.described}; {'' if shown else 'not '}shown to be {what}{because}"


_MOST_COMPARED, _MOST_SMALLER = 12, 5


def to_compare(decision: Decision) -> list[str]:
    """Return the runs that must be compared item by item: the choice, who passes beside it, and who is smaller."""
    if decision.champion is None or len(decision.outcomes) < 2:
        return []
    passing = [outcome.candidate.run_id for outcome in decision.outcomes if outcome.passed]
    smaller = [outcome.candidate.run_id for outcome in _smaller(decision)]
    return [*passing[: _MOST_COMPARED - min(len(smaller), _MOST_SMALLER)], *smaller[:_MOST_SMALLER]]


def choice_notes(
    decision: Decision, board: Scoreboard | None, gates: Iterable[Gate | DivergenceGate] = ()
) -> list[str]:
    """Return the ends that hold for all, what the choice is tied with, and why no smaller variant was taken.

    Two variants are tied where neither the KL nor the right answers tell them apart on the items of `board`: the
    p-values of all its pairs are adjusted together, so that an order which is not there is claimed with at most 5 %.
    Without a board nothing is said of ties.
    """
    champion = decision.champion
    if champion is None:
        return []
    names = {} if board is None else {row.run_id: row.name for row in board.rows}
    chosen = names.get(champion.run_id)
    pairs = {frozenset((pair.first, pair.second)): pair for pair in (board.separations if board else ())}

    def beside(outcome: CandidateOutcome) -> Separation | None:
        return pairs.get(frozenset((str(chosen), str(names.get(outcome.candidate.run_id)))))

    others = [o for o in decision.outcomes if o.passed and o.candidate.run_id != champion.run_id]
    tied = [o.candidate.name for o in others if (pair := beside(o)) is not None and pair.tied]
    for_all = ends_for_all(decision, gates)
    notes = [for_all] if for_all else []
    if tied:
        notes.append(f"Tied with {', '.join(tied)}: neither KL nor right answers tell them apart on these items.")
    kl = champion.metrics.get(KL, 0.0)
    for other in (o.candidate for o in others if o.candidate.served_by != () or champion.served_by == ()):
        if SIZE in champion.metrics and other.metrics.get(KL, kl) < kl:
            more = 100 * (other.metrics[SIZE] / champion.metrics[SIZE] - 1)
            closer = f"Not {other.name}, which is closer (KL {other.metrics[KL]:.3g}, not {kl:.3g})"
            notes.append(f"{closer}: {more:.3g} % larger.")
    unread = [o.candidate.name for o in others if o.candidate.served_by == ()] if champion.served_by != () else []
    notes += [f"Not {', '.join(unread)}: only this package reads the format, no server does."] if unread else []
    smaller = _smaller(decision)
    for outcome in smaller[:_MOST_SMALLER]:
        less = 100 * (1 - outcome.candidate.metrics[SIZE] / champion.metrics[SIZE])
        said = f"Not {outcome.candidate.name}, {less:.3g} % smaller: {'; '.join(outcome.failed)}"
        pair = beside(outcome)
        test = None if pair is None else pair.correctness
        if pair is not None and test is not None and test.low is not None and test.high is not None:
            # A pair is the second minus the first.
            ends = (test.value, test.low, test.high)
            change, low, high = ends if pair.first == chosen else (-ends[0], -ends[2], -ends[1])
            apart = "" if test.significant else ", which chance alone may explain"
            said += (
                f". Its accuracy differs from {champion.name}'s by {100 * change:+.2f} points "
                f"[{100 * low:+.2f}, {100 * high:+.2f}]{apart}"
            )
        notes.append(f"{said}.")
    if len(smaller) > _MOST_SMALLER:
        more = len(smaller) - _MOST_SMALLER
        notes.append(f"{more} more smaller {'variant fails' if more == 1 else 'variants fail'} too.")
    return notes


def _smaller(decision: Decision) -> list[CandidateOutcome]:
    """Return the candidates that fail and are smaller than the choice, the largest first."""
    assert decision.champion is not None
    limit = decision.champion.metrics.get(SIZE, 0.0)
    failing = [o for o in decision.outcomes if not o.passed and o.candidate.metrics.get(SIZE, limit) < limit]
    return sorted(failing, key=lambda outcome: (-outcome.candidate.metrics[SIZE], outcome.candidate.name))
