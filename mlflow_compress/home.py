"""Where state that outlives a run is kept: unfinished work, paid judgments, downloaded files, checkpoints.

One folder per tracking store, for direct runs and for runs of MLflow projects alike.
"""

from __future__ import annotations

import os
from pathlib import Path

VARIABLE = "MLFLOW_COMPRESS_HOME"
_SQLITE = "sqlite:///"
FOLDER_SCHEME = "folder://"  # of a plain folder that stands in for a tracking store


def home(tracking_uri: str) -> Path:
    """Return the folder that keeps this package's state for one tracking store; it is not created here.

    ``MLFLOW_COMPRESS_HOME`` decides where it is set. Otherwise the state lies in ``.mlflow_compress/``: beside a SQLite
    store's database, or inside a plain folder of results. For every other store it lies in the user's cache folder.

    Parameters
    ----------
    tracking_uri : str
        Of the tracking store; the path in a SQLite URI must be absolute, since stages run in other working folders.

    Examples
    --------
    >>> home("sqlite:////data/mlflow.db")  # doctest: +SKIP
    PosixPath('/data/.mlflow_compress')
    """
    if chosen := os.environ.get(VARIABLE):
        return Path(chosen).expanduser().resolve()
    if tracking_uri.startswith(_SQLITE):
        return Path(tracking_uri.removeprefix(_SQLITE)).resolve().parent / ".mlflow_compress"
    if tracking_uri.startswith(FOLDER_SCHEME):
        return Path(tracking_uri.removeprefix(FOLDER_SCHEME)) / ".mlflow_compress"
    cache = os.environ.get("XDG_CACHE_HOME")
    return (Path(cache) if cache else Path.home() / ".cache") / "mlflow_compress"


def out_folder(out: str, tracking_uri: str) -> Path:
    """Return the folder that receives checkpoints: as given, or for "auto" one that outlives the working folder.

    MLflow runs a project of a git repository in a temporary clone.
    """
    return home(tracking_uri) / "checkpoints" if out == "auto" else Path(out).expanduser().resolve()
