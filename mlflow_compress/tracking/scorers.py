"""Scorers for `mlflow.genai.evaluate`: whether an answer flipped against the baseline's, refuses, or has a defect.

They return 1 and 0: MLflow's pages paint True green, as if it were good.
"""

import json
from collections import Counter
from typing import Any

import pandas as pd
from mlflow.entities import Feedback
from mlflow.genai.scorers import Scorer, scorer

from mlflow_compress.errors import DataError
from mlflow_compress.metrics.core.answer_files import answers_from_rows
from mlflow_compress.metrics.health import DEFECTS, defects_of
from mlflow_compress.metrics.refusals import refuses

# Names of the expectations, the first as MLflow calls it
_GOLD, BASELINE_ANSWER = "expected_response", "baseline_response"
_CALLS = "expected_tool_calls"  # the right calls, or the baseline's; as MLflow calls it


@scorer(pass_if=lambda flipped: not flipped)  # type: ignore[untyped-decorator, unused-ignore]
def flip(outputs: Any, expectations: dict[str, Any]) -> Feedback:
    """Return 1 where the correctness differs from the baseline's, else 0, by the rule of `mlflow-compress compare`.

    An item without an answer of both models is an error of this scorer, which MLflow counts apart.
    """
    if missing := [name for name in (_GOLD, BASELINE_ANSWER) if name not in expectations]:
        raise DataError(
            "The scorer 'flip' lacks expectations", allowed=f"{_GOLD}, {BASELINE_ANSWER}", got=f"no {missing}"
        )
    sides = {BASELINE_ANSWER: expectations[BASELINE_ANSWER], "outputs": outputs}
    rows = [{"id": name, "pred": answer, "gold": expectations[_GOLD]} for name, answer in sides.items()]
    baseline, variant = answers_from_rows(rows)
    if baseline.pred is None or variant.pred is None:
        raise DataError("An item without answers from both models has no flip", got=str(rows))
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


@scorer(pass_if=lambda defect: not defect)  # type: ignore[untyped-decorator, unused-ignore]
def health(inputs: dict[str, Any], outputs: str) -> Feedback:
    """Return 1 where the answer has a defect of `mlflow_compress.metrics.health.DEFECTS`, else 0.

    The question, which decides script and format, is the last message of the user, or the texts of the inputs.
    """
    if not isinstance(outputs, str):
        raise DataError("The scorer 'health' reads text", got=type(outputs).__name__)
    defects = defects_of(_question(inputs), outputs)
    return Feedback(
        value=float(bool(defects)), rationale="; ".join(DEFECTS[kind][0] for kind in defects) or "no defect"
    )


def _question(inputs: dict[str, Any]) -> str:
    messages = inputs.get("messages") or []
    asked = [message["content"] for message in messages if message.get("role") == "user"]
    return str(asked[-1]) if asked else "\n".join(value for value in inputs.values() if isinstance(value, str))


@scorer  # type: ignore[untyped-decorator, unused-ignore]
def tool_match(outputs: Any, expectations: dict[str, Any]) -> Feedback:
    """Return 1 where an answer makes the expected calls of tools and no other, in any order, else 0.

    `outputs` is a message, or a reply with one choice, in OpenAI's format; an answer without `tool_calls` makes none.
    `expected_tool_calls` lists names and arguments, `[]` for none. Arguments are equal as JSON is, by type: 1 is 1.0,
    but neither true nor "1". Arguments that are no JSON match nothing.
    """
    if _CALLS not in expectations:
        raise DataError("The scorer 'tool_match' lacks expectations", allowed=_CALLS, got=f"{sorted(expectations)}")
    try:
        made, wanted = (Counter(map(_call, calls)) for calls in (_made(outputs), expectations[_CALLS]))
    except (TypeError, ValueError, KeyError, AttributeError) as error:
        got = f"{outputs} and {expectations[_CALLS]}"[:200]
        raise DataError("The scorer 'tool_match' reads messages and calls of OpenAI's format", got=got) from error
    told = [
        f"{what} {name}({arguments})"
        for what, calls in (("made", made - wanted), ("missing", wanted - made))
        for name, arguments in calls.elements()
    ]
    return Feedback(value=float(made == wanted), rationale="; ".join(told) or f"the {wanted.total()} expected calls")


def _made(outputs: Any) -> list[Any]:
    if isinstance(outputs, str):
        return []
    [message] = [choice["message"] for choice in outputs["choices"]] if "choices" in outputs else [outputs]
    return message.get("tool_calls") or []


def _call(call: Any) -> tuple[str, str]:
    """Return the name and the arguments of a call as canonical JSON; what is no JSON as it is."""
    function = call.get("function", call)
    given = function.get("arguments") or {}
    try:
        text = given if isinstance(given, str) else json.dumps(given)
        read = json.loads(text, parse_float=lambda number: int(x) if (x := float(number)).is_integer() else x)
    except ValueError:
        return function["name"], f"no JSON: {given}"
    return function["name"], json.dumps(read, sort_keys=True)


def kl(items: pd.DataFrame) -> Scorer:
    """Return a scorer of the KL that an evaluation has measured on each item, in nats.

    `items` is what `Evaluation.items` returns, or the table `compress_items` that our evaluator logs. `inputs` has the
    item's `item_id`, and its `task` where there are several. An item without a KL is an error of this scorer, which
    MLflow counts apart.
    """
    measured = {(row["task"], str(row["item_id"])): row["kl"] for row in items.to_dict("records")}
    tasks = {task for task, _ in measured}
    only = next(iter(tasks)) if len(tasks) == 1 else None

    @scorer(name="kl")  # type: ignore[untyped-decorator, unused-ignore]
    def of_item(inputs: dict[str, Any]) -> float:
        key = (inputs.get("task", only), str(inputs.get("item_id")))
        if (value := measured.get(key)) is None or pd.isna(value):
            raise DataError("There is no KL of this item", got=f"task {key[0]!r}, item_id {key[1]!r}")
        return float(value)

    return of_item
