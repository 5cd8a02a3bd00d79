"""Scorers for `mlflow.genai.evaluate`: whether an answer flipped against the baseline's, and whether it refuses.

They return 1 and 0: MLflow's pages paint True green, as if it were good.
"""

from __future__ import annotations

from typing import Any

from mlflow.entities import Feedback
from mlflow.genai.scorers import scorer

from mlflow_compress.errors import DataError
from mlflow_compress.metrics.core.answer_files import answers_from_rows
from mlflow_compress.metrics.refusals import refuses

GOLD, BASELINE = "expected_response", "baseline_response"  # names of the expectations, the first as MLflow calls it


@scorer(pass_if=lambda flipped: not flipped)  # type: ignore[untyped-decorator, unused-ignore]
def flip(outputs: Any, expectations: dict[str, Any]) -> Feedback:
    """Return 1 where the correctness differs from the baseline's, else 0, by the rule of `mlflow-compress compare`.

    An item without an answer of both models is an error of this scorer, which MLflow counts apart.
    """
    if missing := [name for name in (GOLD, BASELINE) if name not in expectations]:
        raise DataError("The scorer 'flip' lacks expectations", allowed=f"{GOLD}, {BASELINE}", got=f"no {missing}")
    sides = {BASELINE: expectations[BASELINE], "outputs": outputs}
    rows = [{"id": name, "pred": answer, "gold": expectations[GOLD]} for name, answer in sides.items()]
    baseline, variant = answers_from_rows(rows)
    if baseline.pred is None or variant.pred is None:
        raise DataError("An item without an answer of both models did neither flip nor stay", got=str(rows))
    before, after = ("right" if answer.is_correct else "wrong" for answer in (baseline, variant))
    return Feedback(
        value=float(before != after),
        rationale=f"{before} to {after}: the baseline answers {baseline.pred!r}, this model {variant.pred!r}; "
        f"right is {variant.gold!r}",
    )


@scorer  # type: ignore[untyped-decorator, unused-ignore]
def refusal(outputs: str) -> float:
    """Return 1 where the answer begins with a refusal, else 0: see `mlflow_compress.metrics.refusals.RULES`."""
    if not isinstance(outputs, str):
        raise DataError("The scorer 'refusal' reads text", got=type(outputs).__name__)
    return float(refuses(outputs))
