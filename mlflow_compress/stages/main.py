"""The main stage: quantize -> evaluate -> judge as child projects of one run that carries what people compare."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path

from mlflow_compress.config import (
    EvaluateSettings,
    JudgeSettings,
    MainConfig,
    QuantizeConfig,
    as_strings,
    subset,
)
from mlflow_compress.metrics.compute import headline
from mlflow_compress.stages.evaluate import suite_of
from mlflow_compress.stages.judge import instructions_of
from mlflow_compress.stages.quantize import calibration_set, variant_name
from mlflow_compress.stages.results import results_from_json
from mlflow_compress.stages.summary import Outcome, publish, table
from mlflow_compress.stages.variant import model_label, read_manifest
from mlflow_compress.tasks.overlap import check_apart
from mlflow_compress.tracking import names
from mlflow_compress.tracking.store import TrackedRun, Tracker
from mlflow_compress.tracking.views import how_to_open, save_leaderboard

PROJECTS = Path(__file__).resolve().parents[2] / "projects"


def _absolute(values: Mapping[str, str]) -> dict[str, str]:
    """Make paths absolute: child projects run in their own folders."""
    changed = dict(values)
    for name in ("model", "calibration", "checkpoint", "instructions", "encoder", "data_dir"):
        path = Path(changed.get(name) or ".nothing")
        # A folder that happens to have the name of a set is not what is meant.
        if path.is_file() or (path.is_dir() and name not in ("calibration", "instructions")):
            changed[name] = str(path.resolve())
    if "out" in changed:
        changed["out"] = str(Path(changed["out"]).resolve())
    if "tasks" in changed:
        parts = [part.strip() for part in changed["tasks"].split(",")]
        changed["tasks"] = ",".join(str(Path(p).resolve()) if Path(p).is_file() else p for p in parts)
    return changed


def _check_calibration(config: MainConfig) -> None:
    """Read calibration text and tasks, and refuse text that holds what is evaluated."""
    calibration, suite = calibration_set(config), suite_of(config)
    if calibration is not None:
        check_apart(calibration.plain(), suite.tasks, suite.corpora)


def _children(config: MainConfig, tracker: Tracker, run: TrackedRun) -> dict[str, str]:
    """Run the stages one after the other and return their run ids."""
    quantize = _absolute(as_strings(subset(config, QuantizeConfig)))
    runs = {"quantize": tracker.run_project(PROJECTS / "quantize", quantize, parent=run, name="quantize")}
    checkpoint = tracker.client.get_run(runs["quantize"]).data.tags[names.CHECKPOINT]
    stages: dict[str, type] = {"evaluate": EvaluateSettings}
    if config.judge:
        stages["judge"] = JudgeSettings
    for stage, cls in stages.items():
        values = {**_absolute(as_strings(subset(config, cls))), "checkpoint": checkpoint}
        runs[stage] = tracker.run_project(PROJECTS / stage, values, parent=run, name=stage)
    return runs


def run_main(config: MainConfig) -> str:
    """Compress, evaluate and judge one variant, and return the table and the links to open.

    Everything that can be checked without a model is checked before the first child starts. The parent run ends
    FINISHED with every headline metric, or FAILED with the failing stage's message.
    """
    tracker = Tracker()
    label = model_label(config.model)
    with tracker.run(f"{config.method} {label}", "main", {names.BASE_MODEL: label}) as run:
        variant = variant_name(config)
        run.rename(f"{variant} {label}")
        run.set_tags({names.VARIANT: variant, names.METHOD: config.method})
        _check_calibration(config)
        if config.judge:
            instructions_of(config)
        children = _children(config, tracker, run)
        tags = tracker.client.get_run(children["quantize"]).data.tags
        results = [
            result
            for stage in ("evaluate", "judge")
            if stage in children
            for result in results_from_json(tracker.fetch_json(children[stage], "metrics.json"))
        ]
        outcome = Outcome(
            label=label,
            variant=variant,
            checkpoint=tags[names.CHECKPOINT],
            manifest=read_manifest(tags[names.CHECKPOINT]),
            pooled=headline(results),
            results=results,
            children=children,
            dtype=config.dtype,
            seed=config.seed,
            log_weights=config.log_weights,
            n_truncated=int(tracker.client.get_run(children["evaluate"]).data.metrics[names.TRUNCATED]),
        )
        with tempfile.TemporaryDirectory() as folder:
            publish(outcome, tracker, run, Path(folder))
        save_leaderboard(tracker, run.run_id)
    return f"{table(outcome)}\n\n{how_to_open(tracker, run.run_id)}"
