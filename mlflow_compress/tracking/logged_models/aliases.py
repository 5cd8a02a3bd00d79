"""Registry aliases: who has one, who had it before, and moving it forwards and back."""

from __future__ import annotations

from mlflow.exceptions import MlflowException

from mlflow_compress.decide.champion import Incumbent
from mlflow_compress.errors import ConfigError, TrackingError
from mlflow_compress.tracking import run_names
from mlflow_compress.tracking.tracker import Tracker

PINNED = "pinned"  # alias of a version that is never replaced; people give it
_PREVIOUS = "-previous"
RESERVED_ALIASES = ("latest", "v1", "previous", PINNED)


def previous_alias(alias: str) -> str:
    """Return the alias of the version that had an alias before."""
    return alias + _PREVIOUS


def check_alias(alias: str) -> None:
    """Refuse an alias that MLflow or this package reserves."""
    number = alias[1:] if alias[:1] in ("v", "V") else ""
    if alias.lower() in RESERVED_ALIASES or number.isdecimal() or alias.endswith(_PREVIOUS):
        raise ConfigError(
            "This alias is reserved",
            allowed=f"anything but {', '.join(RESERVED_ALIASES)}, v2, v3 ... and what ends in {_PREVIOUS}",
            got=alias,
        )
    if not alias or not all(c.isalnum() or c in "_-" for c in alias):
        raise ConfigError(
            "Parameter 'alias' is not a name that MLflow takes", allowed="letters, digits, '_' and '-'", got=alias
        )


def holder(tracker: Tracker, name: str, alias: str) -> Incumbent | None:
    """Return who has an alias of a registered model; None if nobody has, or there is no such model."""
    try:
        aliases = tracker.client.get_registered_model(name).aliases
        if alias not in aliases:
            return None
        version = tracker.client.get_model_version(name, aliases[alias])
    except MlflowException as error:
        if error.error_code == "RESOURCE_DOES_NOT_EXIST":
            return None
        raise TrackingError(f"The registry cannot be read: {str(error).splitlines()[0]}", got=name) from error
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


def note_decision(tracker: Tracker, name: str, version: str, run_id: str) -> None:
    """Note on a version which run has given it an alias."""
    tracker.client.set_model_version_tag(name, version, run_names.DECISION, run_id)
