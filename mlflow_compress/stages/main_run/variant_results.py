"""Logs a variant as an MLflow model, with its settings, its metrics and the data sets of the metrics."""

from __future__ import annotations

from pathlib import Path

from mlflow_compress.config import QuantizeConfig, parameters
from mlflow_compress.config.declarations import NONE
from mlflow_compress.decide.gate_values import gate_values
from mlflow_compress.items.named_tasks import TASKS
from mlflow_compress.stages.evaluation.eval_metadata import read_metadata
from mlflow_compress.stages.evaluation.result_files import logged
from mlflow_compress.stages.main_run.stage_outputs import StageOutputs
from mlflow_compress.tracking import run_names
from mlflow_compress.tracking.logged_models.logged_model import (
    EVALUATION_SET,
    DataSet,
    VariantEntry,
    log_data_sets,
    log_model_values,
    log_variant_model,
)
from mlflow_compress.tracking.logged_values import rounded
from mlflow_compress.tracking.run_names import RECORDS
from mlflow_compress.tracking.tracked_run import TrackedRun
from mlflow_compress.tracking.tracker import Tracker

WITHOUT_ITEMS = ("judge/", "size/", "speed/")  # prefixes of metrics that do not come from the evaluation's items


def _params(outputs: StageOutputs) -> dict[str, object]:
    """Return the settings of method and evaluation, with "auto" resolved."""
    return {
        "model": outputs.label,
        "method": outputs.method,
        **outputs.settings,
        "dtype": outputs.dtype,
        "seed": outputs.seed,
    }


def _run_params(outputs: StageOutputs, *, keeps_weights: bool) -> dict[str, object]:
    """Return the method's settings and the size that came of them, as parameters of the main run.

    MLflow's page of two runs opens on the parameters that differ, in the order of their names. So a setting that only
    this method has is named after `method_args`, and the size is a parameter too: it comes before almost all others.
    """
    manifest = outputs.manifest
    if manifest is None:
        return {**outputs.settings, "log_weights": NONE}
    common = parameters(QuantizeConfig)
    settings = {name if name in common else f"method_args/{name}": value for name, value in manifest.settings.items()}
    size = {"bits_per_weight": round(manifest.bits_per_weight, 2)}
    return {**settings, **size, "log_weights": str(keeps_weights).lower()}


def _data_sets(
    outputs: StageOutputs, tracker: Tracker, evaluation: str | None
) -> tuple[dict[str, DataSet], DataSet | None]:
    """Return the data set of every task and corpus by name, and the data set of the complete evaluation."""
    hashes = read_metadata(tracker.fetch(outputs.children["evaluate"], RECORDS)).get("tasks")
    by_task = {
        name: DataSet(
            name=name,
            digest=found,
            source={"task": name, **({"source": TASKS.get(name).source} if name in TASKS.names() else {})},
        )
        for name, found in (hashes.items() if isinstance(hashes, dict) else ())
    }
    if evaluation is None:
        return by_task, None
    return by_task, DataSet(name=EVALUATION_SET, digest=evaluation, source={"tasks": sorted(by_task)})


def log_model(outputs: StageOutputs, tracker: Tracker, run: TrackedRun, evaluation: str | None) -> None:
    """Log the variant's model. Log every metric on both run and model, linked to the data set that it comes from.

    Parameters
    ----------
    outputs : StageOutputs
        Results of the stages.
    tracker, run : Tracker, TrackedRun
        The store and the main run.
    evaluation : str or None
        The evaluation id. It is the digest of the data set "evaluation", which stands for all tasks.
    """
    manifest, served = outputs.manifest, outputs.served
    entry = VariantEntry(
        name=outputs.variant,
        checkpoint=Path(outputs.checkpoint) if manifest is not None else None,
        served=None if served is None else {**served.settings(), run_names.EVALUATE_RUN: served.evaluate_run},
        checkpoint_sha256=outputs.checkpoint_sha256,
        weight_files=manifest.weight_files if manifest is not None else {},
        dtype=outputs.dtype,
        params=_params(outputs),
        tags={
            run_names.VARIANT: outputs.variant,
            run_names.METHOD: outputs.method,
            run_names.BASE_MODEL: outputs.label,
            run_names.BASE_WEIGHTS: outputs.base_weights,
            **({run_names.EVALUATION: evaluation} if evaluation else {}),
        },
        log_weights=outputs.log_weights,
    )
    run.log_params(_run_params(outputs, keeps_weights=entry.keeps_weights))
    model = log_variant_model(tracker, run.run_id, entry)
    by_task, complete = _data_sets(outputs, tracker, evaluation)
    log_data_sets(tracker, run.run_id, [*by_task.values(), *([complete] if complete else [])])
    every = {r.name: rounded(r) for r in outputs.pooled.values()} | gate_values(outputs.pooled) | outputs.sizes
    values = run_names.on_main_run(every)
    itemless = {name for name in values if name.startswith(WITHOUT_ITEMS)}
    log_model_values(tracker, run.run_id, model, {k: v for k, v in values.items() if k not in itemless}, complete)
    log_model_values(tracker, run.run_id, model, {k: values[k] for k in values if k in itemless})
    # Values per task are on the evaluate run. They are logged there a second time, linked to the model.
    for name, data_set in by_task.items():
        values = {f"{r.name}/{name}": rounded(r) for r in logged(outputs.results) if r.task == name}
        if values:
            log_model_values(tracker, outputs.children["evaluate"], model, values, data_set)
