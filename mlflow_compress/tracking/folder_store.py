"""A plain folder as a store of runs, for notebooks and scripts without MLflow.

Each run is a sub-folder with `run.json` (name, status, tags, parameters, metrics, note) and the same artifacts as a run
in MLflow. A baseline that was evaluated into the folder is reused from there, as in MLflow.
"""

import json
import shutil
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

from mlflow_compress import files as atomic
from mlflow_compress.errors import TrackingError, machine_fault
from mlflow_compress.files import read_json, read_json_object
from mlflow_compress.home import FOLDER_SCHEME
from mlflow_compress.records import JudgedAnswer
from mlflow_compress.tracking import run_names
from mlflow_compress.tracking.store import OpenRun, RunLink, StoredRun, is_run_id, whole_id

RUN_FILE = "run.json"


class FolderRun(OpenRun):
    """One open run in a folder, with the methods of `TrackedRun`. The folder's name is the run's id."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.run_id = folder.name
        self._content: dict[str, Any] = {"name": "", "status": "RUNNING", "started": time.time(), "note": ""}
        self._content |= {"tags": {}, "params": {}, "metrics": {}}

    def _update(self, part: str, values: Mapping[str, object]) -> None:
        self._content[part] = {**self._content[part], **values}
        self._write()

    def _write(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        atomic.write(self.folder / RUN_FILE, (json.dumps(self._content, indent=1) + "\n").encode())

    def end(self, status: str, error: str = "") -> None:
        if error:
            self._content["tags"][run_names.ERROR] = error
        self._content |= {"status": status, "ended": time.time()}
        self._write()

    def rename(self, name: str) -> None:
        self._content["name"] = name
        self._write()

    def set_tags(self, tags: Mapping[str, object]) -> None:
        self._update("tags", {key: str(value) for key, value in tags.items()})

    def log_params(self, params: Mapping[str, object]) -> None:
        self._update("params", {key: str(value) for key, value in params.items()})

    def log_values(self, values: Mapping[str, float]) -> None:
        self._update("metrics", {key: float(value) for key, value in values.items()})

    def log_file(self, path: Path, folder: str = "") -> None:
        target = self.folder / folder
        target.mkdir(parents=True, exist_ok=True)
        shutil.copy2(path, target)

    def log_folder(self, path: Path, folder: str) -> None:
        shutil.copytree(path, self.folder / folder, dirs_exist_ok=True)

    def log_json(self, value: Any, name: str) -> None:
        atomic.write(self.folder / name, (json.dumps(value, indent=1) + "\n").encode())

    def log_judged_answers(self, judged: Sequence[JudgedAnswer]) -> None:
        """Do nothing: a folder has no page for them; its records hold every judgment."""

    def set_note(self, markdown: str) -> None:
        self._content["note"] = markdown
        self._write()


class FolderStore:
    """A folder that stores runs. It is created if it does not exist."""

    def __init__(self, root: Path | str) -> None:
        self.root = Path(root).expanduser().resolve()
        try:
            self.root.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise TrackingError(f"The folder for results cannot be made: {error}", got=str(self.root)) from error

    @property
    def uri(self) -> str:
        return f"{FOLDER_SCHEME}{self.root}"

    @contextmanager
    def run(self, name: str, stage: str, tags: Mapping[str, object], *, own: bool = True) -> Iterator[FolderRun]:
        run = FolderRun(self.root / uuid.uuid4().hex)
        run.rename(name)
        run.set_tags({run_names.STAGE: stage, **tags})
        try:
            yield run
        except (KeyboardInterrupt, SystemExit):
            run.end("KILLED", "interrupted")
            raise
        except BaseException as error:
            fault = machine_fault(error)
            with suppress(OSError):  # the folder may be what is full
                run.end("FAILED", str(fault or error) or type(error).__name__)
            if fault is not None:
                raise fault from error
            raise
        run.end("FINISHED")

    def add_to(self, run_id: str) -> FolderRun:
        run = FolderRun(self.root / run_id)
        run._content = self._content(run_id)
        return run

    def alone(self, key: str) -> AbstractContextManager[Callable[[], None]]:
        return nullcontext(lambda: None)

    def _content(self, run_id: str) -> dict[str, Any]:
        path = self.root / run_id / RUN_FILE
        try:
            content = read_json_object(path, error=TrackingError)
        except TrackingError as error:
            raise TrackingError(f"The folder {self.root} has no such run: {error}", got=run_id) from error
        kinds = {"tags": dict, "metrics": dict, "params": dict, "status": str, "started": float}
        if wrong := [name for name, kind in kinds.items() if not isinstance(content.get(name), kind)]:
            raise TrackingError(f"{path} does not describe a run: {wrong[0]} is missing or broken")
        return content

    def find(self, stage: str, **tags: str) -> list[StoredRun]:
        wanted = {run_names.STAGE: stage, **tags}
        every = [(path.parent.name, self._content(path.parent.name)) for path in self.root.glob(f"*/{RUN_FILE}")]
        dated = [
            (content["started"], self._stored(run_id, content))
            for run_id, content in every
            if content["status"] == "FINISHED" and wanted.items() <= content["tags"].items()
        ]
        return [run for _, run in sorted(dated, key=lambda entry: entry[0], reverse=True)]

    def look_up(self, run_id: str) -> StoredRun:
        if is_run_id(run_id):
            run_id = whole_id(run_id, [path.parent.name for path in self.root.glob(f"{run_id}*/{RUN_FILE}")])
        return self._stored(run_id, self._content(run_id))

    @staticmethod
    def _stored(run_id: str, content: Mapping[str, Any]) -> StoredRun:
        return StoredRun(run_id=run_id, tags=content["tags"], metrics=content["metrics"])

    def child_ids(self, run_id: str) -> dict[str, str]:
        self._content(run_id)
        runs = [self._content(path.parent.name) | {"id": path.parent.name} for path in self.root.glob(f"*/{RUN_FILE}")]
        below = [run for run in runs if run["tags"].get(run_names.PARENT) == run_id]
        return {run["tags"][run_names.STAGE]: run["id"] for run in sorted(below, key=lambda run: run["started"])}

    def fetch(self, run_id: str, folder: str) -> Path:
        path = self.root / run_id / folder
        if not path.is_dir():
            raise TrackingError(f"Run {run_id} has no artifacts '{folder}'", got=str(self.root))
        return path

    def fetch_json(self, run_id: str, name: str) -> Any:
        try:
            return read_json(self.root / run_id / name, error=TrackingError)
        except TrackingError as error:
            raise TrackingError(f"Run {run_id} has no artifact {name!r} that can be read", got=str(error)) from error

    def link(self, run_id: str) -> RunLink:
        return RunLink(run_id=run_id, store=str(self.root), how_to_open=f"Artifacts:     {self.root / run_id}")
