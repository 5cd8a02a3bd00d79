"""Chooses the experiment of a new run. Its artifacts are next to the database, whatever the working folder."""

import logging
import os
import shlex
import sqlite3
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from functools import cache
from pathlib import Path
from typing import Any
from urllib.parse import quote

from mlflow.entities import Experiment, LifecycleStage, Run, ViewType
from mlflow.exceptions import MlflowException
from mlflow.store.db.db_types import DATABASE_ENGINES
from mlflow.utils import get_results_from_paginated_fn
from mlflow.utils.file_utils import get_local_path_or_none
from mlflow.utils.mlflow_tags import MLFLOW_RUN_NOTE
from sqlalchemy import Connection, text
from sqlalchemy.exc import ProgrammingError

from mlflow_compress.errors import TrackingError
from mlflow_compress.files import alone_with
from mlflow_compress.home import SQLITE, database_file
from mlflow_compress.tracking.waiting import PatientClient

ARTIFACTS = "mlruns"  # folder next to the database; the name is MLflow's
_POSTGRESQL = ("postgresql:", "postgresql+")
_LONGEST_MIGRATION_S = 120.0
_LOCK = 0x6D6C666C6F77  # PostgreSQL's locks have numbers: this one is held by whoever makes MLflow's tables

logger = logging.getLogger(__name__)


def create_database(uri: str) -> None:
    """Create the tables of a store that has none: a SQLite file with its artifacts next to it, or those in PostgreSQL.

    MLflow creates it at its first use, too. But then the artifacts of the default experiment are stored in the working
    folder of that moment, and of several processes that start together all but one fail, because each of them runs all
    migrations. Here the tables are made in a file of another name. So the store is complete when its file is there,
    whoever is killed. A file that another program is filling is waited for. In PostgreSQL one process makes the tables,
    and the others wait for its lock, which ends with its connection.
    """
    if uri.startswith(_POSTGRESQL):
        from mlflow.store.db.utils import create_sqlalchemy_engine_with_retry
        from mlflow.store.tracking.sqlalchemy_store import SqlAlchemyStore

        engine = create_sqlalchemy_engine_with_retry(uri)
        # Without transactions: an open one would keep the migrations, which run in another connection, from the tables.
        with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
            if not _has_experiments(connection):
                connection.execute(text("SELECT pg_advisory_lock(:number)"), {"number": _LOCK})
                if not _has_experiments(connection):
                    SqlAlchemyStore(uri, ARTIFACTS).engine.dispose()
                connection.execute(text("SELECT pg_advisory_unlock(:number)"), {"number": _LOCK})
        engine.dispose()
        return
    database = database_file(uri)
    if database is None:
        return
    if database.is_dir():  # MLflow would try again for a minute
        raise IsADirectoryError(f"{database} is a folder, not a database")
    if not database.exists():
        database.parent.mkdir(parents=True, exist_ok=True)
        with alone_with(database.with_name(f".{database.name}.creating.lock")):
            if not database.exists():
                _create(database)
    # Another program, such as `mlflow run`, may be making the tables.
    until = time.monotonic() + _LONGEST_MIGRATION_S
    while not _is_complete(database) and time.monotonic() < until:
        time.sleep(0.2)


def _create(database: Path) -> None:
    """Make all tables in a file beside the database, and give it the database's name."""
    from mlflow.store.tracking.sqlalchemy_store import SqlAlchemyStore

    partial = database.with_name(f".{database.name}.creating")
    for left in database.parent.glob(f"{partial.name}*"):  # of a process that was killed
        if left.suffix != ".lock":
            left.unlink()
    SqlAlchemyStore(f"{SQLITE}{partial}", str(database.parent / ARTIFACTS)).engine.dispose()
    try:
        os.link(partial, database)  # unlike a rename, this never replaces a database that another program has made now
    except FileExistsError:
        logger.info("Another program has made %s meanwhile", database)
    finally:
        partial.unlink()


def _has_experiments(connection: Connection) -> bool:
    """Return whether the default experiment is there, which MLflow makes last."""
    try:
        return connection.execute(text("SELECT 1 FROM experiments LIMIT 1")).first() is not None
    except ProgrammingError:  # no such table
        return False


def _is_complete(database: Path) -> bool:
    try:
        with closing(sqlite3.connect(f"{database.as_uri()}?mode=ro", uri=True)) as connection:
            return connection.execute("SELECT 1 FROM experiments LIMIT 1").fetchone() is not None
    except sqlite3.OperationalError as error:
        # "No such table" is a store in the making. Whatever else is wrong, MLflow says it better.
        return "no such table" not in str(error)
    except sqlite3.DatabaseError:
        return True


AUTO_EXPERIMENT = "auto"
DEFAULT_EXPERIMENT = "mlflow-compress"  # the experiment of runs for which the user has named none
BESIDE = "-baselines-and-decisions"  # added to an experiment's name: where runs go that are no variant's
_DEFAULT_ID = "0"  # MLflow's "Default", which `mlflow run` takes when no experiment is named
_PAGE = 1000  # results of one request
_ABOUT = (  # The description that MLflow shows above the list of runs
    "One row is one compressed variant, its stages stand below it. The views *Leaderboard* (in the menu of views) show "
    "the variants of one evaluation: whether they pass the default policy, how many answers flipped, KL, size. "
    "A sweep's run holds the page over its variants, `report.html`."
)
_ABOUT_BESIDE = "Baselines that variants are compared with, and the decisions of `promote`, `approve` and `rollback`."
_KIND = {"mlflow.experimentKind": "custom_model_development"}  # MLflow's UI opens on runs, not on traces of an app


def choose_experiment(client: PatientClient, uri: str, name: str = AUTO_EXPERIMENT) -> str:
    """Return the id of the experiment that new runs go to.

    Without a name, MLFLOW_EXPERIMENT_NAME or MLFLOW_EXPERIMENT_ID decide if they are set, unless the id is that of
    MLflow's "Default". Otherwise it is `DEFAULT_EXPERIMENT`, so that variants do not mix with unrelated runs.
    """
    name = os.environ.get("MLFLOW_EXPERIMENT_NAME", "") if name == AUTO_EXPERIMENT else name
    given = os.environ.get("MLFLOW_EXPERIMENT_ID") or _DEFAULT_ID
    if name or given == _DEFAULT_ID:
        experiment_id = _get_or_create(client, name or DEFAULT_EXPERIMENT, uri)
    else:
        with naming("MLFLOW_EXPERIMENT_ID", "an experiment"):
            experiment_id = _active(client.get_experiment(given))
    if database := database_file(uri):
        chosen = client.get_experiment(experiment_id)
        if location := get_local_path_or_none(chosen.artifact_location):
            _tell_copied_store(database, chosen.name, location)
    return experiment_id


@contextmanager
def naming(variable: str, what: str) -> Iterator[None]:
    """Within this block, what the store does not know is an error that names the environment variable it is from."""
    try:
        yield
    except MlflowException as error:
        if error.error_code not in ("RESOURCE_DOES_NOT_EXIST", "INVALID_PARAMETER_VALUE"):
            raise
        raise TrackingError(
            f"The environment variable {variable} names {what} that the tracking store does not have",
            got=os.environ.get(variable),
            fix=f"Unset it (`unset {variable}`), or set it to {what} of this store",
        ) from error


def _active(experiment: Experiment) -> str:
    """Return the id of an experiment; one that was deleted takes no runs."""
    if experiment.lifecycle_stage != LifecycleStage.ACTIVE:
        raise TrackingError(
            f"The experiment {experiment.name!r} was deleted",
            got=f"experiment {experiment.experiment_id}",
            fix=f"Restore it: mlflow experiments restore --experiment-id {shlex.quote(experiment.experiment_id)}; or "
            "name another one (parameter experiment, or MLFLOW_EXPERIMENT_NAME)",
        )
    return str(experiment.experiment_id)


@cache
def _tell_copied_store(database: Path, name: str, location: str) -> None:
    """Warn, once, where an experiment's artifacts do not go to the folder of their name beside the database."""
    used = Path(location).resolve()
    beside = database.resolve().parent.joinpath(*used.parts[-2:])
    if used != beside and beside.is_dir():
        logger.warning(
            "This store was copied here: MLflow keeps whole paths, so artifacts of the experiment %r still go to %s, "
            "not to %s. To keep them here, name a new experiment (parameter experiment, or MLFLOW_EXPERIMENT_NAME); "
            "or, where nothing is left in the old place, link it: ln -s %s %s",
            name,
            used,
            beside,
            shlex.quote(str(beside)),
            shlex.quote(str(used)),
        )


def experiment_beside(client: PatientClient, uri: str, experiment_id: str) -> str:
    """Return the id of the experiment for baselines and promotions, which keeps them out of the list of variants."""
    name = str(client.get_experiment(experiment_id).name)
    return experiment_id if name.endswith(BESIDE) else _get_or_create(client, name + BESIDE, uri)


def _get_or_create(client: PatientClient, name: str, uri: str) -> str:
    if experiment := client.get_experiment_by_name(name):
        return _active(experiment)
    try:
        location = _artifact_location(client, name, uri)
        about = _ABOUT_BESIDE if name.endswith(BESIDE) else _ABOUT
        return str(client.create_experiment(name, artifact_location=location, tags={**_KIND, MLFLOW_RUN_NOTE: about}))
    except MlflowException as error:
        experiment = client.get_experiment_by_name(name)  # another process was faster
        if experiment is None:
            raise error
        return _active(experiment)


def _artifact_location(client: PatientClient, name: str, uri: str) -> str | None:
    """Return where a new experiment's artifacts go; None lets the server decide.

    MLflow itself would take the working folder, which is another one in every stage: they go beside those of MLflow's
    "Default", or beside a SQLite file, if those are behind a server or where MLflow was first started.
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
    wanted = []
    for key, value in tags.items():
        quote = next((mark for mark in "'\"" if mark not in value), None)
        if quote is not None and "\\" not in value:
            wanted.append(f"tags.`{key}` = {quote}{value}{quote}")
    return " and ".join(wanted)


def has_tags(tags: Mapping[str, str], wanted: Mapping[str, str]) -> bool:
    """Return whether a run's tags hold every wanted value exactly (some databases compare without case)."""
    return all(tags.get(key) == value for key, value in wanted.items())


def search_runs(client: Any, filter_string: str) -> list[Run]:
    """Return the MLflow runs that a filter finds, newest first, over all experiments."""
    experiments = [e.experiment_id for e in client.search_experiments(view_type=ViewType.ACTIVE_ONLY)]
    order = ["attributes.start_time DESC"]
    return every_page(client.search_runs, experiments, filter_string=filter_string, order_by=order)


def every_page(search: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Any]:
    """Return what one of the client's searches finds, on all its pages."""
    entries: list[Any] = get_results_from_paginated_fn(
        lambda most, token: search(*args, max_results=most, page_token=token, **kwargs), _PAGE
    )
    return entries
