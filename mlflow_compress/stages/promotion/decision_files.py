"""A decision in words and files: the sentence, the remarks, the Markdown table, and the JSON record."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from mlflow_compress.config.policy import Policy, policy_yaml
from mlflow_compress.decide.champion import Incumbent, Settlement
from mlflow_compress.decide.gates import FLIPS, GATE_FLIPS, Gate
from mlflow_compress.decide.policy_gates import PolicyGates
from mlflow_compress.decide.promotion import Decision
from mlflow_compress.metrics.stats.sample_size import items_for_flips_gate
from mlflow_compress.reporting.headline_text import escape_markdown
from mlflow_compress.stages.promotion.competition import Competition


def verdict_of(settlement: Settlement, alias: str, incumbent: Incumbent | None, version: str | None) -> str:
    """Return what happened to the alias, in one sentence. `version` is the winner's; None before it is registered."""
    winner = settlement.winner
    if settlement.outcome == "nothing":
        return f"No candidate passes every gate; alias '{alias}' is not moved."
    if winner is None or settlement.outcome == "unchanged":
        assert incumbent is not None
        name = winner.name if winner is not None else incumbent.name
        return f"{name} (version {incumbent.version}) stays '{alias}'."
    before = f", before it version {incumbent.version}" if incumbent else ""
    if version is None:
        return f"{winner.name} would become '{alias}'{before}."
    return f"{winner.name} (version {version}) is now '{alias}'{before}."


def remarks_of(
    competition: Competition, naming: str | None, settlement: Settlement, decision: Decision, policy: PolicyGates
) -> list[str]:
    """Return remarks on the decision: what was compared and left out, names of several, why the champion stays."""
    lines = [f"Compared: {competition.evaluation.described}, baseline '{competition.label}'."]
    lines += [f"Left out, not comparable: {group}." for group in competition.left_out]
    names_of_several = sorted({v.checkpoint[0] for v in competition.evaluation.variants if v.name != v.checkpoint[0]})
    lines += [
        f"'{name}' is the name of several checkpoints; they are shown with digits of their hashes."
        for name in names_of_several
    ]
    lines += [f"{reason[:1].upper()}{reason[1:]}." for reason in settlement.reasons]
    lines += _too_few_items(decision, policy)
    return [*lines, naming] if naming else lines


def _too_few_items(decision: Decision, policy: PolicyGates) -> list[str]:
    """Return a remark per candidate that flips little enough, but was measured on too few items to show it."""
    bounds = [gate.bound for gate in policy.gates if isinstance(gate, Gate) and gate.metric == GATE_FLIPS]
    lines = []
    for outcome in decision.outcomes:
        metrics = outcome.candidate.metrics
        if not bounds or FLIPS not in metrics or GATE_FLIPS not in metrics:
            continue
        flips, bound = metrics[FLIPS], min(bounds)
        if flips < bound < metrics[GATE_FLIPS] and bound < 100:
            n = items_for_flips_gate(flips / 100, bound / 100)
            lines.append(
                f"{outcome.candidate.name}: {flips:.3g} % of its answers flipped, fewer than {bound:g} %, but on too "
                f"few items to be sure. About {n:,} items would do."
            )
    return lines


def decision_markdown(verdict: str, remarks: list[str], decision: Decision) -> str:
    """Return the decision as Markdown: the verdict, the remarks, and a table of candidates with reasons."""
    lines = [verdict, "", *(f"- {remark}" for remark in remarks), ""]
    lines += ["| rank | variant | version | items | passed | reasons |", "|---|---|---|---|---|---|"]
    for outcome in decision.outcomes:
        c = outcome.candidate
        cells = (
            outcome.rank or "",
            c.name,
            c.version or "",
            "unknown" if c.items is None else c.items,
            "yes" if outcome.passed else "no",
            "; ".join(outcome.reasons),
        )
        lines.append(f"| {' | '.join(escape_markdown(str(cell)) for cell in cells)} |")
    return "\n".join(lines)


def decision_record(
    competition: Competition,
    registered_model: str,
    policy: Policy,
    gates: PolicyGates,
    decision: Decision,
    settlement: Settlement,
    incumbent: Incumbent | None,
) -> dict[str, Any]:
    """Return everything that decided, as plain values: what competed, the policy with its hash, and every reason."""
    evaluation = competition.evaluation
    return {
        "registered_model": registered_model,
        "evaluation": {"id": evaluation.id, "items": evaluation.items, "base_weights": evaluation.base_weights},
        "left_out": competition.left_out,
        "policy": {"sha256": policy.sha256, "text": policy_yaml(policy)},
        "gates": [asdict(gate) for gate in gates.gates],
        "outcome": settlement.outcome,
        "before": asdict(incumbent) if incumbent else None,
        "against_champion": asdict(settlement.compared) if settlement.compared else None,
        "decision": {
            "champion": settlement.winner.name if settlement.winner else None,
            "outcomes": [
                {
                    "candidate": {
                        **{k: v for k, v in asdict(outcome.candidate).items() if k != "stages"},
                        "stages": None if outcome.candidate.stages is None else sorted(outcome.candidate.stages),
                    },
                    "passed": outcome.passed,
                    "rank": outcome.rank,
                    "reasons": outcome.reasons,
                }
                for outcome in decision.outcomes
            ],
        },
    }
