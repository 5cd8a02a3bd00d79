"""The folder of state that outlives a run: unfinished work, judgments, downloaded files and checkpoints.

There is one folder per tracking store, for direct runs and for runs of MLflow projects.
"""

import os
from pathlib import Path

VARIABLE = "MLFLOW_COMPRESS_HOME"
SQLITE = "sqlite:///"


def database_file(uri: str) -> Path | None:
    """Return the file of a SQLite store; None for other stores."""
    return Path(uri.removeprefix(SQLITE)) if uri.startswith(SQLITE) else None


def home(tracking_uri: str) -> Path:
    """Return the folder with this package's state for one tracking store. It is not created here.

    If ``MLFLOW_COMPRESS_HOME`` is set, it is that folder. Otherwise it is ``.mlflow_compress/``: next to the database
    of a SQLite store. For every other store it is in the user's cache folder.
    The path in a SQLite URI must be absolute, because stages have other working folders.
    """
    if chosen := os.environ.get(VARIABLE):
        return Path(chosen).expanduser().resolve()
    if (database := database_file(tracking_uri)) is not None:
        return database.resolve().parent / ".mlflow_compress"
    cache = os.environ.get("XDG_CACHE_HOME")
    return (Path(cache) if cache else Path.home() / ".cache") / "mlflow_compress"


def out_folder(out: str, tracking_uri: str) -> Path:
    """Return the folder for checkpoints: as given, or for "auto" a folder in `home`.

    "auto" is not in the working folder, because MLflow runs a project of a git repository in a temporary clone.
    """
    return home(tracking_uri) / "checkpoints" if out == "auto" else Path(out).expanduser().resolve()
