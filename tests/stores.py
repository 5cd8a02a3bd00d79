"""The tracking store in a folder, as the parameter `store` of Python's functions opens it."""

from pathlib import Path

from mlflow.entities import Run

from mlflow_compress.commands.command import store_in
from mlflow_compress.tracking.experiment import search_runs
from mlflow_compress.tracking.tracker import Tracker


def opened(folder: Path) -> Tracker:
    return Tracker(uri=store_in(folder))


def runs_in(folder: Path) -> list[Run]:
    """Return all runs of a folder, newest first; none where no store was made."""
    return list(search_runs(opened(folder).client, "")) if (folder / "mlflow.db").exists() else []


def artifacts(folder: Path, run_id: str) -> Path:
    """Return the folder of a run's artifacts."""
    return Path(opened(folder).add_to(run_id).artifacts_at)
