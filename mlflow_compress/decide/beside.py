"""Beside a choice: with what it is tied, and why each smaller variant was not taken."""

from collections.abc import Iterable

from mlflow_compress.decide.gates import SIZE, DivergenceGate, Gate
from mlflow_compress.decide.promotion import CandidateOutcome, Decision, ends_for_all
from mlflow_compress.decide.scoreboard import Scoreboard
from mlflow_compress.decide.separation import Separation

_MOST_SMALLER = 5


def to_compare(decision: Decision, *, most: int = 12) -> list[str]:
    """Return the runs that must be compared item by item: the choice, who passes beside it, and who is smaller."""
    if decision.champion is None or len(decision.outcomes) < 2:
        return []
    passing = [outcome.candidate.run_id for outcome in decision.outcomes if outcome.passed]
    smaller = [outcome.candidate.run_id for outcome in _smaller(decision)]
    return [*passing[: most - min(len(smaller), _MOST_SMALLER)], *smaller[:_MOST_SMALLER]]


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
    unread = [o.candidate.name for o in others if o.candidate.served_by == ()] if champion.served_by != () else []
    notes += [f"Not {', '.join(unread)}: only this package reads the format, no server does."] if unread else []
    smaller = _smaller(decision)
    for outcome in smaller[:_MOST_SMALLER]:
        less = 100 * (1 - outcome.candidate.metrics[SIZE] / champion.metrics[SIZE])
        said = f"Not {outcome.candidate.name}, {less:.3g} % smaller: {'; '.join(outcome.failed)}"
        pair = beside(outcome)
        if pair is not None and (test := pair.correctness) is not None:
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
