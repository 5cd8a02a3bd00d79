"""What the scoreboard reads of a variant: its results, its size, its cost, and what it scored on each item."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from mlflow_compress.errors import AlignmentError, DataError
from mlflow_compress.metrics.core.metric_inputs import MetricInputs
from mlflow_compress.metrics.stats.arrays import Float, Objects, same_length
from mlflow_compress.records import MetricResult

Status = Literal["finished", "failed", "unsupported"]
NO_SPEED_STAGE = "the speed stage was not run"
"""Why a variant has no speed where none was asked for."""


@dataclass(frozen=True, eq=False)
class ItemScores:
    """What one variant scored on each item of the headline values. Row `i` of every array is item `i`.

    Attributes
    ----------
    task, item_id : numpy.ndarray of str, shape (n,)
        Together they identify an item.
    correct : numpy.ndarray of float, shape (n,)
        1 where the variant is right, 0 where it is wrong, NaN where variant or baseline has no answer.
    kl : numpy.ndarray of float, shape (n,)
        Divergence from the baseline in nats, NaN where the item has none.
    """

    task: Objects
    item_id: Objects
    correct: Float
    kl: Float

    def __post_init__(self) -> None:
        same_length(task=self.task, item_id=self.item_id, correct=self.correct, kl=self.kl)

    def in_order_of(self, other: ItemScores) -> ItemScores:
        """Return the same scores, with the items in the order of `other`.

        Raises
        ------
        AlignmentError
            The items are not the same.
        """
        mine, theirs = self._keys(), other._keys()
        if mine == theirs:
            return self
        rows = {key: row for row, key in enumerate(mine)}
        if len(rows) != len(mine) or set(rows) != set(theirs):
            raise AlignmentError(
                "Two variants were not evaluated on the same items", fix="Compare variants of one evaluation"
            )
        order = np.array([rows[key] for key in theirs])
        return ItemScores(self.task[order], self.item_id[order], self.correct[order], self.kl[order])

    def _keys(self) -> list[tuple[str, str]]:
        return list(zip(self.task.tolist(), self.item_id.tolist(), strict=True))


def item_scores(inputs: MetricInputs) -> ItemScores:
    """Return the scores of a variant on the items that its headline values are pooled over.

    Raises
    ------
    DataError
        The inputs hold no variant, or no predictions.
    """
    reason = inputs.missing("variant") or inputs.missing("predictions")
    if inputs.variant is None or reason is not None:
        raise DataError("The items of these records cannot be compared", got=reason)
    view = inputs.view
    rows = np.flatnonzero(np.isin(view.family, inputs.headline_families))
    right = inputs.variant_predictions.correct[rows, 0].astype(np.float64)
    measured = inputs.variant.option_distances is not None
    return ItemScores(
        task=view.task[rows],
        item_id=view.item_id[rows],
        correct=np.where(inputs.scored_by_both[rows], right, np.nan),
        kl=inputs.distance("kl")[rows] if measured else np.full(len(rows), np.nan),
    )


@dataclass(frozen=True, kw_only=True, eq=False)
class ScoredVariant:
    """One variant of an evaluation, as the scoreboard reads it.

    Attributes
    ----------
    name, method : str
        The variant's name, which no other variant of the scoreboard has, and the method that made it.
    run_id : str or None
        Its main run; None where none was started.
    bits : float or None
        The bits that were asked for; None where the method has no such setting.
    status : {"finished", "failed", "unsupported"}
        Whether it has results.
    reason : str
        Why it has none, or not all.
    results : mapping of str to MetricResult
        Headline results by metric: `metrics.headline(results)`.
    sizes : mapping of str to float
        "size/bytes", "size/ratio", "size/bits_per_weight".
    seconds : mapping of str to float
        Duration of each stage, by its name.
    items : ItemScores or None
        What it scored on each item; None where it has no results.
    left_out : str
        Which of its results are not compared, and why.
    runtime, not_timed : str
        What it was timed in, with the version, or why it has no speed; the other of the two is empty.
    """

    name: str
    method: str
    run_id: str | None = None
    bits: float | None = None
    status: Status = "finished"
    reason: str = ""
    results: Mapping[str, MetricResult] = field(default_factory=dict)
    sizes: Mapping[str, float] = field(default_factory=dict)
    seconds: Mapping[str, float] = field(default_factory=dict)
    items: ItemScores | None = None
    left_out: str = ""
    runtime: str = ""
    not_timed: str = ""
