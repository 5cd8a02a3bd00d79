"""What a stage needs of the place that keeps its runs: MLflow's tracking store, or a plain folder."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from mlflow_compress.records import MetricResult


@dataclass(frozen=True, kw_only=True)
class RunLink:
    """Where a result is kept.

    Attributes
    ----------
    run_id : str
        The run's id, which `mlflow_compress.load` takes.
    store : str
        The tracking store's URI, or the folder that stands in for one.
    how_to_open : str
        The command and the addresses that show it, one per line; empty where there is no page to open.
    """

    run_id: str
    store: str
    how_to_open: str = ""


@dataclass(frozen=True, kw_only=True)
class StoredRun:
    """A run as it is kept.

    Attributes
    ----------
    run_id : str
        Its id.
    tags, metrics : mapping
        What was logged.
    """

    run_id: str
    tags: Mapping[str, str]
    metrics: Mapping[str, float]


class OpenRun(Protocol):
    """A run that is being filled; see `TrackedRun` for what each of these does."""

    run_id: str

    def rename(self, name: str) -> None:
        """Give the run its short name."""

    def set_tags(self, tags: Mapping[str, object]) -> None:
        """Set tags."""

    def log_params(self, params: Mapping[str, object]) -> None:
        """Log parameters."""

    def log_values(self, values: Mapping[str, float]) -> None:
        """Log plain numbers."""

    def log_results(self, results: Sequence[MetricResult]) -> None:
        """Log results, rounded to what their intervals support."""

    def log_file(self, path: Path, folder: str = "") -> None:
        """Store one file."""

    def log_folder(self, path: Path, folder: str) -> None:
        """Store a folder's content."""

    def log_json(self, value: Any, name: str) -> None:
        """Store a JSON-serialisable value."""

    def set_note(self, markdown: str) -> None:
        """Set the run's description."""


class Store(Protocol):
    """A place that keeps runs."""

    @property
    def uri(self) -> str:
        """What the place is called."""

    def run(
        self, name: str, stage: str, tags: Mapping[str, object], *, own: bool = True
    ) -> AbstractContextManager[Any]:
        """Open a run; it ends FINISHED, FAILED with the error, or KILLED when interrupted."""

    def find(self, stage: str, **tags: str) -> list[StoredRun]:
        """Return the finished runs of a stage with these tags, newest first."""

    def look_up(self, run_id: str) -> StoredRun:
        """Return one run; where there is none, that is a `TrackingError`."""

    def child_ids(self, run_id: str) -> dict[str, str]:
        """Return the id of a run's newest child by stage."""

    def fetch(self, run_id: str, folder: str) -> Path:
        """Return a local path of an artifact folder of a run."""

    def fetch_json(self, run_id: str, name: str) -> Any:
        """Return a JSON artifact of a run; where it has none of this name, that is a `TrackingError`."""

    def link(self, run_id: str) -> RunLink:
        """Return where a person finds the run."""
