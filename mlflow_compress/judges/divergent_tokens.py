"""Where answers part: no judge model, only both models' greedy answers, and the variant on the baseline's."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from mlflow_compress.config import JudgeSettings
from mlflow_compress.judges.judge_registry import JUDGES, Judge, Judged, JudgeInputs


def _open(settings: JudgeSettings, folder: Path) -> Callable[[JudgeInputs], Judged]:
    """Return the judge, which needs nothing but the models."""
    return lambda inputs: Judged(records=inputs.greedy)


JUDGES.register("divergent_tokens")(
    Judge(
        open=_open,
        greedy=True,
        requires="Nothing but both models: each answers every instruction greedily, and scores the baseline's answers.",
        source="Divergent Token Metrics, arXiv 2311.01544",
    )
)
