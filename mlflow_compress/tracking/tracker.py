"""The connection to a tracking store and the runs in it."""

from __future__ import annotations

import atexit
import os
import shutil
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlparse

import mlflow
from mlflow.entities import Metric, Param, Run, RunTag, ViewType
from mlflow.exceptions import MlflowException
from mlflow.tracking import MlflowClient
from mlflow.utils.mlflow_tags import MLFLOW_PARENT_RUN_ID, MLFLOW_RUN_NOTE
from sqlalchemy.exc import SQLAlchemyError

from mlflow_compress.errors import StageError, TrackingError
from mlflow_compress.home import home
from mlflow_compress.records import MetricResult
from mlflow_compress.tracking import run_names
from mlflow_compress.tracking.downloads import Downloads, limit_bytes
from mlflow_compress.tracking.experiment import choose_experiment, create_database
from mlflow_compress.tracking.filters import has_tags, tags_filter
from mlflow_compress.tracking.parameters import new_parameters
from mlflow_compress.tracking.rounding import rounded
from mlflow_compress.tracking.store import RunLink, StoredRun

_NOTE_LIMIT = 8000
_TAG_LIMIT = 5000
_RUN_ID_VARIABLE = "MLFLOW_RUN_ID"  # how `mlflow run` tells its child which run to fill


def _absolute(uri: str) -> str:
    """Return a SQLite URI with its path made absolute, since stages run in other working directories."""
    prefix = "sqlite:///"
    if uri.startswith(prefix) and not uri.startswith(prefix + "/"):
        return prefix + str(Path(uri.removeprefix(prefix)).resolve())
    return uri


def _stored(run: Run) -> StoredRun:
    return StoredRun(run_id=str(run.info.run_id), tags=dict(run.data.tags), metrics=dict(run.data.metrics))


class TrackedRun:
    """One open run: what stages may write to it.

    Parameters
    ----------
    client : mlflow.tracking.MlflowClient
        Connected client.
    run_id : str
        The run.
    """

    def __init__(self, client: MlflowClient, run_id: str) -> None:
        self._client = client
        self.run_id = run_id

    @property
    def info(self) -> Any:
        """The run's MLflow information (experiment id, artifact location, status)."""
        return self._client.get_run(self.run_id).info

    def rename(self, name: str) -> None:
        """Give the run its short, most-distinctive-first name."""
        self._client.update_run(self.run_id, name=name)

    def set_tags(self, tags: Mapping[str, object]) -> None:
        """Set tags, each cut to MLflow's limit."""
        self._client.log_batch(self.run_id, tags=[RunTag(k, str(v)[:_TAG_LIMIT]) for k, v in tags.items()])

    def log_params(self, params: Mapping[str, object]) -> None:
        """Log parameters. What the run has with another value is logged beside it, as ``resolved/NAME``.

        `mlflow run` has logged every parameter as it was given, shell-quoted ("auto"), and MLflow changes none.
        """
        there = self._client.get_run(self.run_id).data.params
        new = new_parameters(there, {key: str(value) for key, value in params.items()})
        self._client.log_batch(self.run_id, params=[Param(key, value) for key, value in new.items()])

    def remove_tags(self, *keys: str) -> None:
        """Remove tags, where the run has them."""
        there = self._client.get_run(self.run_id).data.tags
        for key in keys:
            if key in there:
                self._client.delete_tag(self.run_id, key)

    def log_values(self, values: Mapping[str, float]) -> None:
        """Log plain numbers in one batch."""
        now = int(time.time() * 1000)
        self._client.log_batch(self.run_id, metrics=[Metric(k, float(v), now, 0) for k, v in values.items()])

    def log_results(self, results: Sequence[MetricResult]) -> None:
        """Log results in one batch, rounded to what their intervals support; a task's result gets its name appended."""
        self.log_values({(f"{r.name}/{r.task}" if r.task else r.name): rounded(r) for r in results})

    def log_file(self, path: Path, folder: str = "") -> None:
        """Store one file as an artifact."""
        self._client.log_artifact(self.run_id, str(path), folder or None)

    def log_folder(self, path: Path, folder: str) -> None:
        """Store a folder's content as artifacts under `folder`."""
        self._client.log_artifacts(self.run_id, str(path), folder)

    def log_text(self, text: str, name: str) -> None:
        """Store a text as an artifact."""
        self._client.log_text(self.run_id, text, name)

    def log_json(self, value: Any, name: str) -> None:
        """Store a JSON-serialisable value as an artifact."""
        self._client.log_dict(self.run_id, value, name)

    def log_table(self, columns: Mapping[str, Sequence[Any]], name: str) -> None:
        """Store a table that MLflow's artifact comparison can show side by side."""
        self._client.log_table(self.run_id, dict(columns), name)

    def set_note(self, markdown: str) -> None:
        """Set the run's description, cut to MLflow's limit."""
        self._client.set_tag(self.run_id, MLFLOW_RUN_NOTE, markdown[:_NOTE_LIMIT])


class Tracker:
    """A checked connection to the store that MLflow is configured for (default: SQLite in the working folder).

    Raises
    ------
    TrackingError
        When the store cannot be reached or written.
    """

    def __init__(self) -> None:
        self.uri = _absolute(mlflow.get_tracking_uri())
        mlflow.set_tracking_uri(self.uri)
        os.environ["MLFLOW_TRACKING_URI"] = self.uri
        os.environ.setdefault("MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR", "false")  # a bar a file, at every look-up
        try:
            create_database(self.uri)
            self.client = MlflowClient(self.uri)
            self.experiment_id = self._experiment()
        except (MlflowException, SQLAlchemyError, OSError) as error:
            raise TrackingError(
                f"The tracking store cannot be used: {str(error).splitlines()[0]}",
                got=self.uri,
                fix="Set MLFLOW_TRACKING_URI to a store that can be written, such as sqlite:///mlflow.db",
            ) from error

    def _experiment(self) -> str:
        """Return the experiment of the surrounding `mlflow run`, or that which `choose_experiment` chooses."""
        run_id = os.environ.get(_RUN_ID_VARIABLE)
        if run_id:
            return str(self.client.get_run(run_id).info.experiment_id)
        return choose_experiment(self.client, self.uri)

    def reject(self, error: Exception) -> None:
        """Let the run that `mlflow run` has made for this process fail with `error`, where no stage has taken it.

        Where there is none, nothing happens: what is refused before the work begins leaves no run behind.
        """
        if run_id := os.environ.pop(_RUN_ID_VARIABLE, None):
            self._end(TrackedRun(self.client, run_id), str(error), "FAILED")

    def hand_over(self, run_id: str) -> None:
        """Let the run that `mlflow run` has made for this process, where there is one, only say which run goes on."""
        if given := os.environ.pop(_RUN_ID_VARIABLE, None):
            run = TrackedRun(self.client, given)
            run.rename(f"resume {run_id[:8]}")
            run.set_note(f"Goes on with run {run_id}.")

    def _end(self, run: TrackedRun, message: str, status: str) -> None:
        run.set_tags({run_names.ERROR: message})
        run.set_note(f"**{status}:** {message}")
        self.client.set_terminated(run.run_id, status)

    @contextmanager
    def run(self, name: str, stage: str, tags: Mapping[str, object], *, own: bool = True) -> Iterator[TrackedRun]:
        """Open a run; it ends FINISHED, FAILED with the error as tag and note, or KILLED when interrupted.

        Parameters
        ----------
        name, stage : str
            Run name and the `stage` tag.
        tags : mapping
            More tags.
        own : bool
            True fills the run that `mlflow run` has made for this process where there is one; False makes another run
            (a baseline that is evaluated on the way).
        """
        given = os.environ.pop(_RUN_ID_VARIABLE, None) if own else None
        try:
            run_id = given or self.client.create_run(self.experiment_id, run_name=name).info.run_id
            tracked = TrackedRun(self.client, run_id)
            tracked.rename(name)
            tracked.set_tags({run_names.STAGE: stage, **tags})
        except (MlflowException, SQLAlchemyError, OSError) as error:
            raise TrackingError(
                f"The tracking store refuses a new run: {str(error).splitlines()[0]}", got=self.uri
            ) from error
        with self._until_ended(tracked):
            yield tracked

    @contextmanager
    def reopen(self, run_id: str) -> Iterator[TrackedRun]:
        """Open a run that failed or was interrupted again; it ends as `run` says, without the old error."""
        self.client.update_run(run_id, status="RUNNING")
        tracked = TrackedRun(self.client, run_id)
        self.experiment_id = str(tracked.info.experiment_id)  # its further stages belong there too
        with self._until_ended(tracked):
            yield tracked
            tracked.remove_tags(run_names.ERROR, run_names.FAILED_STAGE)

    @contextmanager
    def _until_ended(self, run: TrackedRun) -> Iterator[None]:
        try:
            yield
        except (KeyboardInterrupt, SystemExit):
            self._end(run, "interrupted", "KILLED")
            raise
        except BaseException as error:
            found = self.client.get_run(run.run_id).data.tags.get(MLFLOW_RUN_NOTE, "")
            self._end(run, str(error) or type(error).__name__, "FAILED")
            if isinstance(error, StageError) and error.published is not None:
                run.set_note(f"**{error.stage} failed:** {error}\n\n{found}")
            raise
        self.client.set_terminated(run.run_id, "FINISHED")

    def find_finished(self, stage: str, **tags: str) -> list[Run]:
        """Return finished runs of a stage with the given tags, newest first, over all experiments."""
        experiments = [e.experiment_id for e in self.client.search_experiments(view_type=ViewType.ACTIVE_ONLY)]
        wanted = {run_names.STAGE: stage, **tags}
        found: list[Run] = []
        token = None
        while True:
            page = self.client.search_runs(
                experiments,
                filter_string=f"{tags_filter(wanted)} and attributes.status = 'FINISHED'",
                order_by=["attributes.start_time DESC"],
                page_token=token,
            )
            found += [run for run in page if has_tags(run.data.tags, wanted)]
            token = page.token
            if not token:
                return found

    def find(self, stage: str, **tags: str) -> list[StoredRun]:
        """Return the finished runs of a stage with the given tags, newest first, over all experiments."""
        return [_stored(run) for run in self.find_finished(stage, **tags)]

    def look_up(self, run_id: str) -> StoredRun:
        """Return one run; where there is none, that is a `TrackingError`."""
        try:
            return _stored(self.client.get_run(run_id))
        except MlflowException as error:
            raise TrackingError(f"The store {self.uri} has no such run", got=run_id) from error

    def child_ids(self, run_id: str) -> dict[str, str]:
        """Return the id of a run's newest child by stage."""
        return {stage: str(run.info.run_id) for stage, run in self.children(run_id).items()}

    def link(self, run_id: str) -> RunLink:
        """Return where a person finds the run."""
        from mlflow_compress.tracking.views import how_to_open

        return RunLink(run_id=run_id, store=self.uri, how_to_open=how_to_open(self, run_id))

    def children(self, run_id: str) -> dict[str, Run]:
        """Return the newest child of a run by stage; a run that does not exist is a `TrackingError`."""
        try:
            experiment = self.client.get_run(run_id).info.experiment_id
        except MlflowException as error:
            raise TrackingError(f"The store {self.uri} has no such run", got=run_id) from error
        runs = self.client.search_runs(
            [experiment],
            filter_string=f"tags.`{MLFLOW_PARENT_RUN_ID}` = '{run_id}'",
            order_by=["attributes.start_time ASC"],
        )
        return {run.data.tags[run_names.STAGE]: run for run in runs if run_names.STAGE in run.data.tags}

    def fetch(self, run_id: str, folder: str) -> Path:
        """Return a local path of an artifact folder of a run.

        Artifacts in a local folder are read in place. Others are downloaded once, into the cache below `home`, while
        those of a run that is not finished, which may still change, go into a folder that this process deletes.
        """
        try:
            info = self.client.get_run(run_id).info
            if urlparse(info.artifact_uri).scheme in ("", "file"):
                path = mlflow.artifacts.download_artifacts(run_id=run_id, artifact_path=folder, tracking_uri=self.uri)
                return Path(path)
            if info.status != "FINISHED":
                scratch = Path(tempfile.mkdtemp())
                atexit.register(shutil.rmtree, scratch, ignore_errors=True)
                self._download(run_id, folder, scratch)
                return scratch / folder
            cache = Downloads(home(self.uri) / "downloads", limit_bytes())
            key = f"{run_id}.{folder.replace('/', '.')}"
            return cache.get(key, lambda target: self._download(run_id, folder, target)) / folder
        except (MlflowException, OSError) as error:
            raise TrackingError(
                f"The artifacts '{folder}' of run {run_id} cannot be read: {str(error).splitlines()[0]}",
                fix="Delete that run, so that it is made again",
            ) from error

    def _download(self, run_id: str, folder: str, target: Path) -> None:
        """Download an artifact folder into a folder, where it keeps its path."""
        mlflow.artifacts.download_artifacts(
            run_id=run_id, artifact_path=folder, dst_path=str(target), tracking_uri=self.uri
        )

    def fetch_json(self, run_id: str, name: str) -> Any:
        """Return a JSON artifact of a run; where it has none of this name, that is a `TrackingError`."""
        try:
            return mlflow.artifacts.load_dict(f"runs:/{run_id}/{name}")
        except (MlflowException, OSError) as error:
            raise TrackingError(f"Run {run_id} has no artifact {name!r} that can be read", got=str(error)) from error
