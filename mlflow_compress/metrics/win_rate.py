"""Comparisons in pairs: the variant's win rate against the baseline, and the judge's bias by position."""

from dataclasses import replace
from typing import Any

from mlflow_compress.errors import DataError
from mlflow_compress.metrics.core.metric_inputs import MetricInputs
from mlflow_compress.metrics.core.metric_registry import keys_of, metric
from mlflow_compress.metrics.core.requirements import COMPARISONS, DECIDED, VARIANT
from mlflow_compress.metrics.judge_scores import by_judge_model
from mlflow_compress.metrics.raters import Preference, preference_shares, won_and_lost
from mlflow_compress.records import Judgments, MetricResult

JUDGE = "pairwise"
_PREFIX = "judge/"
_FEWEST_PAIRS = 5  # that show a bias where all of them agree

_share = keys_of("judge", unit="share", high=1.0, counted="answers", by_task=True)
WIN_RATE = _share(
    "win_rate",
    "higher",
    "Share of answers in which the judge prefers the variant's; a tie counts half.",
    label="Win rate against baseline",
    headline=132,
    unchanged=0.5,
    on_request=True,
    unscored="the judge gave no verdict that can be read",
)
WINS = _share("wins", "neither", "Share of answers in which the variant's is better in both orders.")
LOSSES = _share("losses", "neither", "Share of answers in which the baseline's is better in both orders.")
CONSISTENCY = _share(
    "pairwise_consistency", "neither", "Share of compared answers with the same verdict in both orders."
)
FIRST = _share(
    "pairwise_first", "neither", "Share of compared answers in which the first place is preferred in both orders."
)
SECOND = _share(
    "pairwise_second", "neither", "Share of compared answers in which the second place is preferred in both orders."
)


@metric(
    "win_rate",
    keys=(WIN_RATE, WINS, LOSSES, CONSISTENCY, FIRST, SECOND),
    requires=(VARIANT, COMPARISONS, DECIDED),
    source="FastChat llm_judge show_result, pairwise mode: win_rate is its win_rate_adjusted; a pair whose orders "
    "disagree is a tie. Position bias as in arXiv 2306.05685, section 3.3, without identical answers",
)
def win_rate(inputs: MetricInputs) -> list[MetricResult]:
    """Win rate, wins and losses of all answers; position bias of those that were compared; by category too.

    Score intervals over questions, whose two turns stay together (`preference_interval`). Several judge models have
    results of their own, with the model as `task`. A pair with an unreadable verdict in either order counts as
    unscored. A judge that takes the same place in every pair (of five or more), whichever answer stands there, says
    nothing: there is no win rate then.
    """
    assert inputs.variant is not None and inputs.variant.judgments is not None  # required
    by_model = by_judge_model(inputs.variant.judgments, JUDGE)
    return [replace(r, task=model or None) for model, rows in by_model.items() for r in _results(inputs, rows)]


def _results(inputs: MetricInputs, judgments: Judgments) -> list[MetricResult]:
    pairs: dict[tuple[str, int], dict[int, dict[str, Any]]] = {}
    for row in judgments.table.to_pylist():
        if row["score"] not in (None, 0.0, 0.5, 1.0) or row["repeat"] not in (0, 1):
            raise DataError("Comparisons need verdicts of 0, 0.5 or 1 (or none), in two orders", got=row["item_id"])
        pairs.setdefault((row["item_id"], row["turn"]), {})[row["repeat"]] = row
    preferences = []
    for (item, _), orders in pairs.items():
        first, second = (orders[order]["score"] if order in orders else None for order in (0, 1))
        adds = None
        if first is not None and second is not None:
            # A verdict for the variant is 1: it is B in the first order, then A.
            adds = won_and_lost(first if first == second else 0.5)
            if orders[0]["judge"] != "none":
                both = (first, second)
                bias = {CONSISTENCY: first == second, FIRST: both == (0.0, 1.0), SECOND: both == (1.0, 0.0)}
                adds |= {key.name.removeprefix(_PREFIX): float(value) for key, value in bias.items()}
        preferences.append(Preference(item, orders[min(orders)]["category"] or "", adds))
    results = preference_shares(preferences, inputs.settings, prefix=_PREFIX)
    if not any(is_biased(r) for r in results if r.category is None):
        return results
    preferred = {key.name for key in (WIN_RATE, WINS, LOSSES)}
    return [r for r in results if r.name not in preferred]


def is_biased(result: MetricResult) -> bool:
    """Return whether a judge took this place in every pair; chance alone does so in one of 1,024 sets of five."""
    return result.name in (FIRST.name, SECOND.name) and result.value == 1.0 and result.n >= _FEWEST_PAIRS
