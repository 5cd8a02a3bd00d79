"""Notes on disk of the commands that run: what is left of one that was killed, or cut off from the tracking server."""

import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from mlflow_compress import files as atomic
from mlflow_compress.errors import TrackingError, breaks_off
from mlflow_compress.files import read_json_object
from mlflow_compress.home import home
from mlflow_compress.paths import is_stage
from mlflow_compress.tracking.live_processes import is_alive, own_name

_EXPERIMENT = "MLFLOW_EXPERIMENT_NAME"

_running: set[Path] = set()  # notes of the commands that this process runs now


@dataclass(frozen=True)
class UnfinishedCommand:
    """A command that has not ended."""

    command: str  # Its verb
    parameters: dict[str, str]  # Its parameters as text, with absolute paths
    process: str  # The process that ran it, see `live_processes`
    run: str | None  # The run that it has opened
    path: Path  # The note

    @property
    def key(self) -> str:
        """Equal for equal work."""
        return self.path.name.partition(".")[0]

    @property
    def pattern(self) -> Path:
        """The files of all notes of this work."""
        return self.path.with_name(f"{self.key}.*")


def _notes(uri: str) -> Path:
    return home(uri) / "commands" / hashlib.sha256(uri.encode()).hexdigest()[:12]


def _work_key(command: str, parameters: Mapping[str, str]) -> str:
    """Return what is equal for equal work: of a run that is resumed, the run decides alone."""
    run_id = parameters.get("resume", "none")
    work = dict(parameters) if run_id == "none" else {"resume": run_id}
    return hashlib.sha256(json.dumps([command, work], sort_keys=True).encode()).hexdigest()[:16]


def _write(uri: str, command: str, parameters: Mapping[str, str], process: str, run_id: str | None = None) -> Path:
    path = _notes(uri) / f"{_work_key(command, parameters)}.{process}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    content = {"command": command, "parameters": dict(parameters), "process": process, "run": run_id}
    atomic.write(path, (json.dumps(content, indent=1) + "\n").encode())
    return path


def note_continued(uri: str, note: UnfinishedCommand, parameters: Mapping[str, str]) -> UnfinishedCommand:
    """Give a note the parameters with which its work goes on: killed again, it is the same piece of work."""
    path = _write(uri, note.command, parameters, note.process, note.run)
    if path != note.path:
        note.path.unlink(missing_ok=True)
    return replace(note, parameters=dict(parameters), path=path)


def note_run(uri: str, stage: str, run_id: str) -> None:
    """Add the run that a command of this process has opened to its note: `resume` goes on with it, or finds it done."""
    for path in tuple(_running):
        note = _read(path)
        if path.parent == _notes(uri) and (note.command, note.run) == (stage, None):
            _write(uri, note.command, note.parameters, note.process, run_id)


@contextmanager
def noted(uri: str, command: str, parameters: Mapping[str, str]) -> Iterator[list[str]]:
    """Keep a note of a command until it has ended: well, or with an error that would come again. Stages need none.

    Yields the runs of the same work that was killed before. The parameters must hold no secret.
    """
    if is_stage():
        yield []
        return
    values = dict(parameters)
    if values.get("experiment") == "auto" and (name := os.environ.get(_EXPERIMENT)):
        values["experiment"] = name
    key = _work_key(command, values)
    runs = [same.run for same in unfinished_commands(uri) if same.key == key and same.run is not None]
    path = _write(uri, command, values, own_name(uri))
    _running.add(path)
    try:
        yield runs
    except BaseException as error:
        if not breaks_off(error):
            path.unlink(missing_ok=True)
        raise
    finally:
        _running.discard(path)
    path.unlink(missing_ok=True)
    for same in unfinished_commands(uri):
        if same.key == key:
            same.path.unlink(missing_ok=True)


def unfinished_commands(uri: str) -> list[UnfinishedCommand]:
    """Return the commands of this machine that have not ended, and that nobody runs now; the oldest comes first."""
    commands = []
    for path in sorted(_notes(uri).glob("*.json"), key=lambda path: path.stat().st_mtime):
        note = _read(path)
        if path not in _running and (note.process == own_name(uri) or not is_alive(uri, note.process)):
            commands.append(note)
    return commands


def _read(path: Path) -> UnfinishedCommand:
    try:
        content = read_json_object(path, error=TrackingError)
        parameters = {str(name): str(value) for name, value in content["parameters"].items()}
        return UnfinishedCommand(str(content["command"]), parameters, str(content["process"]), content.get("run"), path)
    except (TrackingError, KeyError, TypeError, AttributeError) as error:
        raise TrackingError(
            "The note of an unfinished command cannot be read", got=str(path), fix="Delete it"
        ) from error
