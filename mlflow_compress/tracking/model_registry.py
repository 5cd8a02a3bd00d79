"""Variants in the MLflow model registry: one registered model per baseline, one version per promoted variant."""

import json
from collections.abc import Callable, Mapping
from typing import Any

from mlflow.entities import LoggedModel, Run
from mlflow.entities.model_registry import ModelVersion
from mlflow.exceptions import MlflowException
from mlflow.utils.mlflow_tags import MLFLOW_MODEL_VERSIONS

from mlflow_compress.config.policy import PINNED, PREVIOUS
from mlflow_compress.decide.champion import Incumbent
from mlflow_compress.errors import TrackingError
from mlflow_compress.tracking import run_names
from mlflow_compress.tracking.experiment import every_page
from mlflow_compress.tracking.tracker import Tracker, models_of_run

_TAGS = (
    run_names.BASE_MODEL,
    run_names.VARIANT,
    run_names.METHOD,
    run_names.EVALUATION,
    run_names.WEIGHTS_KEPT,
    *run_names.SERVED_TAGS,
)
# A version's own tags, because its metrics are those of its logged model, which a search of versions does not see.
SHOWN_METRICS = ("distance/flips_pct", "distance/kl_mean", "quality/accuracy_delta", "size/ratio")
_RESERVED_CHARACTERS = "/:\\'\""  # reserved by MLflow, and quotes, which search filters cannot escape


def registered_name(base_model: str) -> str:
    """Return the registered model's name for a baseline; characters that MLflow reserves become dashes."""
    return "compressed-" + "".join("-" if c in _RESERVED_CHARACTERS else c for c in base_model)


def planned_model(tracker: Tracker, base_model: str, base_weights: str) -> tuple[str, str | None]:
    """Return the name of the registered model of one baseline, whether it exists or not. Nothing is written.

    Two baselines may have the same label (folders of the same name). The first one gets the plain name. The names of
    the others end in eight digits of their weights' hash. A remark explains an unusual name.
    """
    plain = registered_name(base_model)
    model = _read(plain, lambda: tracker.client.get_registered_model(plain))
    owner = base_weights if model is None else model.tags.get(run_names.BASE_WEIGHTS, base_weights)
    if owner == base_weights:
        return plain, None
    name = f"{plain}-{base_weights[:8]}"
    return name, f"'{plain}' holds variants of another model of this name (base weights {owner[:8]}): '{name}' is used."


def _read(name: str, read: Callable[[], Any]) -> Any:
    """Return what is read of a registered model; None if there is no such thing."""
    try:
        return read()
    except MlflowException as error:
        if error.error_code == "RESOURCE_DOES_NOT_EXIST":
            return None
        raise TrackingError(f"The registry cannot be read: {str(error).splitlines()[0]}", got=name) from error


def registered_models(tracker: Tracker, base_model: str) -> dict[str, str | None]:
    """Return the registered models of all baselines of one label, each with the hash of its base weights, if known."""
    plain = registered_name(base_model)
    models: dict[str, str | None] = {}
    for model in every_page(tracker.client.search_registered_models, f"name LIKE '{plain}%'"):
        owner = model.tags.get(run_names.BASE_WEIGHTS)
        if model.name == plain or (owner is not None and model.name == f"{plain}-{owner[:8]}"):
            models[str(model.name)] = owner
    return models


def create_model(tracker: Tracker, name: str, base_weights: str) -> None:
    """Get-or-create: make the registered model of one baseline, and note its weights on it."""
    client = tracker.client
    try:
        client.create_registered_model(name, description="Compressed variants of one baseline, promoted by distance.")
    except MlflowException as error:
        if error.error_code != "RESOURCE_ALREADY_EXISTS":
            raise TrackingError(f"The registry refuses the model {name}: {error}") from error
    client.set_registered_model_tag(name, run_names.BASE_WEIGHTS, base_weights)


def versions_by_run(tracker: Tracker, name: str) -> dict[str, ModelVersion]:
    """Return the versions of a registered model by the id of their run; none if there is no such model."""
    versions = every_page(tracker.client.search_model_versions, f"name = '{name}'")
    return {str(version.run_id): version for version in versions}


def version_tags(run: Run, model: LoggedModel | None = None) -> dict[str, str]:
    """Return what a version says of its variant; without the model what it says of its weights is left out."""
    tags, metrics = {**(model.tags if model else {}), **run.data.tags}, run.data.metrics
    return {k: tags[k] for k in _TAGS if k in tags} | {k: f"{metrics[k]:.4g}" for k in SHOWN_METRICS if k in metrics}


def register_version(tracker: Tracker, name: str, run: Run) -> str:
    """Return the new version of a variant's main run in a registered model.

    The version and the run's logged model, which has metrics, parameters and data sets, refer to each other.
    """
    client = tracker.client
    if not (models := models_of_run(client, run)):
        raise TrackingError(f"Run {run.info.run_id} has no logged model", fix="Run the main job for that variant again")
    model = models[-1]
    tags = {**model.tags, **run.data.tags}
    where = {
        "logged": "Weights: stored with the model.",
        "reference": f"Weights: by reference, loads only where the folder {tags.get(run_names.CHECKPOINT)} is.",
        "served": f"Weights: none here. Served as {tags.get('served_model')} at {tags.get('endpoint')} by "
        f"{tags.get('server')}; its numbers are those of run {tags.get(run_names.EVALUATE_RUN)}.",
    }.get(model.tags.get(run_names.WEIGHTS_KEPT, ""), "")
    content = {
        "source": f"models:/{model.model_id}",
        "run_id": run.info.run_id,
        "model_id": model.model_id,
        "tags": version_tags(run, model),
        "description": "\n\n".join(part for part in (tags.get(run_names.VERDICT, ""), where) if part),
        "await_creation_for": 0,
    }

    def made(client: Any) -> ModelVersion | None:
        """Return the version that was made where the answer was lost: a run has one version."""
        there = client.search_model_versions(f"name = '{name}'")
        return next((version for version in there if version.run_id == run.info.run_id), None)

    version = client.once(lambda asked: asked.create_model_version(name, **content), made)
    # MLflow's UI finds the versions of a logged model by this tag.
    versions = [*json.loads(model.tags.get(MLFLOW_MODEL_VERSIONS, "[]")), {"name": name, "version": version.version}]
    client.set_logged_model_tags(model.model_id, {MLFLOW_MODEL_VERSIONS: json.dumps(versions)})
    return str(version.version)


def previous_alias(alias: str) -> str:
    """Return the alias of the version that had an alias before."""
    return alias + PREVIOUS


def holder(tracker: Tracker, name: str, alias: str) -> Incumbent | None:
    """Return who has an alias of a registered model; None if nobody has, or there is no such model."""
    model = _read(name, lambda: tracker.client.get_registered_model(name))
    aliases = {} if model is None else model.aliases
    version = _read(name, lambda: tracker.client.get_model_version(name, aliases[alias])) if alias in aliases else None
    if version is None:
        return None
    return Incumbent(
        name=str(version.tags.get(run_names.VARIANT, f"version {version.version}")),
        version=str(version.version),
        run_id=str(version.run_id),
        evaluation=version.tags.get(run_names.EVALUATION),
        pinned=str(aliases.get(PINNED)) == str(version.version),
    )


def move_alias(tracker: Tracker, name: str, alias: str, version: str) -> None:
    """Point an alias to a version, and its "-previous" to the version that had it; nothing if it has it already."""
    client = tracker.client
    former = client.get_registered_model(name).aliases.get(alias)
    if former is not None and str(former) == version:
        return
    if former is not None:
        client.set_registered_model_alias(name, previous_alias(alias), former)
    client.set_registered_model_alias(name, alias, version)


_WAITING = "waiting: "  # before the alias


def waiting_versions(tracker: Tracker, name: str) -> dict[str, tuple[ModelVersion, str]]:
    """Return the versions of a registered model that wait for an approval, by number, each with the alias."""
    versions = every_page(tracker.client.search_model_versions, f"name = '{name}'")
    said = [(version, version.tags.get(run_names.APPROVAL, "")) for version in versions]
    return {str(v.version): (v, text.removeprefix(_WAITING)) for v, text in said if text.startswith(_WAITING)}


def end_waiting(tracker: Tracker, name: str, alias: str, then: str | None = None) -> None:
    """Let no version wait for an alias any more, but that of the newest decision, if it waits."""
    for version, (_, wanted) in waiting_versions(tracker, name).items():
        if wanted == alias and version != then:
            tracker.client.delete_model_version_tag(name, version, run_names.APPROVAL)
    if then is not None:
        tracker.client.set_model_version_tag(name, then, run_names.APPROVAL, _WAITING + alias)


def receipt_of(tracker: Tracker, main_run: str) -> dict[str, str]:
    """Return the digest of the receipt of a variant's evaluation as a tag; nothing where none was exported."""
    evaluation = tracker.children(main_run).get("evaluate")
    tags = {} if evaluation is None else evaluation.data.tags
    return {run_names.RECEIPT: tags[run_names.RECEIPT]} if run_names.RECEIPT in tags else {}


_DECISION = "\n\n**Decision:** "  # begins that part of a version's description
_DESCRIPTION_LIMIT = 5000  # characters that MLflow's database keeps


def note_decision(
    tracker: Tracker, name: str, version: str, run_id: str, words: str, tags: Mapping[str, str] | None = None
) -> None:
    """Note on a version which run has decided on it, why, in words, and tags: the policy's hash, the receipt's."""
    client = tracker.client
    for key, value in {**(tags or {}), run_names.DECISION: run_id}.items():
        client.set_model_version_tag(name, version, key, value)
    described = (client.get_model_version(name, version).description or "").partition(_DECISION)[0]
    client.update_model_version(name, version, description=f"{described}{_DECISION}{words}"[:_DESCRIPTION_LIMIT])
