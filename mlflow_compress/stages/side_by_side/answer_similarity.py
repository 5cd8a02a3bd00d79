"""The similarity of all variants' answers, read from their judge runs."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from mlflow_compress.decide.scoreboard import Scoreboard
from mlflow_compress.errors import AlignmentError
from mlflow_compress.metrics.model_similarity import ModelSimilarity, model_similarity
from mlflow_compress.records.embeddings import Embeddings
from mlflow_compress.stages.side_by_side.answer_settings import answer_setting, common, finished_judge, unlike
from mlflow_compress.tracking.run_names import EMBEDDINGS
from mlflow_compress.tracking.tracker import Tracker

BASELINE, AGAIN = "baseline", "baseline, second sample"
"""Names of the baseline's two samples: their similarity is that of a model to itself."""


def answer_similarity(tracker: Tracker, board: Scoreboard) -> ModelSimilarity | None:
    """Return the similarity of the answers of the baseline and all variants; None if no variant's can be compared.

    A variant without answers, with answers of another setting, or embedded by another encoder is left out by name.

    Raises
    ------
    TrackingError, DataError
        Stored embeddings cannot be read.
    """
    judges, left_out = {}, {}
    for row in board.finished:
        judge = finished_judge(tracker.children(str(row.run_id)))
        setting = answer_setting(judge) if judge is not None else None
        if judge is None or setting is None:
            left_out[row.name] = "no finished judge stage embedded its answers"
        elif setting.encoder_id is None:
            left_out[row.name] = "its judge run, of an earlier release, kept no embeddings"
        else:
            judges[row.name] = judge, setting
    settings = {name: setting for name, (_, setting) in judges.items()}
    left_out |= unlike(settings)
    models: dict[str, npt.NDArray[np.floating]] = {}
    ids: tuple[str, ...] = ()
    for name, (judge, _) in judges.items():
        if name in left_out:
            continue
        folder = tracker.fetch(judge.info.run_id, EMBEDDINGS)
        if not models:
            for shown, stored in ((BASELINE, "baseline"), (AGAIN, "again")):
                ids, models[shown] = Embeddings.read(folder / stored).by_instruction()
        own, vectors = Embeddings.read(folder / "variant").by_instruction()
        if own != ids:
            raise AlignmentError("Two variants with one setting answered different instructions", got=name)
        models[_own_name(name, models)] = vectors
    if not models:
        return None
    return model_similarity(models, encoder=common(settings).encoder, left_out=left_out)


def _own_name(name: str, taken: Mapping[str, object]) -> str:
    """Return a variant's name; one that is called as the baseline's rows are is told apart from them."""
    return f"{name} (variant)" if name in taken else name
