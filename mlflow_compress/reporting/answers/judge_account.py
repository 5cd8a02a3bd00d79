"""What became of the judgments, and what they cost: for report, note and terminal."""

from __future__ import annotations

from collections.abc import Mapping

UNSCORED = "judge/unscored/"


def account_rows(values: Mapping[str, float]) -> list[tuple[str, str]]:
    """Return name and text of each line of a judge run's account; none without judgments.

    Parameters
    ----------
    values : mapping of str to float
        The judge run's metrics: `judge/judgments`, `judge/unscored/<reason>`, `judge/prompt_tokens`, `judge/cost`, ...
    """
    if "judge/judgments" not in values and "judge/calls" not in values:
        return []
    rows = []
    if "judge/judgments" in values:
        rows.append(("Judgments", _judgments(values)))
    without = values.get("judge/calls_without_usage", 0)
    counted = f", {without:,.0f} of them without a count of tokens" if without else ""
    rows.append(("New calls", f"{values.get('judge/calls', 0):,.0f}{counted}"))
    if "judge/prompt_tokens" in values:
        rows.append(("Tokens of prompts", f"{values['judge/prompt_tokens']:,.0f}"))
        reasoning = values.get("judge/reasoning_tokens")
        thought = "" if reasoning is None else f", of which {reasoning:,.0f} were reasoning"
        rows.append(("Tokens of replies", f"{values['judge/completion_tokens']:,.0f}{thought}"))
    if "judge/cost" in values:
        rows.append(("Cost", f"{values['judge/cost']:.4g}, in the currency of judge_prices"))
    return rows


def account_text(values: Mapping[str, float]) -> str:
    """Return the account as a sentence; empty without judgments."""
    return "; ".join(f"{name.lower()} {text}" for name, text in account_rows(values))


def _judgments(values: Mapping[str, float]) -> str:
    """Return how many judgments there are, and how many have no rating for which reason."""
    n, unscored = values["judge/judgments"], values.get("judge/unscored", 0)
    if not unscored:
        return f"{n:,.0f}, all with a rating"
    reasons = {name.removeprefix(UNSCORED): number for name, number in values.items() if name.startswith(UNSCORED)}
    listed = ", ".join(f"{number:,.0f} {reason}" for reason, number in sorted(reasons.items(), key=lambda r: -r[1]))
    return f"{n:,.0f}, {unscored:,.0f} of them without a rating: {listed}"
