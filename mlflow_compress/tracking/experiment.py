"""Chooses the experiment of new runs. Its artifacts are next to the database, whatever the working folder."""

from __future__ import annotations

import os
from pathlib import Path
from urllib.parse import quote

from filelock import FileLock
from mlflow.entities import Experiment
from mlflow.exceptions import MlflowException
from mlflow.tracking import MlflowClient
from mlflow.utils.file_utils import get_local_path_or_none

from mlflow_compress.home import home

NAME = "mlflow-compress"  # the experiment that is used if MLflow's default one stores its artifacts elsewhere
_ARTIFACTS = "mlruns"  # folder next to the database; the name is MLflow's
_SQLITE = "sqlite:///"


def _database(uri: str) -> Path | None:
    """Return the file of a SQLite store; None for other stores."""
    return Path(uri.removeprefix(_SQLITE)) if uri.startswith(_SQLITE) else None


def create_database(uri: str) -> None:
    """Create a SQLite store that does not exist yet, with its artifacts next to it.

    MLflow creates it at its first use, too. But then the artifacts of the default experiment are stored in the working
    folder of that moment.
    """
    database = _database(uri)
    if database is None:
        return
    lock = home(uri) / "database.lock"
    if database.exists() and not lock.exists():
        return
    lock.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(lock):  # the file is there before its tables are: another process may be making them
        if not database.exists():
            from mlflow.store.tracking.sqlalchemy_store import SqlAlchemyStore

            SqlAlchemyStore(uri, str(database.parent / _ARTIFACTS))


def choose_experiment(client: MlflowClient, uri: str) -> str:
    """Return the id of the experiment that new runs go to.

    MLFLOW_EXPERIMENT_ID or MLFLOW_EXPERIMENT_NAME decide if they are set. Otherwise it is MLflow's default experiment.
    In a SQLite store, the default experiment may store its artifacts in the folder where MLflow was first started, or
    behind a server. Then the experiment `NAME` is used, whose artifacts are next to the database.
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
    """Return whether the artifacts are stored next to the database; True for stores other than SQLite."""
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
