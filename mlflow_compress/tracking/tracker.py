"""The connection to a tracking store and the runs in it."""

import logging
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import mlflow
from mlflow.entities import LifecycleStage, LoggedModel, Run, RunStatus
from mlflow.environment_variables import MLFLOW_ENABLE_ASYNC_LOGGING
from mlflow.exceptions import MlflowException
from mlflow.store.artifact.artifact_repository_registry import get_artifact_repository
from mlflow.tracking import MlflowClient
from mlflow.utils.mlflow_tags import MLFLOW_PARENT_RUN_ID, MLFLOW_RUN_NOTE

from mlflow_compress.errors import StageError, SweepError, TrackingError, machine_fault
from mlflow_compress.home import SQLITE
from mlflow_compress.lifetime import KILLED_BY, processor_time
from mlflow_compress.tracking import live_processes, run_names
from mlflow_compress.tracking.artifacts import json_artifact, local_folder
from mlflow_compress.tracking.experiment import (
    AUTO_EXPERIMENT,
    BESIDE,
    DEFAULT_EXPERIMENT,
    choose_experiment,
    create_database,
    experiment_beside,
    has_tags,
    naming,
    search_runs,
    tags_filter,
)
from mlflow_compress.tracking.lease import give_back_leases, leased
from mlflow_compress.tracking.store import RunLink, StoredRun, is_run_id, whole_id
from mlflow_compress.tracking.tracked_run import TrackedRun, create_run
from mlflow_compress.tracking.unfinished_commands import note_run
from mlflow_compress.tracking.views import how_to_open
from mlflow_compress.tracking.waiting import PatientClient, shown_store, store_errors

logger = logging.getLogger(__name__)

_RUN_ID_VARIABLE = "MLFLOW_RUN_ID"  # set by `mlflow run`: the run that its child process fills
# Stages whose runs are no variant's. They go to an experiment beside that of the variants.
_OF_BASELINE = ("baseline", "baseline-answers", "baseline-greedy", "baseline-traces", "baseline-chains")
_MEASURED = (*_OF_BASELINE, "evaluate", "judge", "answers")  # a checkpoint has its processor seconds in its manifest
_BESIDE = (*_OF_BASELINE, "promote", "approve", "rollback", "gate", "report")

_SHARED = ("http", "https", "postgresql", "mysql", "mssql")  # stores that several machines may use


def tracking_uri() -> str:
    """Return the URI of the store that MLflow is configured for.

    MLflow writes the store that it is told into the environment, too. So another one there was set later, and counts;
    MLflow itself would go on with the first. A SQLite file's path is absolute: stages run in other working folders.
    """
    uri = os.environ.get("MLFLOW_TRACKING_URI") or mlflow.get_tracking_uri()
    path = Path(uri.removeprefix(SQLITE))
    return f"{SQLITE}{path.resolve()}" if uri.startswith(SQLITE) and not path.is_absolute() else uri


@contextmanager
def in_store(uri: str | None) -> Iterator[None]:
    """Within this block MLflow is configured for a store; None leaves the one that it is configured for.

    MLflow's registry looks up a version's model in the configured store, wherever the version itself is.
    """
    if uri is None:
        yield
        return
    before, given = mlflow.get_tracking_uri(), os.environ.get("MLFLOW_TRACKING_URI")
    try:
        mlflow.set_tracking_uri(uri)  # also into the environment
        yield
    finally:
        mlflow.set_tracking_uri(before)
        if given is None:
            os.environ.pop("MLFLOW_TRACKING_URI", None)


def _stored(run: Run) -> StoredRun:
    return StoredRun(run_id=str(run.info.run_id), tags=dict(run.data.tags), metrics=dict(run.data.metrics))


def close_dead_runs(client: PatientClient, uri: str) -> None:
    """End the runs of dead processes of this machine, which become KILLED, and give back their leases."""
    for run_id in live_processes.runs_not_closed(uri):  # the server was away when this process wanted to
        _close(client, run_id, "the tracking server was away at its end")
        live_processes.run_ended(uri, run_id)
    with live_processes.dead_processes(uri) as names:
        for name in names:
            mine = tags_filter({run_names.PROCESS: name})
            for run in search_runs(client, f"{mine} and attributes.status = 'RUNNING'"):
                _close(client, run.info.run_id, "the process was killed")
                if not run.data.tags.keys() & {run_names.STAGE, run_names.POINTS_AT}:
                    client.delete_run(run.info.run_id)  # `mlflow run` has made it, and nothing had begun
        if names:
            give_back_leases(client, set(names))


def _close(client: PatientClient, run_id: str, reason: str) -> None:
    TrackedRun(client, run_id).end("KILLED", reason)
    _drop_unfinished(client, run_id)
    logger.info("Run %s is KILLED now: %s", run_id, reason)


def _drop_unfinished(client: PatientClient, run_id: str) -> None:
    """Delete what a killed run has stored, but the parameters, from which `resume` goes on and stores it again."""
    run: Run = client.get_run(run_id)
    if RunStatus.is_terminated(RunStatus.from_string(run.info.status)) and run.info.status != "KILLED":
        return
    try:
        stored = get_artifact_repository(run.info.artifact_uri)
        for entry in client.list_artifacts(run_id):
            if entry.path != run_names.PARAMETERS:
                stored.delete_artifacts(entry.path)
        for model in client.search_logged_models([run.info.experiment_id], f"source_run_id = '{run_id}'"):
            get_artifact_repository(model.artifact_location).delete_artifacts()
            client.delete_logged_model(model.model_id)
    except (MlflowException, OSError, NotImplementedError) as error:
        logger.warning("The unfinished artifacts of run %s could not be deleted: %s", run_id, error)


def models_of_run(client: PatientClient, run: Run) -> list[LoggedModel]:
    """Return the models of a run, the oldest first. It refers to those, too, that were deleted when it was killed."""
    logged = {output.model_id for output in run.outputs.model_outputs}
    there = client.search_logged_models([run.info.experiment_id], f"source_run_id = '{run.info.run_id}'")
    return sorted((one for one in there if one.model_id in logged), key=lambda one: one.creation_timestamp)


@contextmanager
def _until_ended(client: PatientClient, uri: str, run: TrackedRun) -> Iterator[None]:
    """Let the run end FINISHED, FAILED with the error, or KILLED when interrupted.

    Where the store cannot be told, the run stays open, and the next process that starts ends it. What a full disk, too
    little memory or missing rights raise becomes a `MachineError`.
    """
    try:
        yield
    except (KeyboardInterrupt, SystemExit):
        client.hurry()
        with _as_far_as_possible(uri, run):
            run.end("KILLED", "interrupted")
            _drop_unfinished(client, run.run_id)
        raise
    except BaseException as error:
        fault = machine_fault(error)
        with _as_far_as_possible(uri, run):
            _fail(client, run, fault or error)
        if fault is not None:
            raise fault from error
        raise
    try:
        client.set_terminated(run.run_id, "FINISHED")
    except TrackingError:
        live_processes.run_not_closed(uri, run.run_id)
        raise
    live_processes.run_ended(uri, run.run_id)


@contextmanager
def _as_far_as_possible(uri: str, run: TrackedRun) -> Iterator[None]:
    try:
        yield
    except (TrackingError, MlflowException, OSError) as error:
        live_processes.run_not_closed(uri, run.run_id)
        logger.warning("Run %s stays open, until the next command closes it", run.run_id)
        logger.debug("because of this: %s", error)
    else:
        live_processes.run_ended(uri, run.run_id)


def _fail(client: PatientClient, run: TrackedRun, error: BaseException) -> None:
    note = client.get_run(run.run_id).data.tags.get(MLFLOW_RUN_NOTE, "")
    run.end("FAILED", str(error) or type(error).__name__)
    if isinstance(error, StageError) and error.published is not None:
        run.set_note(f"**{error.stage} failed:** {error}\n\n{note}")
    if isinstance(error, SweepError):
        run.set_note(f"{note}\n\n**{error}**")


class Tracker:
    """A tested connection to a tracking store: the one that MLflow is configured for (default: SQLite in the working
    folder), or one of another address, for which MLflow's environment variables do not count.

    New runs go to `experiment`; "auto" is explained by `choose_experiment`. A store that cannot be reached or written
    is a `TrackingError`.
    """

    def __init__(self, experiment: str = AUTO_EXPERIMENT, uri: str | None = None) -> None:
        self._to_fill: str | None = None
        self._is_configured = uri is None
        self.uri = uri or tracking_uri()
        with store_errors("The tracking store cannot be used", self.uri):
            MLFLOW_ENABLE_ASYNC_LOGGING.get()  # read at every tag, also at those that would close a run
            if self._is_configured:
                mlflow.set_tracking_uri(self.uri)  # also for the stages that this process starts
            create_database(self.uri)
            self.client = PatientClient(MlflowClient(self.uri), self.uri)
            close_dead_runs(self.client, self.uri)
            self._given_is_elsewhere = False
            self.experiment_id = self._experiment(experiment)

    def _experiment(self, name: str) -> str:
        """Return the experiment id of the stage that this process was started for, or that of `choose_experiment`.

        A user's own `mlflow run` has made a run in the experiment that MLflow chose. If that is another one, the run
        becomes a signpost to the run that this process makes.
        """
        given = os.environ.get(_RUN_ID_VARIABLE) if self._is_configured else None
        if not given:
            named = DEFAULT_EXPERIMENT if name == AUTO_EXPERIMENT and not self._is_configured else name
            return choose_experiment(self.client, self.uri, named)
        with naming(_RUN_ID_VARIABLE, "a run"):
            run = self.client.get_run(given)
        if run.info.lifecycle_stage != LifecycleStage.ACTIVE:
            raise TrackingError(
                f"The run that the environment variable {_RUN_ID_VARIABLE} names was deleted",
                got=given,
                fix=f"Unset it (`unset {_RUN_ID_VARIABLE}`), or restore the run: mlflow runs restore --run-id {given}",
            )
        if run_names.STAGE in run.data.tags:  # made by the main stage
            return str(run.info.experiment_id)
        # `mlflow run` ends it. Where that is killed, the next command does.
        self.client.set_tag(given, run_names.PROCESS, live_processes.run_opened(self.uri, given))
        chosen = choose_experiment(self.client, self.uri, name)
        self._given_is_elsewhere = chosen != run.info.experiment_id
        return chosen

    def reject(self, error: Exception) -> None:
        """End the run that `mlflow run` has created for this process as FAILED, if there is one and no stage has it."""
        if run_id := os.environ.pop(_RUN_ID_VARIABLE, None):
            TrackedRun(self.client, run_id).end("FAILED", str(error))

    @contextmanager
    def filling(self, run_id: str) -> Iterator[None]:
        """Within this block, the first run that is opened as a process's own is this one: a stage in this process."""
        self._to_fill = run_id
        try:
            yield
        finally:
            self._to_fill = None

    def _take_given(self) -> tuple[str | None, str | None]:
        """Return, once, the run that was created for the stage that now begins, and one that only points at it."""
        if self._to_fill is not None:
            filled, self._to_fill = self._to_fill, None
            return filled, None
        given = os.environ.pop(_RUN_ID_VARIABLE, None) if self._is_configured else None
        return (None, given) if self._given_is_elsewhere else (given, None)

    def hand_over(self, run_id: str) -> None:
        """Note in the run that `mlflow run` has created for this process, if any, that another run is resumed."""
        self.note_given_run(f"resume {run_id[:8]}", f"Resumes run {run_id}.")

    @contextmanager
    def _pointed_at(self, run: TrackedRun, name: str, signpost: str | None) -> Iterator[None]:
        """Let `signpost`, a run of another experiment, point at `run` and end with the same status."""
        if signpost is None:
            yield
            return
        post, target = TrackedRun(self.client, signpost), f"experiments/{run.info.experiment_id}/runs/{run.run_id}"
        post.rename(f"see {name}")
        post.set_tags({run_names.POINTS_AT: run.run_id})  # it goes where that run goes
        post.set_note(f"The results are in run [{name}](#/{target}) of another experiment.")
        try:
            yield
        finally:
            self.client.set_terminated(signpost, self.client.get_run(run.run_id).info.status)
            live_processes.run_ended(self.uri, signpost)

    def note_given_run(self, name: str, note: str) -> str | None:
        """Name the run that `mlflow run` has created for this process, which writes nothing; return its id, if any."""
        given = os.environ.pop(_RUN_ID_VARIABLE, None)
        if given:
            run = TrackedRun(self.client, given)
            run.rename(name)
            run.set_note(note)
        return given

    @contextmanager
    def run(self, name: str, stage: str, tags: Mapping[str, object], *, own: bool = True) -> Iterator[TrackedRun]:
        """Open a run; `own=True` fills the run that `mlflow run` has created for this process, if there is one."""
        given, signpost = self._take_given() if own else (None, None)
        every = {run_names.STAGE: stage, **tags}
        with store_errors("The tracking store refuses a new run", self.uri):
            place = self.experiment_id
            if stage in _BESIDE:
                place = experiment_beside(self.client, self.uri, place)
            run_id = given or create_run(self.client, self.uri, place, name, every)
            tracked = TrackedRun(self.client, run_id)
        with self._pointed_at(tracked, name, signpost), _until_ended(self.client, self.uri, tracked):
            if given:
                tracked.rename(name)
                tracked.set_tags({**every, run_names.PROCESS: live_processes.run_opened(self.uri, run_id)})
            note_run(self.uri, stage, run_id)
            before = processor_time()
            yield tracked
            if stage in _MEASURED:
                tracked.log_values({run_names.PROCESSOR: round(processor_time() - before, 2)})
        for key in tags.keys() & {run_names.FINGERPRINT, run_names.VARIANT_KEY}:
            self.drop_killed(self.find_unfinished(stage, **{key: str(tags[key])}))

    @contextmanager
    def reopen(self, run_id: str) -> Iterator[TrackedRun]:
        """Open a failed or interrupted run again. It ends like that of `run`, without the old error."""
        tracked = TrackedRun(self.client, run_id)
        with _until_ended(self.client, self.uri, tracked):
            self.client.update_run(run_id, status="RUNNING")
            tracked.set_tags({run_names.PROCESS: live_processes.run_opened(self.uri, run_id)})
            run = self.client.get_run(run_id)
            self.experiment_id = str(run.info.experiment_id)  # for the runs of its remaining stages
            note_run(self.uri, run.data.tags[run_names.STAGE], run_id)
            yield tracked
            tracked.remove_tags(run_names.RUN_ERROR, run_names.FAILED_STAGE)
        self.drop_killed([run_id])

    def alone(self, key: str) -> AbstractContextManager[Callable[[], None]]:
        """Within the block, no process of another machine that uses this store works under this key.

        Processes of this machine have locks, see `resumable_workdir`. The block gets a function that raises a
        `TrackingError` where that cannot be said any longer, because this process was cut off from the store.
        """
        if urlsplit(self.uri).scheme.partition("+")[0] not in _SHARED:
            return nullcontext(lambda: None)
        return leased(self.client, self.experiment_id, key[:16], live_processes.own_name(self.uri))

    def find_finished(self, stage: str, **tags: str) -> list[Run]:
        """Return the finished MLflow runs of a stage with the given tags, newest first, over all experiments."""
        wanted = {run_names.STAGE: stage, **tags}
        runs = search_runs(self.client, f"{tags_filter(wanted)} and attributes.status = 'FINISHED'")
        return [run for run in runs if has_tags(run.data.tags, wanted)]

    def find_unfinished(self, stage: str, **tags: str) -> list[str]:
        """Return the ids of the runs of a stage with the given tags that are not FINISHED, newest first."""
        wanted = {run_names.STAGE: stage, **tags}
        runs = search_runs(self.client, f"{tags_filter(wanted)} and attributes.status != 'FINISHED'")
        return [str(run.info.run_id) for run in runs if has_tags(run.data.tags, wanted)]

    def interrupted(self, run_id: str) -> tuple[str, str] | None:
        """Return the status of a run, and the name of the experiment for its variants; None where it is deleted."""
        for run in search_runs(self.client, f"attributes.run_id = '{run_id}'"):
            name = str(self.client.get_experiment(run.info.experiment_id).name)
            return str(run.info.status), name.removesuffix(BESIDE)
        return None

    def end_children(self, run_id: str) -> None:
        """End every run below a run that a killed process has left RUNNING: it becomes KILLED."""
        for run in self._below(run_id):
            self.end_children(run.info.run_id)
            if run.info.status == "RUNNING":
                TrackedRun(self.client, run.info.run_id).end("KILLED", "the process was killed")

    def _below(self, run_id: str) -> list[Run]:
        """Return the runs of a main run's stages, or the main runs of a sweep, and what points at the run."""
        tags = (MLFLOW_PARENT_RUN_ID, run_names.SWEEP_RUN, run_names.POINTS_AT)
        return [run for tag in tags for run in search_runs(self.client, f"tags.`{tag}` = '{run_id}'")]

    def drop_killed(self, run_ids: Iterable[str]) -> None:
        """Delete what kills have left of work that is done now: killed runs without a metric in them or below them."""
        for run_id in run_ids:
            self._drop_killed(self.client.get_run(run_id))

    def _drop_killed(self, run: Run) -> bool:
        left = [child for child in self._below(run.info.run_id) if not self._drop_killed(child)]
        killed = run.info.status == "KILLED" or KILLED_BY in run.data.tags.get(run_names.RUN_ERROR, "")
        if left or run.data.metrics or not killed:
            return False
        self.client.delete_run(run.info.run_id)
        return True

    def find(self, stage: str, **tags: str) -> list[StoredRun]:
        """Return the finished runs of a stage with these tags, newest first."""
        return [_stored(run) for run in self.find_finished(stage, **tags)]

    def add_to(self, run_id: str) -> TrackedRun:
        """Return a run that has ended, to add to it. Its status stays. An unknown id is a `TrackingError`."""
        self.look_up(run_id)
        return TrackedRun(self.client, run_id)

    def look_up(self, run_id: str) -> StoredRun:
        """Return one run by its id, or the first six digits or more. An unknown one is a `TrackingError`."""
        return _stored(self.run_of(run_id))

    def look_up_stage(self, run_id: str, stage: str) -> StoredRun:
        """Return the newest run of a stage below a main run; of another run, that run itself."""
        run = self.look_up(run_id)
        below = self.child_ids(run.run_id).get(stage)
        return run if below is None else self.look_up(below)

    def run_of(self, run_id: str) -> Run:
        """Return the MLflow run of an id or of the beginning of one; an unknown one is a `TrackingError`."""
        if is_run_id(run_id) and len(run_id) < 32:
            runs = search_runs(self.client, f"attributes.run_id LIKE '{run_id}%'")
            run_id = whole_id(run_id, [run.info.run_id for run in runs])
        try:
            return self.client.get_run(run_id)
        except MlflowException as error:
            raise TrackingError(f"The store {shown_store(self.uri)} has no such run", got=run_id) from error

    def child_ids(self, run_id: str) -> dict[str, str]:
        """Return the run id of the newest child of a run, by stage."""
        return {stage: str(run.info.run_id) for stage, run in self.children(run_id).items()}

    def link(self, run_id: str) -> RunLink:
        return RunLink(run_id=run_id, store=self.uri, how_to_open=how_to_open(self.client, self.uri, run_id))

    def children(self, run_id: str) -> dict[str, Run]:
        """Return the newest child of a run, by stage. An unknown run id is a `TrackingError`."""
        return self.children_of(self.run_of(run_id))

    def children_of(self, run: Run) -> dict[str, Run]:
        """Return the same of a run that was found."""
        runs = self.client.search_runs(
            [run.info.experiment_id],
            filter_string=f"tags.`{MLFLOW_PARENT_RUN_ID}` = '{run.info.run_id}'",
            order_by=["attributes.start_time ASC"],
        )
        return {run.data.tags[run_names.STAGE]: run for run in runs if run_names.STAGE in run.data.tags}

    def fetch(self, run_id: str, folder: str) -> Path:
        """Return the local path of an artifact folder of a run."""
        return local_folder(self.client, self.run_of(run_id), folder)

    def fetch_json(self, run_id: str, name: str) -> Any:
        """Return a JSON artifact of a run. An unknown name is a `TrackingError`."""
        return json_artifact(self.client, self.client.get_run(run_id), name)

    def json_of(self, run: Run, name: str) -> Any:
        """Return a JSON artifact of a run that was found; one in a local folder is read in place."""
        return json_artifact(self.client, run, name)


def opened(store: Tracker | str | None, experiment: str = AUTO_EXPERIMENT) -> Tracker:
    """Return a store that is open already as it is, else the one of an address, or that MLflow is configured for."""
    return Tracker(experiment, store) if store is None or isinstance(store, str) else store


class Snapshot(Tracker):
    """A tracker for reading, which reads every run once, as it is then: reports come back to the same runs."""

    def __init__(self, tracker: Tracker, run_ids: Iterable[str] = ()) -> None:
        """Take over the connection of a tracker, and read runs that will be needed, many at once."""
        self.__dict__.update(tracker.__dict__)
        self._runs: dict[str, Run] = {}
        self._children: dict[str, dict[str, Run]] = {}
        self._json: dict[tuple[str, str], Any] = {}
        wanted = ", ".join(f"'{run_id}'" for run_id in run_ids if is_run_id(run_id) and len(run_id) == 32)
        if wanted:
            runs = search_runs(self.client, f"attributes.run_id IN ({wanted})")
            self._runs = {str(run.info.run_id): run for run in runs}

    def run_of(self, run_id: str) -> Run:
        if run_id not in self._runs:
            self._runs[run_id] = super().run_of(run_id)
        return self._runs[run_id]

    def children_of(self, run: Run) -> dict[str, Run]:
        if run.info.run_id not in self._children:
            self._children[run.info.run_id] = below = super().children_of(run)
            self._runs |= {str(child.info.run_id): child for child in below.values()}
        return self._children[run.info.run_id]

    def json_of(self, run: Run, name: str) -> Any:
        place = (str(run.info.run_id), name)
        if place not in self._json:
            self._json[place] = super().json_of(run, name)
        return self._json[place]
