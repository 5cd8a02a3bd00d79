"""Comparisons in pairs: the variant's win rate against the baseline, and the judge's bias by position."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from scipy import special

from mlflow_compress.errors import DataError
from mlflow_compress.metrics.core.item_table import ItemSubset
from mlflow_compress.metrics.core.metric_inputs import MetricInputs, MetricSettings
from mlflow_compress.metrics.core.metric_registry import keys_of, metric
from mlflow_compress.metrics.core.requirements import COMPARISONS, DECIDED, VARIANT
from mlflow_compress.metrics.judge_scores import by_judge_model
from mlflow_compress.metrics.stats.arrays import Float
from mlflow_compress.metrics.stats.intervals import Interval, paired_difference, z_value
from mlflow_compress.records import Judgments, MetricResult

PAIRWISE = "pairwise"
_PREFIX = "judge/"
_FEWEST_PAIRS = 5  # that show a bias where all of them agree

_share = keys_of("judge", unit="share", high=1.0, counted="answers", by_task=True)
_WIN_RATE = _share(
    "win_rate",
    "higher",
    "Share of answers in which the judge prefers the variant's; a tie counts half.",
    label="Win rate against baseline",
    headline=132,
    unchanged=0.5,
    on_request=True,
    unscored="the judge gave no verdict that can be read",
)
_WINS = _share("wins", "neither", "Share of answers in which the variant's is better in both orders.")
_LOSSES = _share("losses", "neither", "Share of answers in which the baseline's is better in both orders.")
_CONSISTENCY = _share(
    "pairwise_consistency", "neither", "Share of compared answers with the same verdict in both orders."
)
FIRST_PLACE = _share(
    "pairwise_first", "neither", "Share of compared answers in which the first place is preferred in both orders."
)
_SECOND = _share(
    "pairwise_second", "neither", "Share of compared answers in which the second place is preferred in both orders."
)


@metric(
    "win_rate",
    keys=(_WIN_RATE, _WINS, _LOSSES, _CONSISTENCY, FIRST_PLACE, _SECOND),
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
    by_model = by_judge_model(inputs.variant.judgments, PAIRWISE)
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
            adds = _won_and_lost(first if first == second else 0.5)
            if orders[0]["judge"] != "none":
                both = (first, second)
                bias = {_CONSISTENCY: first == second, FIRST_PLACE: both == (0.0, 1.0), _SECOND: both == (1.0, 0.0)}
                adds |= {key.name.removeprefix(_PREFIX): float(value) for key, value in bias.items()}
        preferences.append(_Preference(item, orders[min(orders)]["category"] or "", adds))
    results = _preference_shares(preferences, inputs.settings)
    if not any(is_biased(r) for r in results if r.category is None):
        return results
    preferred = {key.name for key in (_WIN_RATE, _WINS, _LOSSES)}
    return [r for r in results if r.name not in preferred]


def is_biased(result: MetricResult) -> bool:
    """Return whether a judge took this place in every pair; chance alone does so in one of 1,024 sets of five."""
    return result.name in (FIRST_PLACE.name, _SECOND.name) and result.value == 1.0 and result.n >= _FEWEST_PAIRS


@dataclass(frozen=True)
class _Preference:
    """One comparison of two answers."""

    question: str  # What both answer. Comparisons of one question depend on each other.
    category: str  # The question's category; "" for none
    # What it adds to the share of each name; None without a verdict. A share counts the comparisons that name it.
    adds: Mapping[str, float] | None


def _won_and_lost(value: float) -> dict[str, float]:
    """Return what a verdict adds to win rate, wins and losses: 1 if the variant won, 0 if it lost, 0.5 for a tie."""
    return {"win_rate": value, "wins": float(value == 1.0), "losses": float(value == 0.0)}


def _preference_shares(preferences: Iterable[_Preference], settings: MetricSettings) -> list[MetricResult]:
    """Return the share of each name, with `judge/` before it, over all comparisons, then by category."""
    given = list(preferences)
    questions = sorted({one.question for one in given})
    place = {question: i for i, question in enumerate(questions)}
    category = np.full(len(questions), "", dtype=object)
    # Per question: how often each name is 1, how often 0, and its count; and the comparisons without a verdict.
    names = dict.fromkeys(name for one in given for name in one.adds or ())
    counts = {name: np.zeros((len(questions), 3)) for name in names}
    unscored = np.zeros(len(questions), dtype=np.int64)
    for one in given:
        row = place[one.question]
        category[row] = one.category
        unscored[row] += one.adds is None
        for name, value in (one.adds or {}).items():
            counts[name][row] += (value == 1.0, value == 0.0, 1)
    results = []
    s = settings
    for part in [None, *sorted({c for c in category if c})]:
        rows = np.arange(len(questions)) if part is None else np.flatnonzero(category == part)
        for name, columns in counts.items():
            won, lost, n = columns[rows].sum(axis=0)
            if n == 0:
                continue
            value, interval = (n + won - lost) / (2 * n), preference_interval(columns[rows], level=s.level)
            of, missing = ItemSubset(None, part, rows), unscored[rows].sum()
            results.append(of.result(_PREFIX + name, value, interval, n=n, level=s.level, n_unscored=missing))
    return results


def preference_interval(counts: Float, *, level: float = 0.95) -> Interval | None:
    """Return the interval of a win rate, or of any share, over questions with one comparison or more.

    ``(1 + d)/2`` for the ends d of Tango's score interval of ``(won - lost)/n``, which is Wilson's where nothing is a
    tie. Where a question has several comparisons, the counts are divided by the design effect ``F = G/(G-1) sum_g
    (won_g - lost_g - d n_g)^2 / sum_i (x_i - d)^2``, with x = 1, 0, -1, over G questions; at least 1, and n/G where all
    comparisons came out alike, so that each question counts once. The quantile is then that of t(G - 1).

    - `counts` (G, 3): Of each question how often the variant won, and lost, and the number of comparisons.

    None for several comparisons of a single question.

    Source: Tango 1998 (see `paired_difference`); Rao and Scott, "A simple method for the analysis of clustered binary
    data", Biometrics 1992.
    """
    counts = counts[counts[:, 2] > 0]
    won, lost, n = counts.sum(axis=0)
    questions, effect = len(counts), 1.0
    if n > questions:
        if questions == 1:
            return None
        d = (won - lost) / n
        square = won + lost - n * d * d
        between = counts[:, 0] - counts[:, 1] - d * counts[:, 2]
        scale = questions / (questions - 1)
        effect = n / questions if square <= 1e-9 else max(scale * float(between @ between) / square, 1.0)
        effect *= (float(special.stdtrit(questions - 1, 0.5 + level / 2)) / z_value(level)) ** 2
    low, high = paired_difference(won / effect, lost / effect, n / effect, level=level)
    return Interval((1 + low) / 2, (1 + high) / 2)
