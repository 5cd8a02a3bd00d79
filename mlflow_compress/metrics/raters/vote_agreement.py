"""How often a judge votes as people do, on pairs of answers of many models (FastChat's `compute_agreement.py`)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from mlflow_compress.errors import DataError
from mlflow_compress.metrics.core.metric_inputs import MetricSettings
from mlflow_compress.metrics.stats.bootstrap import bootstrap, ratio
from mlflow_compress.records import MetricResult

Winner = Literal["one", "other", "tie"]
Pair = tuple[str, int, str, str]
"""Question, turn (0 or 1), and the two models in alphabetical order."""

_WINNERS: Mapping[str, Winner] = {"model_a": "one", "model_b": "other"}
_SWAPPED: Mapping[Winner, Winner] = {"one": "other", "other": "one", "tie": "tie"}


@dataclass(frozen=True)
class Vote:
    """Which of two models' answers somebody prefers. `winner` is "one" for the first in alphabetical order."""

    pair: Pair
    winner: Winner


def read_vote(row: Mapping[str, Any], where: str) -> Vote:
    """Return the vote in a row of FastChat's published votes: question_id, model_a, model_b, winner, turn (1 or 2).

    A `winner` with "tie" in it is a tie, also "tie (inconsistent)" and "tie (bothbad)". Any other row is a `DataError`
    that names `where`.
    """
    try:
        question, turn = str(row["question_id"]), row["turn"]
        a, b, said = row["model_a"], row["model_b"], row["winner"]
    except KeyError as error:
        raise DataError(f"{where}: a vote needs question_id, model_a, model_b, winner and turn") from error
    if turn not in (1, 2) or not all(isinstance(text, str) for text in (a, b, said)) or a == b:
        raise DataError(f"{where}: this is no vote on two models' answers in turn 1 or 2", got=f"turn {turn}, {a}, {b}")
    winner = "tie" if "tie" in said else _WINNERS.get(said)
    if winner is None:
        raise DataError(f"{where}: unknown winner", allowed=[*_WINNERS, "tie"], got=said)
    one, other = sorted((a, b))
    return Vote((question, turn - 1, one, other), winner if a == one else _SWAPPED[winner])


def vote_agreement(judge: Iterable[Vote], people: Iterable[Vote], settings: MetricSettings) -> list[MetricResult]:
    """Return the share of people's votes that are the judge's too, by turn, with and without ties.

    Without ties, pairs that the judge calls a tie and votes that are ties are left out. `task` is "turn 1, with ties"
    and so on; bootstrap over questions.

    Parameters
    ----------
    judge : iterable of Vote
        At most one on each pair.
    people : iterable of Vote
        Any number on each pair. Each vote on a pair that the judge has one on counts.

    Raises
    ------
    DataError
        The judge has two different votes on one pair.

    References
    ----------
    FastChat, ``fastchat/llm_judge/compute_agreement.py``, "gpt4-pair" against "human"; Zheng et al., arXiv 2306.05685,
    table 5.
    """
    by_pair: dict[Pair, Winner] = {}
    for vote in judge:
        if by_pair.setdefault(vote.pair, vote.winner) != vote.winner:
            raise DataError("The judge has two different votes on one pair", got=vote.pair)
    compared = [(vote.pair, by_pair[vote.pair], vote.winner) for vote in people if vote.pair in by_pair]
    return _by_turn("votes/agreement", compared, settings)


def agreement_of_people(people: Iterable[Vote], settings: MetricSettings) -> list[MetricResult]:
    """Return the share of equal votes among all pairs of two people's votes on the same answers, as `vote_agreement`.

    This is what a judge's agreement is compared with: FastChat's "human" against "human".
    """
    by_pair: dict[Pair, list[Winner]] = {}
    for vote in people:
        by_pair.setdefault(vote.pair, []).append(vote.winner)
    compared = [
        (pair, votes[i], votes[j]) for pair, votes in by_pair.items() for j in range(len(votes)) for i in range(j)
    ]
    return _by_turn("votes/agreement_of_people", compared, settings)


def _by_turn(
    name: str, compared: Sequence[tuple[Pair, Winner, Winner]], settings: MetricSettings
) -> list[MetricResult]:
    results = []
    for turn in (0, 1):
        for ties in (True, False):
            equal: dict[str, list[int]] = {}
            for pair, left, right in compared:
                if pair[1] == turn and (ties or "tie" not in (left, right)):
                    sums = equal.setdefault(pair[0], [0, 0])
                    sums[0] += left == right
                    sums[1] += 1
            if not equal:
                continue
            columns = np.array([equal[question] for question in sorted(equal)], dtype=np.float64)
            s = settings
            interval = bootstrap(columns, ratio, resamples=s.resamples, level=s.level, seed=s.seed, method=s.method)
            low, high = (None, None) if interval is None else interval
            agree, n = columns.sum(axis=0)
            task = f"turn {turn + 1}, {'with' if ties else 'without'} ties"
            results.append(
                MetricResult(name=name, value=float(agree / n), low=low, high=high, level=s.level, n=int(n), task=task)
            )
    return results
