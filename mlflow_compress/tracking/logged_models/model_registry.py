"""Variants in the MLflow model registry: one registered model per baseline, one version per variant, aliases."""

from __future__ import annotations

import json

from mlflow.entities.model_registry import ModelVersion
from mlflow.exceptions import MlflowException
from mlflow.utils.mlflow_tags import MLFLOW_MODEL_VERSIONS

from mlflow_compress.errors import ConfigError, TrackingError
from mlflow_compress.tracking import run_names
from mlflow_compress.tracking.evaluations import Variant
from mlflow_compress.tracking.tracker import Tracker

PREVIOUS = "previous"  # alias of the version that had the alias before
RESERVED_ALIASES = ("latest", "v1", PREVIOUS)
_RESERVED_CHARACTERS = "/:\\'\""  # reserved by MLflow, and quotes, which search filters cannot escape


def check_alias(alias: str) -> None:
    """Refuse an alias that MLflow refuses or reserves."""
    number = alias[1:] if alias[:1] in ("v", "V") else ""
    if alias.lower() in RESERVED_ALIASES or number.isdecimal():
        raise ConfigError(
            "This alias is reserved", allowed=f"anything but {', '.join(RESERVED_ALIASES)} and v2, v3 ...", got=alias
        )
    if not alias or not all(c.isalnum() or c in "_-" for c in alias):
        raise ConfigError(
            "Parameter 'alias' is not a name that MLflow takes", allowed="letters, digits, '_' and '-'", got=alias
        )


def registered_name(base_model: str) -> str:
    """Return the registered model's name for a baseline; characters that MLflow reserves become dashes."""
    return "compressed-" + "".join("-" if c in _RESERVED_CHARACTERS else c for c in base_model)


def registered_model(tracker: Tracker, base_model: str, base_weights: str) -> tuple[str, str | None]:
    """Get-or-create: return the name of the registered model of one baseline.

    Two baselines may have the same label (folders of the same name). The first one gets the plain name. The names of
    the others end in eight digits of their weights' hash.

    Parameters
    ----------
    tracker : Tracker
    base_model, base_weights : str
        The baseline's label, and the SHA-256 of its weight files.

    Returns
    -------
    name : str
    remark : str or None
        Explains an unusual name; None for the plain name.
    """
    plain = registered_name(base_model)
    owner = _owner(tracker, plain)
    if owner == base_weights:
        return plain, None
    if owner is not None:
        name = f"{plain}-{base_weights[:8]}"
        remark = f"'{plain}' holds variants of another model of this name (base weights {owner[:8]}): '{name}' is used."
        if _owner(tracker, name) is None:
            tracker.client.set_registered_model_tag(name, run_names.BASE_WEIGHTS, base_weights)
        return name, remark
    earlier = tracker.client.search_model_versions(f"name = '{plain}'", max_results=1)
    tracker.client.set_registered_model_tag(plain, run_names.BASE_WEIGHTS, base_weights)
    if not earlier:
        return plain, None
    return plain, f"'{plain}' has versions of an earlier release, which do not name their base weights."


def _owner(tracker: Tracker, name: str) -> str | None:
    """Return the hash of the base weights of a registered model, which is created if it does not exist."""
    client = tracker.client
    try:
        client.create_registered_model(name, description="Compressed variants of one baseline, promoted by distance.")
    except MlflowException as error:
        if error.error_code != "RESOURCE_ALREADY_EXISTS":
            raise TrackingError(f"The registry refuses the model {name}: {error}") from error
    owner = client.get_registered_model(name).tags.get(run_names.BASE_WEIGHTS)
    return None if owner is None else str(owner)


def register(tracker: Tracker, name: str, variant: Variant) -> ModelVersion:
    """Get-or-create: return the version of a variant's run in a registered model.

    The version and the run's logged model, which has metrics, parameters and data sets, refer to each other.
    """
    client, run = tracker.client, variant.run
    if not run.outputs.model_outputs:
        raise TrackingError(f"Run {run.info.run_id} has no logged model", fix="Run the main job for that variant again")
    for version in client.search_model_versions(f"run_id = '{run.info.run_id}'"):
        if version.name == name:
            return version
    model = client.get_logged_model(run.outputs.model_outputs[-1].model_id)
    tags = {**model.tags, **run.data.tags}
    where = {
        "logged": "Weights: stored with the model.",
        "reference": f"Weights: by reference, loads only where the folder {tags.get(run_names.CHECKPOINT)} is.",
    }.get(model.tags.get(run_names.WEIGHTS, ""), "")
    version = client.create_model_version(
        name,
        source=f"models:/{model.model_id}",
        run_id=run.info.run_id,
        model_id=model.model_id,
        tags={
            k: tags[k]
            for k in (run_names.VARIANT, run_names.METHOD, run_names.EVALUATION, run_names.WEIGHTS)
            if k in tags
        },
        description="\n\n".join(part for part in (tags.get(run_names.VERDICT, ""), where) if part),
        await_creation_for=0,
    )
    # MLflow's UI finds the versions of a logged model by this tag.
    versions = [*json.loads(model.tags.get(MLFLOW_MODEL_VERSIONS, "[]")), {"name": name, "version": version.version}]
    client.set_logged_model_tags(model.model_id, {MLFLOW_MODEL_VERSIONS: json.dumps(versions)})
    return version


def move_alias(tracker: Tracker, name: str, alias: str, version: str) -> str | None:
    """Point `alias` to `version` and `previous` to the former version. Return the former version, if any."""
    client = tracker.client
    former = client.get_registered_model(name).aliases.get(alias)
    if former is not None and str(former) == str(version):
        return str(former)
    if former is not None:
        client.set_registered_model_alias(name, PREVIOUS, former)
    client.set_registered_model_alias(name, alias, version)
    return None if former is None else str(former)
