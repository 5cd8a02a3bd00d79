"""Creates the file of a SQLite store: complete at once, by one process, however many start together."""

from __future__ import annotations

import logging
import os
import sqlite3
import time
from contextlib import closing
from pathlib import Path

from filelock import FileLock

ARTIFACTS = "mlruns"  # folder next to the database; the name is MLflow's
_SQLITE = "sqlite:///"
_LONGEST_MIGRATION_S = 120.0

logger = logging.getLogger(__name__)


def database_file(uri: str) -> Path | None:
    """Return the file of a SQLite store; None for other stores."""
    return Path(uri.removeprefix(_SQLITE)) if uri.startswith(_SQLITE) else None


def create_database(uri: str) -> None:
    """Create a SQLite store that does not exist yet, with its artifacts next to it.

    MLflow creates it at its first use, too. But then the artifacts of the default experiment are stored in the working
    folder of that moment, and of several processes that start together all but one fail, because each of them runs all
    migrations. Here the tables are made in a file of another name. So the store is complete when its file is there,
    whoever is killed. A file that another program is filling is waited for.
    """
    database = database_file(uri)
    if database is None:
        return
    if not database.exists():
        database.parent.mkdir(parents=True, exist_ok=True)
        lock = database.with_name(f".{database.name}.creating.lock")
        with FileLock(lock):
            if not database.exists():
                _create(database)
            # A process that still waits for the deleted lock finds the database, and makes none.
            lock.unlink(missing_ok=True)
    _wait_until_complete(database)


def _create(database: Path) -> None:
    """Make all tables in a file beside the database, and give it the database's name."""
    from mlflow.store.tracking.sqlalchemy_store import SqlAlchemyStore

    partial = database.with_name(f".{database.name}.creating")
    for left in database.parent.glob(f"{partial.name}*"):  # of a process that was killed
        if left.suffix != ".lock":
            left.unlink()
    SqlAlchemyStore(f"{_SQLITE}{partial}", str(database.parent / ARTIFACTS)).engine.dispose()
    try:
        os.link(partial, database)  # unlike a rename, this never replaces a database that another program has made now
    except FileExistsError:
        logger.info("Another program has made %s meanwhile", database)
    finally:
        partial.unlink()


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
