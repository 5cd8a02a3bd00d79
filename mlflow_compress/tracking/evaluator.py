"""MLflow's evaluator "compress": `mlflow.models.evaluate` compares a variant with its baseline, as our commands do."""

import json
from collections.abc import Mapping
from os import PathLike, fspath
from typing import Any

import pandas as pd
from mlflow.models import EvaluationResult, MetricThreshold
from mlflow.models.evaluation import ModelEvaluator
from mlflow.tracking import MlflowClient
from mlflow.utils.mlflow_tags import MLFLOW_PARENT_RUN_ID

from mlflow_compress.errors import ConfigError

_ITEMS_TABLE = "compress_items"


class CompressEvaluator(ModelEvaluator):  # type: ignore[misc]
    """Compares question rows' answers of a variant with those of its baseline.

    With a model that a main run logged, or a `checkpoint` in `evaluator_config`: what `mlflow-compress evaluate`
    measures on the rows; `baseline` is its parameter `model`, and every other entry is another of its parameters. With
    static predictions: what `mlflow-compress compare` computes; `baseline` is the column with the baseline's answers.
    """

    @classmethod
    def can_evaluate(cls, *, model_type: str | None, evaluator_config: Mapping[str, Any] | None, **_: Any) -> bool:
        """Return whether there is a baseline: MLflow asks every evaluator where the caller names none."""
        return "baseline" in (evaluator_config or {})

    def evaluate(
        self,
        *,
        dataset: Any,
        run_id: str,
        evaluator_config: Mapping[str, Any],
        model: Any = None,
        model_id: str | None = None,
        extra_metrics: Any = None,
        custom_artifacts: Any = None,
        **_: Any,
    ) -> EvaluationResult:
        """Log metrics and a table of the items to MLflow's run, and return both."""
        from mlflow.models.evaluation.artifacts import JsonEvaluationArtifact  # imports matplotlib

        import mlflow_compress as mc
        from mlflow_compress.decide.gates import gate_values

        config = dict(evaluator_config)
        rows = dataset.features_data
        if extra_metrics or custom_artifacts:
            raise ConfigError("The evaluator 'compress' takes neither extra_metrics nor custom_artifacts")
        if not isinstance(rows, pd.DataFrame):
            raise ConfigError("The evaluator 'compress' reads rows", allowed="a DataFrame", got=type(rows).__name__)
        client = MlflowClient()
        run = client.get_run(run_id)
        if dataset.has_predictions:
            metrics, items = _compared(rows, dataset, config)
        else:
            if dataset.has_targets:  # MLflow has taken this column out of the rows
                rows = rows.assign(**{dataset.targets_name: dataset.labels_data})
            if model is not None:
                config["checkpoint"] = _checkpoint_of(model, config)
            config.setdefault("experiment", client.get_experiment(run.info.experiment_id).name)
            if "checkpoint" not in config:
                allowed = "a model, evaluator_config={'checkpoint': ...}, or predictions"
                raise ConfigError("There is nothing to evaluate", allowed=allowed)
            evaluation = mc.evaluate(model=config.pop("baseline"), tasks=rows, **config)
            metrics, items = evaluation.metrics | gate_values(evaluation.pooled), evaluation.items()
            assert evaluation.run is not None
            client.set_tag(evaluation.run.run_id, MLFLOW_PARENT_RUN_ID, run_id)
        if model_id is None:  # otherwise MLflow logs what is returned to the run and the model
            for name, value in metrics.items():
                client.log_metric(run_id, name, value)
        file = f"{_ITEMS_TABLE}.json"
        client.log_table(run_id, items, file)
        table = json.loads(items.to_json(orient="split"))
        artifact = JsonEvaluationArtifact(uri=f"{run.info.artifact_uri}/{file}", content=table)
        return EvaluationResult(metrics, {_ITEMS_TABLE: artifact}, run_id)


def _checkpoint_of(model: Any, config: Mapping[str, Any]) -> str:
    if "checkpoint" in config:
        raise ConfigError("Two variants are given", allowed="a model or a checkpoint", got=config["checkpoint"])
    try:
        return str(model.unwrap_python_model().checkpoint)
    except Exception as error:  # any kind of model can be given, each of which fails in its own way
        raise ConfigError(
            "This model is not a variant that mlflow-compress has logged",
            got=type(model).__name__,
            fix="Give models:/NAME/VERSION of one, or leave out model and give evaluator_config={'checkpoint': FOLDER}",
        ) from error


def _compared(rows: pd.DataFrame, dataset: Any, config: dict[str, Any]) -> tuple[dict[str, float], pd.DataFrame]:
    """Return the comparison of two columns of answers, and the rows with the change of each."""
    from mlflow_compress.decide.gates import GATE_DROP, GATE_FLIPS
    from mlflow_compress.metrics.core.answer_files import answers_from_rows, compare_answers

    column = config.pop("baseline")
    if config or column not in rows or not dataset.has_targets:
        raise ConfigError(
            "Static predictions need the column 'id', targets, predictions, and the column of the baseline's answers",
            allowed="evaluator_config={'baseline': COLUMN} alone",
            got=f"baseline={column!r}, other entries {sorted(config)}, columns {list(rows)}",
        )
    known = rows[[name for name in ("id", "prompt", "group") if name in rows]].to_dict("records")
    gold = dataset.labels_data.tolist()
    # A frame's missing value is NaN, whatever stood there: no answer.
    columns = (rows[column], pd.Series(dataset.predictions_data, index=rows.index))
    sides = [side.astype(object).where(side.notna(), None).tolist() for side in columns]
    baseline, variant = (
        answers_from_rows({**row, "pred": p, "gold": g} for row, p, g in zip(known, side, gold, strict=True))
        for side in sides
    )
    comparison = compare_answers(baseline, variant)
    metrics = {name: float(value) for name, value in comparison.items() if isinstance(value, int | float)}
    if comparison["flips_pct_interval"] is not None:
        metrics[GATE_FLIPS] = comparison["flips_pct_interval"][1]
        metrics[GATE_DROP] = -100.0 * comparison["accuracy_delta_interval"][0]
    changes = {(True, False): "c2w", (False, True): "w2c"}
    answered = ((b, v, None not in (b.pred, v.pred)) for b, v in zip(baseline, variant, strict=True))
    change = [changes.get((b.is_correct, v.is_correct)) if both else None for b, v, both in answered]
    return metrics, rows.assign(gold=gold, prediction=sides[1], change=change)


def metric_thresholds(policy: str | PathLike[str] | None, metrics: Mapping[str, float]) -> dict[str, MetricThreshold]:
    """Return a policy's gates for `mlflow.validate_evaluation_results`, where a missing metric fails as it does here.

    Requirements, ranking and who may be replaced are no thresholds: `gate` and `promote` hold them. A gate that reads
    what results of MLflow do not have (an end of an interval, a task's value) is a `ConfigError`.

    - `policy`: The policy's file; None is the default policy.
    - `metrics`: Those of the result that is validated: KL is not asked for where every answer is generated.
    """
    from mlflow_compress.config.policy import read_policy
    from mlflow_compress.decide.gates import GATE_KL_ITEMS, KL, DivergenceGate, Gate
    from mlflow_compress.decide.promotion import gates_of

    file = None if policy is None else fspath(policy)
    meant = gates_of(read_policy(file), file)
    if unknown := sorted(reading.name for reading in meant.readings if reading.end != "value" or reading.task):
        raise ConfigError(
            "A threshold of MLflow cannot read what the policy reads",
            allowed="values pooled over tasks (bound: value), KL, flips, and the margin of accuracy",
            got=", ".join(unknown),
        )
    read: list[Gate] = []
    for gate in meant.gates:
        if isinstance(gate, Gate):
            read.append(gate)
        elif metrics.get(GATE_KL_ITEMS) != 0:  # it does not apply where every answer is generated
            assert isinstance(gate, DivergenceGate)
            read += [Gate(metric=KL, bound=gate.max_kl, label="KL (mean)"), *gate.reads()]
    if len({gate.metric for gate in read}) < len(read):
        raise ConfigError("MLflow takes one threshold per metric", got=", ".join(gate.metric for gate in read))
    return {gate.metric: MetricThreshold(threshold=gate.bound, greater_is_better=gate.at_least) for gate in read}
