"""Variants in the MLflow model registry: one registered model per baseline, one version per variant, by reference."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import mlflow
from mlflow.entities import Run
from mlflow.entities.model_registry import ModelVersion
from mlflow.exceptions import MlflowException
from mlflow.models import Model, ModelSignature
from mlflow.types import ColSpec, ParamSchema, ParamSpec, Schema

from mlflow_compress.errors import TrackingError
from mlflow_compress.tracking import names
from mlflow_compress.tracking.store import Tracker

PREVIOUS = "previous"  # where the alias stood before it moved
_MODEL_FILE = Path(__file__).with_name("variant_model.py")
RESERVED_ALIASES = ("latest", "v1", PREVIOUS)

SIGNATURE = ModelSignature(
    inputs=Schema([ColSpec("string", "prompt"), ColSpec("string", "continuation", required=False)]),
    params=ParamSchema([ParamSpec("max_new_tokens", "long", 128)]),
)
"""What `VariantModel.predict` takes; parameters that no signature names do not reach it. What it returns varies."""


def registered_name(base_model: str) -> str:
    """Return the registered model's name for a baseline; characters that MLflow reserves become dashes."""
    return "compressed-" + "".join(c if c not in "/:\\" else "-" for c in base_model)


def log_variant_model(run_id: str, reference: Mapping[str, Any]) -> None:
    """Log a variant as an MLflow model that refers to its checkpoint.

    MLflow attaches the metrics that the run has by then, so that registry users can filter versions numerically.

    Parameters
    ----------
    run_id : str
        The variant's run.
    reference : mapping
        What the pyfunc needs: checkpoint path, SHA-256 of every weight file, method, dtype.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "variant.json"
        path.write_text(json.dumps(reference, indent=2))
        Model.log(
            artifact_path=None,
            name="variant",
            flavor=mlflow.pyfunc,
            run_id=run_id,  # mlflow.pyfunc.log_model, which calls this, cannot name a run
            python_model=str(_MODEL_FILE),
            artifacts={"variant": str(path)},
            signature=SIGNATURE,
            input_example=({"prompt": ["Once upon a time"]}, {"max_new_tokens": 16}),
            # Given, so that MLflow does not load the model to guess them.
            pip_requirements=["mlflow-compress"],
        )


def registrable_runs(tracker: Tracker, base_model: str) -> list[Run]:
    """Return the newest finished run of every variant of a baseline, by variant name."""
    newest: dict[str, Run] = {}
    for run in tracker.find_finished("main", **{names.BASE_MODEL: base_model}):
        newest.setdefault(run.data.tags[names.VARIANT], run)
    return [newest[name] for name in sorted(newest)]


def register(tracker: Tracker, name: str, run: Run) -> ModelVersion:
    """Return the version of a variant's run, making it (and the registered model) where there is none yet."""
    client = tracker.client
    if not run.outputs.model_outputs:
        raise TrackingError(f"Run {run.info.run_id} has no logged model", fix="Run the main job for that variant again")
    model_id = run.outputs.model_outputs[-1].model_id
    try:
        client.create_registered_model(name, description="Compressed variants of one baseline, promoted by distance.")
    except MlflowException as error:
        if error.error_code != "RESOURCE_ALREADY_EXISTS":
            raise TrackingError(f"The registry refuses the model {name}: {error}") from error
    for version in client.search_model_versions(f"name = '{name}'"):
        if version.run_id == run.info.run_id:
            return version
    tags = run.data.tags
    return client.create_model_version(
        name,
        source=f"models:/{model_id}",
        run_id=run.info.run_id,
        model_id=model_id,
        tags={key: tags[key] for key in (names.VARIANT, names.METHOD)},
        description=tags.get(names.VERDICT, ""),
        await_creation_for=0,
    )


def move_alias(tracker: Tracker, name: str, alias: str, version: str) -> str | None:
    """Point `alias` at `version`, keep where it stood as `previous`, and return that former version, if any."""
    client = tracker.client
    former = client.get_registered_model(name).aliases.get(alias)
    if former is not None and str(former) == str(version):
        return str(former)
    if former is not None:
        client.set_registered_model_alias(name, PREVIOUS, former)
    client.set_registered_model_alias(name, alias, version)
    return None if former is None else str(former)
