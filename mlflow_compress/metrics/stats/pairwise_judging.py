"""Pairwise judging: win, tie, loss when every pair is judged in both orders."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from mlflow_compress.errors import DataError
from mlflow_compress.metrics.stats.arrays import same_length
from mlflow_compress.metrics.stats.intervals import Interval, paired_difference
from mlflow_compress.metrics.stats.significance import mcnemar_exact

Verdict = Literal["first", "second", "tie"]
_VERDICTS = ("first", "second", "tie")


@dataclass(frozen=True, kw_only=True)
class PairwiseResult:
    """Outcome of the variant against the baseline.

    Attributes
    ----------
    wins, ties, losses : int
        Of the variant; `ties` holds the pairs on which the two orders disagree.
    disagreements : int
        Pairs whose two orders gave different verdicts: the judge's position bias.
    n_unscored : int
        Pairs without a readable verdict in either order.
    """

    wins: int
    ties: int
    losses: int
    disagreements: int
    n_unscored: int

    @property
    def n(self) -> int:
        """Judged pairs."""
        return self.wins + self.ties + self.losses

    @property
    def win_rate(self) -> float:
        """``(wins + ties/2)/n``: 0.5 for equal models."""
        return (self.wins + self.ties / 2) / self.n

    @property
    def p_value(self) -> float:
        """Exact two-sided sign test of wins against losses."""
        return mcnemar_exact(self.losses, self.wins)

    def interval(self, *, level: float = 0.95) -> Interval:
        """Return the interval of the win rate, from the score interval of ``(wins - losses)/n``."""
        low, high = paired_difference(self.wins, self.losses, self.n, level=level)
        return Interval((1 + low) / 2, (1 + high) / 2)


def pairwise(variant_first: Sequence[Verdict | None], variant_second: Sequence[Verdict | None]) -> PairwiseResult:
    """Combine both orders of each pair.

    Parameters
    ----------
    variant_first, variant_second : sequence of {"first", "second", "tie", None}
        The judge's verdict with the variant shown first, and with it shown second; None where none could be read.

    Notes
    -----
    As in FastChat, a win needs the same winner in both orders; every other pair of verdicts is a tie.

    References
    ----------
    Zheng et al., "Judging LLM-as-a-Judge with MT-Bench and Chatbot Arena".
    """
    if same_length(variant_first=variant_first, variant_second=variant_second) == 0:
        raise DataError("Pairwise judging needs at least one pair")
    counts = {"wins": 0, "ties": 0, "losses": 0, "disagreements": 0, "n_unscored": 0}
    value = {"first": 1, "second": -1, "tie": 0}
    for ahead, behind in zip(variant_first, variant_second, strict=True):
        if ahead is None or behind is None:
            counts["n_unscored"] += 1
            continue
        for verdict in (ahead, behind):
            if verdict not in _VERDICTS:
                raise DataError("Unknown verdict", allowed=_VERDICTS, got=str(verdict))
        one, two = value[ahead], -value[behind]
        counts["disagreements"] += one != two
        counts["ties" if one != two or one == 0 else "wins" if one > 0 else "losses"] += 1
    if counts["n_unscored"] == len(variant_first):
        raise DataError("No pair has a readable verdict in both orders")
    return PairwiseResult(**counts)
