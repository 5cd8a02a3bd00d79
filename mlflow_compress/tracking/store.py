"""What is known of runs and their ids without MLflow, whose import takes seconds."""

import os
import re
import shlex
import sqlite3
import sys
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from mlflow_compress.errors import ConfigError, TrackingError
from mlflow_compress.home import SQLITE, database_file

RESOLVED = "resolved/"  # prefix for the final value of a parameter that was logged with another one, such as "auto"


def is_run_id(text: str) -> bool:
    """Return whether a text can be a run's id, or the beginning of one as we print it."""
    return re.fullmatch("[0-9a-f]{6,32}", text) is not None


def whole_id(text: str, run_ids: Sequence[str]) -> str:
    """Return the only one of the ids that begin with `text`; the text itself where there is none."""
    if len(run_ids) > 1:
        raise TrackingError(
            "Several runs have ids that begin so", allowed=sorted(run_ids), got=text, fix="Give more digits"
        )
    return run_ids[0] if run_ids else text


def require_runs(run_ids: Sequence[str], uri: str | None = None) -> None:
    """Refuse runs that a store does not have, if it is a SQLite file, without MLflow's three seconds.

    `uri` is the store's; by default it is the one that MLflow is configured for.
    """
    if not run_ids or (known := _rows("SELECT run_uuid FROM runs", uri=uri)) is None:
        return
    for run_id in run_ids:
        if not any(one.startswith(run_id) for one in known[1]):
            raise TrackingError(f"The store {known[0]} has no such run", got=run_id)


def require_tag(name: str, value: str, what: str, uri: str | None = None) -> None:
    """Refuse the value of a tag, or its beginning, that no run in a store has, as fast as `require_runs`."""
    known = _rows("SELECT DISTINCT value FROM tags WHERE key = ?", name, uri=uri)
    if known is not None and not any(one.startswith(value) for one in known[1]):
        # Those that have a finished variant: of the others nothing can be decided.
        usable = _rows(_OF_FINISHED_VARIANTS, name, uri=uri)
        allowed = sorted(usable[1]) if usable else []
        fix = None if allowed else "Run the main job for a variant first"
        raise ConfigError(f"The store {known[0]} has no such {what}", allowed=allowed or None, got=value, fix=fix)


_OF_FINISHED_VARIANTS = """
SELECT DISTINCT tags.value FROM tags
JOIN runs ON runs.run_uuid = tags.run_uuid AND runs.status = 'FINISHED' AND runs.lifecycle_stage = 'active'
JOIN tags AS stages ON stages.run_uuid = tags.run_uuid AND stages.key = 'stage' AND stages.value = 'main'
WHERE tags.key = ?
"""


def _rows(query: str, *values: str, uri: str | None = None) -> tuple[str, list[str]] | None:
    """Return a store as text, and what a query finds there; None where the store is no SQLite file."""
    uri = uri or os.environ.get("MLFLOW_TRACKING_URI")  # MLflow writes there what it is told
    if not uri and "mlflow" in sys.modules:
        uri = sys.modules["mlflow"].get_tracking_uri()
    elif not uri:
        # What MLflow takes by default, unless it finds a store of files, as its older releases made them.
        uri = "" if any(Path("mlruns").glob("[0-9]*/meta.yaml")) else f"{SQLITE}mlflow.db"
    database = database_file(uri)
    if database is None:
        return None
    database = database.resolve()
    shown = f"{SQLITE}{database}"
    if not database.exists():
        return shown, []
    try:
        with closing(sqlite3.connect(f"{database.as_uri()}?mode=ro", uri=True)) as connection:
            return shown, [row[0] for row in connection.execute(query, values)]
    except sqlite3.DatabaseError:  # whatever is wrong, MLflow says it better
        return None


def new_parameters(there: Mapping[str, str], values: Mapping[str, str]) -> dict[str, str]:
    """Return the parameters to log so that a run shows `values`: new names, and resolved values under `RESOLVED`."""
    new: dict[str, str] = {}
    for name, value in values.items():
        if name not in there:
            new[name] = value
        elif _unquoted(there[name]) != value and RESOLVED + name not in there:
            new[RESOLVED + name] = value
    return new


def _unquoted(text: str) -> str:
    """Return a parameter as the user gave it to `mlflow run`, which logs it quoted for a shell."""
    try:
        parts = shlex.split(text)
    except ValueError:  # a single quotation mark: not quoted by MLflow
        return text
    return parts[0] if len(parts) == 1 else text


@dataclass(frozen=True, kw_only=True)
class RunLink:
    """Where a run is stored, and how to open it."""

    run_id: str  # The run's id, which `mlflow_compress.load` takes
    store: str  # The tracking store's URI
    # The command and the addresses that show the run, one per line; empty if there is nothing to open
    how_to_open: str = ""


@dataclass(frozen=True, kw_only=True)
class StoredRun:
    """A finished or running run, as it is stored."""

    run_id: str  # The run's id
    tags: Mapping[str, str]  # The logged tags and metrics, by name
    metrics: Mapping[str, float]
