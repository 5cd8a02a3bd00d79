"""Creates the tables of a new SQLite or PostgreSQL store: by one process, however many start together."""

from __future__ import annotations

import logging
import os
import sqlite3
import time
from contextlib import closing
from pathlib import Path

from sqlalchemy import Connection, text
from sqlalchemy.exc import ProgrammingError

from mlflow_compress.home import SQLITE, database_file
from mlflow_compress.locks import alone_with

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
        _create_tables(uri)
        return
    database = database_file(uri)
    if database is None:
        return
    if not database.exists():
        database.parent.mkdir(parents=True, exist_ok=True)
        with alone_with(database.with_name(f".{database.name}.creating.lock")):
            if not database.exists():
                _create(database)
    _wait_until_complete(database)


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


def _create_tables(uri: str) -> None:
    """Make all tables in a PostgreSQL database that has none."""
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


def _has_experiments(connection: Connection) -> bool:
    """Return whether the default experiment is there, which MLflow makes last."""
    try:
        return connection.execute(text("SELECT 1 FROM experiments LIMIT 1")).first() is not None
    except ProgrammingError:  # no such table
        return False


def _wait_until_complete(database: Path) -> None:
    """Wait while another program, such as `mlflow run`, makes the tables. The default experiment comes last."""
    until = time.monotonic() + _LONGEST_MIGRATION_S
    while not _is_complete(database) and time.monotonic() < until:
        time.sleep(0.2)


def _is_complete(database: Path) -> bool:
    try:
        with closing(sqlite3.connect(f"{database.as_uri()}?mode=ro", uri=True)) as connection:
            return connection.execute("SELECT 1 FROM experiments LIMIT 1").fetchone() is not None
    except sqlite3.OperationalError as error:
        # "No such table" is a store in the making. Whatever else is wrong, MLflow says it better.
        return "no such table" not in str(error)
    except sqlite3.DatabaseError:
        return True
