"""MLflow's own doors: an application that only knows MLflow gets the numbers of the command line."""

import json
import os
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import mlflow
import pandas as pd
import pytest
from mlflow.data.dataset_source_registry import _dataset_source_registry
from mlflow.exceptions import MlflowException
from mlflow.models.evaluation.evaluator_registry import _model_evaluation_registry
from mlflow.models.evaluation.validation import ModelValidationFailedException

import mlflow_compress as mc
from mlflow_compress.config.policy import Policy
from mlflow_compress.decide.gates import gate_values
from mlflow_compress.decide.promotion import gates_of
from mlflow_compress.errors import ConfigError, DataError
from mlflow_compress.tracking.evaluator import CompressEvaluator, metric_thresholds
from mlflow_compress.tracking.logged_model import log_data_sets, log_variant_model
from mlflow_compress.tracking.scorers import flip, health, kl, refusal, tool_match
from mlflow_compress.tracking.task_source import TaskSource, file_source
from mlflow_compress.tracking.tracker import Tracker
from tests.conftest import CHECKOUT
from tests.task_files import sums
from tests.unit.test_logged_model import DataSet, checkpoint, entry  # noqa: F401 - a fixture

pytestmark = pytest.mark.filterwarnings("ignore")  # MLflow warns of columns of whole numbers

ROWS = [{**row, "answer": i % 3} for i, row in enumerate(sums(12, choices=["two", "four", "six"]))]

# Everything that such an application does. `import mlflow` must stay what it is: no torch, no module that computes.
APPLICATION = """
import json, sys
import mlflow
ours = sorted(name for name in sys.modules if name.startswith("mlflow_compress"))
early = {"torch": "torch" in sys.modules, "ours": ours}
import pandas as pd

uri, rows, baseline = sys.argv[1:]
result = mlflow.models.evaluate(
    uri, pd.DataFrame(json.loads(rows)), targets="answer", model_type="text", evaluators="compress",
    evaluator_config={"baseline": baseline, "task_args": {"noise_items": 4}},
)
run = mlflow.get_run(mlflow.last_active_run().info.run_id)
[nested] = mlflow.search_runs(filter_string=f"tags.`mlflow.parentRunId` = '{run.info.run_id}'", output_format="list")
table = result.tables["compress_items"].to_dict("list")
logged = {"metrics": run.data.metrics, "models": [one.model_id for one in run.inputs.model_inputs]}
print(json.dumps({"early": early, "metrics": result.metrics, "table": table, "logged": logged, "stage": nested.data.tags["stage"]}))
"""


@pytest.fixture
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    """Register what the entry points name, which this process's MLflow may not have read from this checkout."""
    monkeypatch.setitem(_model_evaluation_registry._registry, "compress", CompressEvaluator)
    monkeypatch.setattr(_dataset_source_registry, "sources", [*_dataset_source_registry.sources, TaskSource])


@pytest.mark.ci
def test_an_application_that_only_knows_mlflow_gets_the_numbers_of_the_command(
    tracker: Tracker,
    checkpoint: Path,  # noqa: F811
    entry_points: Path,
    tmp_path: Path,
) -> None:
    baseline = checkpoint.parent / "llama"
    with tracker.run("x", "main", {}, own=False) as run:
        model_id = log_variant_model(tracker, run.run_id, entry(checkpoint))
    done = subprocess.run(
        [sys.executable, "-c", APPLICATION, f"models:/{model_id}", json.dumps(ROWS), str(baseline)],
        env={**os.environ, "PYTHONPATH": f"{entry_points}{os.pathsep}{CHECKOUT}", "MLFLOW_TRACKING_URI": tracker.uri},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    said = json.loads(done.stdout.splitlines()[-1])
    light = ("", ".tracking", ".tracking.quiet_project_runs", ".tracking.task_source", ".version")
    assert said["early"] == {"torch": False, "ours": [f"mlflow_compress{name}" for name in light]}
    expected = mc.evaluate(
        checkpoint, model=str(baseline), tasks=ROWS, task_args={"noise_items": 4}, store=tmp_path / "other"
    )
    assert said["metrics"] == expected.metrics | gate_values(expected.pooled)
    assert {"distance/flips_pct", "quality/accuracy", "distance/kl_mean"} <= said["metrics"].keys()
    assert said["logged"] == {"metrics": said["metrics"], "models": [model_id]} and said["stage"] == "evaluate"
    assert said["table"]["item_id"] == [int(row["id"]) for row in ROWS]  # as pandas reads JSON
    assert said["table"]["kl"] == pytest.approx(expected.items()["kl"].tolist(), abs=1e-10)  # as pandas writes JSON


FRAME = {"id": [1, 2, 3, 4, 5], "gold": list("ABACA"), "base": [*"ABB", None, "A"], "new": [*"AAACB"]}


def evaluated(**more: Any) -> Any:
    named = {"targets": "gold", "predictions": "new", "model_type": "text", "evaluators": "compress"}
    arguments = {**named, "data": pd.DataFrame(FRAME), "evaluator_config": {"baseline": "base"}, **more}
    return mlflow.models.evaluate(**arguments)


def compared(folder: Path) -> dict[str, Any]:
    """Return what the command line's comparison finds."""
    for side in ("base", "new"):
        rows = [
            {"id": i, "pred": p, "gold": g} for i, p, g in zip(FRAME["id"], FRAME[side], FRAME["gold"], strict=True)
        ]
        (folder / f"{side}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return mc.compare(folder / "base.jsonl", folder / "new.jsonl").to_dict()


@pytest.mark.usefixtures("registered")
def test_static_predictions_get_the_numbers_of_compare(workdir: Path) -> None:
    expected, result = compared(workdir), evaluated()
    # Of the four items that both answered: 2 right to wrong, 3 wrong to right, 5 right to wrong.
    assert (expected["n"], expected["c2w"], expected["w2c"], expected["n_unscored"]) == (4, 2, 1, 1)
    gates = {"gate/flips_pct_upper", "gate/accuracy_drop_pct_upper"}
    numbers = {name: value for name, value in expected.items() if isinstance(value, int | float)}
    assert {name: value for name, value in result.metrics.items() if name not in gates} == numbers
    assert mlflow.last_active_run().data.metrics == result.metrics
    assert result.tables["compress_items"]["change"].fillna("").tolist() == ["", "c2w", "w2c", "", "c2w"]
    again = evaluated(data=pd.DataFrame(FRAME).assign(base=FRAME["new"]))
    assert (again.metrics["flips_pct"], again.metrics["mcnemar_p"]) == (0.0, 1.0)


@pytest.mark.usefixtures("registered", "workdir")
@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"evaluator_config": {"baseline": "nothing"}}, "column of the baseline's answers"),
        ({"evaluator_config": {"baseline": "base", "limit": 2}}, "other entries"),
        ({"targets": None}, "need the column 'id', targets"),
        ({"predictions": None}, "nothing to evaluate"),
        ({"custom_artifacts": [print]}, "neither extra_metrics nor custom_artifacts"),
        ({"predictions": None, "targets": None, "data": [["a"]]}, "a DataFrame"),
        ({"predictions": None, "model": lambda frame: frame}, "not a variant that mlflow-compress has logged"),
        ({"evaluator_config": {}}, "could not be evaluated by any"),  # MLflow goes on to other evaluators
    ],
)
def test_what_it_cannot_compare_is_refused_and_the_run_fails(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises((ConfigError, MlflowException), match=message):
        evaluated(**wrong)
    [run] = mlflow.search_runs(search_all_experiments=True, output_format="list")
    assert run.info.status == "FAILED" and not run.data.metrics


def test_flips_and_refusals_per_item_are_in_mlflow_s_evaluation(workdir: Path) -> None:
    data = [
        {
            "inputs": {"q": str(i)},
            "outputs": new,
            "expectations": {"expected_response": gold, **({"baseline_response": base} if base else {})},
        }
        for i, (gold, base, new) in enumerate(zip(FRAME["gold"], FRAME["base"], FRAME["new"], strict=True))
    ]
    data[0]["outputs"], data[0]["expectations"]["expected_response"] = "I'm sorry, but I can't help.", "I cannot"
    result = mlflow.genai.evaluate(data=data, scorers=[flip, refusal])
    rows = result.result_df.sort_values("request", key=lambda column: column.map(str))
    assert rows["flip/value"].fillna("error").tolist() == [False, True, True, "error", True]
    assert rows["refusal/value"].tolist() == [True, False, False, False, False]
    assert result.metrics["flip/mean"] == compared(workdir)["flips_pct"] / 100 == 0.75


def test_a_scorer_refuses_an_item_that_it_cannot_judge() -> None:
    with pytest.raises(DataError, match="lacks expectations"):
        flip(outputs="A", expectations={"expected_response": "A"})
    with pytest.raises(DataError, match="has no flip"):
        flip(outputs=None, expectations={"expected_response": "A", "baseline_response": "A"})
    with pytest.raises(DataError, match="reads text"):
        refusal(outputs={"text": "no"})
    assert flip.pass_if(False) and not flip.pass_if(True)  # MLflow takes True for good where nothing is said


@pytest.mark.usefixtures("workdir")
def test_defects_and_measured_kl_per_item_are_in_mlflow_s_evaluation() -> None:
    # The ids as numbers, as pandas reads the table from JSON.
    items = pd.DataFrame({"task": "sums", "item_id": [1, 2, 3], "kl": [0.25, 0.75, float("nan")]})
    answers = ["It is four.", "It is so. " * 9, "{"]
    asked = ["Two and two?", {"role": "user", "content": "Tell me more."}, "Answer in valid JSON."]
    inputs = [{"messages": [one]} if isinstance(one, dict) else {"q": one} for one in asked]
    data = [
        {"inputs": {**one, "item_id": str(n)}, "outputs": answer}
        for n, (one, answer) in enumerate(zip(inputs, answers, strict=True), 1)
    ]
    result = mlflow.genai.evaluate(data=data, scorers=[health, kl(items)])
    rows = result.result_df.sort_values("request", key=lambda column: column.map(lambda one: one["item_id"]))
    assert rows["health/value"].tolist() == [0.0, 1.0, 1.0]
    assert rows["kl/value"].fillna("error").tolist() == [0.25, 0.75, "error"]
    assert result.metrics["kl/mean"] == 0.5
    assert "repeat a span" in health(inputs=inputs[1], outputs=answers[1]).rationale
    with pytest.raises(DataError, match="reads text"):
        health(inputs={}, outputs=None)
    with pytest.raises(DataError, match=r"no KL of this item.*'other'"):
        kl(items)(inputs={"task": "other", "item_id": 1})


WEATHER = {"name": "weather", "arguments": {"city": "Bern", "days": 2, "at": {"hour": 1.0}}}


@pytest.mark.parametrize(
    ("calls", "wanted", "match", "why"),
    [
        ([WEATHER], [WEATHER], 1, "the 1 expected calls"),
        ([], [], 1, "the 0 expected calls"),
        ([WEATHER], [], 0, "made weather"),
        ([], [WEATHER], 0, "missing weather"),
        ([WEATHER, {"name": "now"}], [{"name": "now", "arguments": {}}, WEATHER], 1, "the 2 expected calls"),
        ([WEATHER, WEATHER], [WEATHER], 0, "made weather"),
        ([{**WEATHER, "arguments": '{"days": 2.0, "at": {"hour": 1}, "city": "Bern"}'}], [WEATHER], 1, "expected"),
        ([{**WEATHER, "arguments": '{"days": "2", "at": {"hour": 1}, "city": "Bern"}'}], [WEATHER], 0, "missing"),
        ([{**WEATHER, "arguments": '{"days": 2, "at": {"hour": true}, "city": "Bern"}'}], [WEATHER], 0, "missing"),
        ([{**WEATHER, "arguments": '{"days": 2, '}], [WEATHER], 0, "made weather(no JSON"),
        ([{**WEATHER, "name": "forecast"}], [WEATHER], 0, "made forecast"),
    ],
)
def test_calls_of_tools_match_by_name_and_by_arguments_of_their_type(
    calls: list[dict[str, Any]], wanted: list[dict[str, Any]], match: int, why: str
) -> None:
    message = {"role": "assistant", "tool_calls": [{"type": "function", "function": call} for call in calls]}
    for outputs in (message, {"choices": [{"message": message}]}, {"role": "assistant", "tool_calls": calls}):
        found = tool_match(outputs=outputs, expectations={"expected_tool_calls": wanted})
        assert found.value == match and why in found.rationale
    text = tool_match(outputs="It rains.", expectations={"expected_tool_calls": wanted})
    assert text.value == (wanted == [])
    for outputs, expectations in (
        (message, {}),
        (None, {"expected_tool_calls": []}),
        ({"choices": []}, {"expected_tool_calls": []}),
        (message, {"expected_tool_calls": [{"arguments": {}}]}),
        (message, {"expected_tool_calls": ["weather"]}),
    ):
        with pytest.raises(DataError, match="tool_match"):
            tool_match(outputs=outputs, expectations=expectations)


@pytest.mark.usefixtures("registered")
def test_what_we_log_can_be_loaded_by_its_source(tracker: Tracker, tmp_path: Path) -> None:
    file = tmp_path / "sums.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    (tmp_path / "tale.txt").write_text("Once upon a time.")
    with tracker.run("x", "main", {}) as run:
        files = file_source(file), file_source(tmp_path / "tale.txt")
        sources = enumerate([*files, {"task": "no_such_task"}, {"tasks": ["a", "b"]}])
        log_data_sets(tracker, run.run_id, [DataSet(name=f"d{i}", digest="f" * 64, source=s) for i, s in sources])
    logged = sorted(mlflow.get_run(run.run_id).inputs.dataset_inputs, key=lambda one: one.dataset.name)
    rows, text, unknown, several = (mlflow.data.get_source(one) for one in logged)
    assert rows.load().to_dict("records") == ROWS and text.load() == "Once upon a time."
    with pytest.raises(ConfigError, match="no_such_task"):
        unknown.load()
    with pytest.raises(ConfigError, match="stands for several tasks"):
        several.load()
    file.write_text(json.dumps(ROWS[0]))
    with pytest.raises(DataError, match="has changed since it was evaluated"):
        rows.load()


@pytest.mark.usefixtures("registered")
def test_a_policy_s_thresholds_pass_and_fail_as_its_gates_do(workdir: Path) -> None:
    result, same = evaluated(), evaluated(data=pd.DataFrame(FRAME).assign(base=FRAME["new"]))
    content = "kl: none\nmargins: []\ngates:\n  - {metric: distance/flips_pct, at_most: 60}\n"
    (workdir / "policy.yaml").write_text(content)
    thresholds = metric_thresholds(workdir / "policy.yaml", result.metrics)
    assert thresholds["gate/flips_pct_upper"].threshold == 60 and len(thresholds) == 1
    mlflow.validate_evaluation_results(thresholds, same)
    with pytest.raises(ModelValidationFailedException, match="gate/flips_pct_upper value threshold check failed"):
        mlflow.validate_evaluation_results(thresholds, result)
    with pytest.raises(ModelValidationFailedException, match="gate/kl_clipped_upper was missing"):  # no texts, no KL
        mlflow.validate_evaluation_results(metric_thresholds(None, same.metrics), same)
    (workdir / "policy.yaml").write_text("gates:\n  - {metric: quality/accuracy, at_least: 0.5}\n")
    with pytest.raises(ConfigError, match=r"quality/accuracy \(lower end\)"):  # results of MLflow do not have it
        metric_thresholds(workdir / "policy.yaml", {})


@pytest.mark.parametrize("n_items", [0.0, 50.0, 500.0])
def test_thresholds_are_what_the_gates_of_the_default_policy_read(n_items: float) -> None:
    """Without items there is no gate on KL; with some, three bounds: two upper ends, and the mean as measured."""
    metrics = {"gate/kl_items": n_items, "gate/flips_pct_upper": 1.0, "gate/accuracy_drop_pct_upper": 1.0}
    clipped = {"gate/kl_clipped_upper": 0.05, "gate/kl_above_clip_pct_upper": 1.0}
    metrics |= clipped
    values = ("distance/flips_pct", "quality/accuracy_delta", "distance/kl_clipped_mean", "distance/kl_above_clip_pct")
    metrics |= {"distance/kl_mean": 0.04, **dict.fromkeys(values, 0.0)}
    thresholds = metric_thresholds(None, metrics)
    assert len(thresholds) == {0.0: 2, 50.0: 5, 500.0: 5}[n_items]
    for name in (None, *thresholds):
        values = metrics if name is None else {**metrics, name: 1.01 * thresholds[name].threshold}
        ours = all(check.passed for gate in gates_of(Policy()).gates for check in gate.checks(values))
        result = mlflow.models.EvaluationResult(values, {}, "run")
        assert ours == (name is None)
        with nullcontext() if ours else pytest.raises(ModelValidationFailedException):
            mlflow.validate_evaluation_results(thresholds, result)
