"""Which experiment runs belong to, and where their artifacts lie: beside the database, whatever the working folder."""

from __future__ import annotations

import os
from pathlib import Path
from urllib.parse import quote

from mlflow.entities import Experiment
from mlflow.exceptions import MlflowException
from mlflow.tracking import MlflowClient
from mlflow.utils.file_utils import get_local_path_or_none

NAME = "mlflow-compress"  # the experiment where MLflow's default one keeps its artifacts elsewhere
_ARTIFACTS = "mlruns"  # beside the database; MLflow's own name
_SQLITE = "sqlite:///"


def _database(uri: str) -> Path | None:
    """Return the file of a SQLite store, or None for another store."""
    return Path(uri.removeprefix(_SQLITE)) if uri.startswith(_SQLITE) else None


def create_database(uri: str) -> None:
    """Make a SQLite store that does not exist yet, with its artifacts beside it.

    MLflow makes one at its first use too, with the artifacts of its default experiment in that moment's working folder.
    """
    database = _database(uri)
    if database is not None and not database.exists():
        from mlflow.store.tracking.sqlalchemy_store import SqlAlchemyStore

        SqlAlchemyStore(uri, str(database.parent / _ARTIFACTS))


def choose_experiment(client: MlflowClient, uri: str) -> str:
    """Return the id of the experiment that new runs go to.

    The one that MLFLOW_EXPERIMENT_ID or MLFLOW_EXPERIMENT_NAME names; otherwise MLflow's default experiment. In a
    SQLite store that one may keep its artifacts elsewhere than beside the database: in whatever folder MLflow was first
    started in, or behind a server and out of reach here. Then it is an experiment of our own, which does.
    """
    if given := os.environ.get("MLFLOW_EXPERIMENT_ID"):
        return str(client.get_experiment(given).experiment_id)
    if name := os.environ.get("MLFLOW_EXPERIMENT_NAME"):
        return _get_or_create(client, name, uri)
    default = client.get_experiment_by_name("Default")
    if default is not None and _in_reach(default, uri):
        return str(default.experiment_id)
    return _get_or_create(client, NAME, uri)


def _in_reach(experiment: Experiment, uri: str) -> bool:
    """Return whether artifacts lie beside the database; other stores than SQLite decide for themselves."""
    database = _database(uri)
    if database is None:
        return True
    folder = get_local_path_or_none(experiment.artifact_location)
    if folder is None:
        return not experiment.artifact_location.startswith("mlflow-artifacts:")
    return Path(folder).resolve().is_relative_to(database.resolve().parent)


def _get_or_create(client: MlflowClient, name: str, uri: str) -> str:
    if found := client.get_experiment_by_name(name):
        return str(found.experiment_id)
    database = _database(uri)
    folder = None if database is None else (database.parent / _ARTIFACTS / quote(name, safe="")).as_uri()
    try:
        return str(client.create_experiment(name, artifact_location=folder))
    except MlflowException as error:
        found = client.get_experiment_by_name(name)  # another process was faster
        if found is None:
            raise error
        return str(found.experiment_id)
