"""What the evaluation says of variants: the KL on its texts, which the search has not seen, window by window."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from mlflow_compress.decide.scoreboard import item_scores
from mlflow_compress.errors import AlignmentError, DataError
from mlflow_compress.metrics.core.metric_inputs import MetricInputs
from mlflow_compress.metrics.stats.arrays import Float
from mlflow_compress.records import RunRecords, TokenDistances
from mlflow_compress.tracking import run_names
from mlflow_compress.tracking.run_names import RECORDS
from mlflow_compress.tracking.tracker import Tracker

_NO_KL, _FIX = "The evaluation of this search measures no KL", "Give tasks with text or options"


@dataclass(frozen=True, kw_only=True, eq=False)
class UnitKl:
    """KL of one variant on each unit of the evaluation.

    Attributes
    ----------
    unit : str
        "window" where the evaluation has corpora, else "item".
    keys : tuple of (str, str)
        Task and id of each unit.
    kl : numpy.ndarray, shape (n_units,)
        Nats: the mean per token of a window, or the KL of an item.
    """

    unit: str
    keys: tuple[tuple[str, str], ...]
    kl: Float

    def require_same(self, other: UnitKl) -> None:
        """Raise `AlignmentError` unless the other variant was measured on the same units."""
        if self.keys != other.keys:
            raise AlignmentError("Two variants of the search were not evaluated on the same texts")


def unit_kl(tracker: Tracker, main_run: str) -> UnitKl:
    """Return the KL of a main run's variant on each unit; a `DataError` where the evaluation measures none."""
    evaluate = tracker.children(main_run)["evaluate"]
    variant = RunRecords.read(tracker.fetch(evaluate.info.run_id, RECORDS))
    if variant.token_distances is not None:
        return _windows(variant.token_distances)
    baseline = RunRecords.read(tracker.fetch(evaluate.data.tags[run_names.BASELINE_RUN], RECORDS))
    inputs = MetricInputs(baseline=baseline, variant=variant)
    if reason := inputs.missing("items") or inputs.missing("predictions"):
        raise DataError(_NO_KL, got=reason, fix=_FIX)
    scores = item_scores(inputs)
    rows = np.isfinite(scores.kl)
    if not rows.any():
        raise DataError(_NO_KL, fix=_FIX)
    keys = tuple(zip(scores.task[rows].tolist(), scores.item_id[rows].tolist(), strict=True))
    return UnitKl(unit="item", keys=keys, kl=np.maximum(scores.kl[rows], 0.0))


def _windows(found: TokenDistances) -> UnitKl:
    names = list(zip(found.column("task").tolist(), found.column("item_id").tolist(), strict=True))
    keys = tuple(dict.fromkeys(names))
    number = {key: row for row, key in enumerate(keys)}
    rows = np.array([number[name] for name in names])
    return UnitKl(unit="window", keys=keys, kl=np.bincount(rows, found.column("kl")) / np.bincount(rows))
