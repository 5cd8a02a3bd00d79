"""Chooses the experiment of a new run. Its artifacts are next to the database, whatever the working folder."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import quote

from mlflow.entities import Run, ViewType
from mlflow.exceptions import MlflowException
from mlflow.store.db.db_types import DATABASE_ENGINES
from mlflow.utils import get_results_from_paginated_fn
from mlflow.utils.file_utils import get_local_path_or_none

from mlflow_compress.home import database_file
from mlflow_compress.tracking.database import ARTIFACTS
from mlflow_compress.tracking.waiting import PatientClient

AUTO = "auto"
NAME = "mlflow-compress"  # the experiment of runs for which the user has named none
BESIDE = "-baselines-and-decisions"  # added to an experiment's name: where runs go that are no variant's
_DEFAULT_ID = "0"  # MLflow's "Default", which `mlflow run` takes when no experiment is named
_PAGE = 1000  # results of one request
_KIND = {"mlflow.experimentKind": "custom_model_development"}  # MLflow's UI opens on runs, not on traces of an app


def choose_experiment(client: PatientClient, uri: str, name: str = AUTO) -> str:
    """Return the id of the experiment that new runs go to.

    Without a name, MLFLOW_EXPERIMENT_NAME or MLFLOW_EXPERIMENT_ID decide if they are set, unless the id is that of
    MLflow's "Default". Otherwise it is the experiment `NAME`, so that variants do not mix with unrelated runs.
    """
    if name := os.environ.get("MLFLOW_EXPERIMENT_NAME", "") if name == AUTO else name:
        return _get_or_create(client, name, uri)
    given = os.environ.get("MLFLOW_EXPERIMENT_ID", _DEFAULT_ID)
    if given != _DEFAULT_ID:
        return str(client.get_experiment(given).experiment_id)
    return _get_or_create(client, NAME, uri)


def experiment_beside(client: PatientClient, uri: str, experiment_id: str) -> str:
    """Return the id of the experiment for baselines and promotions, which keeps them out of the list of variants."""
    name = str(client.get_experiment(experiment_id).name)
    return experiment_id if name.endswith(BESIDE) else _get_or_create(client, name + BESIDE, uri)


def _get_or_create(client: PatientClient, name: str, uri: str) -> str:
    if found := client.get_experiment_by_name(name):
        return str(found.experiment_id)
    try:
        location = _artifact_location(client, name, uri)
        return str(client.create_experiment(name, artifact_location=location, tags=_KIND))
    except MlflowException as error:
        found = client.get_experiment_by_name(name)  # another process was faster
        if found is None:
            raise error
        return str(found.experiment_id)


def _artifact_location(client: PatientClient, name: str, uri: str) -> str | None:
    """Return where a new experiment's artifacts go; None lets the server decide.

    In a database this is beside those of MLflow's "Default": MLflow itself would take the working folder, which is
    another one in every stage. A SQLite file's artifacts go beside the file, if those of "Default" are behind a server
    or in the folder where MLflow was first started.
    """
    database = database_file(uri)
    if uri.partition(":")[0].partition("+")[0] not in DATABASE_ENGINES:
        return None
    default = client.get_experiment(_DEFAULT_ID).artifact_location.rstrip("/")
    folder, inside = get_local_path_or_none(default), quote(name, safe="")
    if folder is None and not default.startswith("mlflow-artifacts:"):
        return f"{default.rpartition('/')[0]}/{inside}"
    if folder is not None and (database is None or Path(folder).resolve().is_relative_to(database.resolve().parent)):
        return (Path(folder).resolve().parent / inside).as_uri()
    return None if database is None else (database.parent / ARTIFACTS / inside).as_uri()


def tags_filter(tags: Mapping[str, str]) -> str:
    """Return the filter "every one of these tags has this value", in MLflow's search syntax.

    A value with one kind of quotes is quoted with the other kind. A value with both kinds, or with a backslash, cannot
    be expressed and is left out. So filter the results of the search with `has_tags`.
    """
    return " and ".join(f"tags.`{key}` = {quoted}" for key, value in tags.items() if (quoted := _quoted(value)))


def has_tags(found: Mapping[str, str], wanted: Mapping[str, str]) -> bool:
    """Return whether a run's tags hold every wanted value exactly (some databases compare without case)."""
    return all(found.get(key) == value for key, value in wanted.items())


def _quoted(value: str) -> str | None:
    quote = next((mark for mark in "'\"" if mark not in value), None)
    return f"{quote}{value}{quote}" if quote and "\\" not in value else None


def search_runs(client: Any, filter_string: str) -> list[Run]:
    """Return the MLflow runs that a filter finds, newest first, over all experiments."""
    experiments = [e.experiment_id for e in client.search_experiments(view_type=ViewType.ACTIVE_ONLY)]
    order = ["attributes.start_time DESC"]
    return every_page(client.search_runs, experiments, filter_string=filter_string, order_by=order)


def every_page(search: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Any]:
    """Return what one of the client's searches finds, on all its pages."""
    found: list[Any] = get_results_from_paginated_fn(
        lambda most, token: search(*args, max_results=most, page_token=token, **kwargs), _PAGE
    )
    return found
