"""Interface of a store of runs, as far as stages use it: MLflow's tracking store or a plain folder."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from mlflow_compress.records import MetricResult
from mlflow_compress.records.values import JudgedAnswer


@dataclass(frozen=True, kw_only=True)
class RunLink:
    """Where a run is stored, and how to open it."""

    run_id: str  # The run's id, which `mlflow_compress.load` takes
    store: str  # The tracking store's URI, or the folder of a `FolderStore`
    # The command and the addresses that show the run, one per line; empty if there is nothing to open
    how_to_open: str = ""


@dataclass(frozen=True, kw_only=True)
class StoredRun:
    """A finished or running run, as it is stored."""

    run_id: str  # The run's id
    tags: Mapping[str, str]  # The logged tags and metrics, by name
    metrics: Mapping[str, float]


class OpenRun(Protocol):
    """Interface of an open run; `TrackedRun` documents the methods."""

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

    def log_judged_answers(self, judged: Sequence[JudgedAnswer]) -> None:
        """Show judged answers, where the store has a page for them."""

    def set_note(self, markdown: str) -> None:
        """Set the run's description."""


class Store(Protocol):
    """Interface of a store of runs."""

    @property
    def uri(self) -> str:
        """URI of the store. It decides where state is stored, see `home`."""

    def run(
        self, name: str, stage: str, tags: Mapping[str, object], *, own: bool = True
    ) -> AbstractContextManager[Any]:
        """Open a run; it ends FINISHED, FAILED with the error, or KILLED when interrupted."""

    def add_to(self, run_id: str) -> OpenRun:
        """Return a run that has ended, to add to it. Its status stays. An unknown id is a `TrackingError`."""

    def alone(self, key: str) -> AbstractContextManager[Callable[[], None]]:
        """Within the block, no process of another machine that uses this store works under this key.

        Processes of this machine have locks, see `resumable_workdir`. The block gets a function that raises a
        `TrackingError` where that cannot be said any longer, because this process was cut off from the store.
        """

    def find(self, stage: str, **tags: str) -> list[StoredRun]:
        """Return the finished runs of a stage with these tags, newest first."""

    def look_up(self, run_id: str) -> StoredRun:
        """Return one run. An unknown id is a `TrackingError`."""

    def child_ids(self, run_id: str) -> dict[str, str]:
        """Return the run id of the newest child of a run, by stage."""

    def fetch(self, run_id: str, folder: str) -> Path:
        """Return the local path of an artifact folder of a run."""

    def fetch_json(self, run_id: str, name: str) -> Any:
        """Return a JSON artifact of a run. An unknown name is a `TrackingError`."""

    def link(self, run_id: str) -> RunLink:
        """Return the link to a run."""
