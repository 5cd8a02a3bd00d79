"""The first sentences of the page: which variant a promotion policy would ship, and why."""

from __future__ import annotations

from collections.abc import Sequence

from mlflow_compress.decide.gates import DECODE_SPEEDUP, FLIPS, KL, MEMORY_RATIO, RATIO, DivergenceGate, Gate
from mlflow_compress.decide.promotion import CandidateOutcome
from mlflow_compress.decide.scoreboard import Scoreboard, ScoreColumn
from mlflow_compress.reporting.page.page_content import PageContent
from mlflow_compress.reporting.scoreboard_text import cell_text

_TOLD = (RATIO, KL, FLIPS, DECODE_SPEEDUP, MEMORY_RATIO)
_FIRST = {"size": "the smallest", "kl": "the closest", "speed": "the fastest", "utility": "the most useful"}
_PASSED = (" <= ", " >= ", "does not apply")  # in the reason of a gate that is passed


def choice_sentence(content: PageContent) -> str:
    """Return the variant that the policy chooses, or that none passes, as one sentence."""
    decision, board = content.decision, content.board
    if not decision.outcomes:
        return "No variant has results, so there is nothing to ship."
    if decision.champion is None:
        return f"Ship none of them yet: no variant passes {content.policy}."
    return f"Ship {decision.champion.name}: {_values(board, decision.champion.name)}."


def choice_reason(content: PageContent) -> str:
    """Return why, as one sentence; empty where no variant has results."""
    decision = content.decision
    if not decision.outcomes:
        return ""
    if decision.champion is None:
        return _nearest(content)
    n, passing = len(decision.outcomes), sum(outcome.passed for outcome in decision.outcomes)
    if n == 1:
        return f"It passes {content.policy}."
    if passing == 1:
        return f"It is the only one of {n} variants that passes {content.policy}."
    return f"It is {_FIRST[content.objective]} of the {passing} variants, of {n}, that pass {content.policy}."


def _values(board: Scoreboard, name: str) -> str:
    row = next(row for row in board.rows if row.name == name)
    columns: dict[str, ScoreColumn] = {column.key: column for column in board.columns}
    labels = {RATIO: "{} smaller", KL: "KL {}", FLIPS: "{} of answers flipped"}
    labels |= {DECODE_SPEEDUP: "decodes at {} the baseline's speed", MEMORY_RATIO: "{} its peak memory"}
    return ", ".join(
        labels[key].format(cell_text(row.cells[key], columns[key], interval=True))
        for key in _TOLD
        if key in row.cells and key in columns
    )


def _nearest(content: PageContent) -> str:
    """Return why the closest variant fails; the scoreboard is sorted by closeness."""
    outcomes = {o.candidate.name: o for o in content.decision.outcomes}
    closest = next(row.name for row in content.board.rows if row.name in outcomes)
    reasons = failed_reasons(outcomes[closest])
    return f"The closest to the baseline, {closest}, fails: {'; '.join(reasons)}."


def gate_texts(gates: Sequence[Gate | DivergenceGate]) -> list[str]:
    """Return each gate in words."""
    return [
        f"{gate.label} at {'least' if gate.at_least else 'most'} {gate.bound:g}"
        if isinstance(gate, Gate)
        else f"KL (upper end) at most {gate.max_kl:g} nats"
        for gate in gates
    ]


def failed_reasons(outcome: CandidateOutcome) -> list[str]:
    """Return the reasons for which a candidate fails; of one that passes, none."""
    return (
        [] if outcome.passed else [reason for reason in outcome.reasons if not any(part in reason for part in _PASSED)]
    )
