"""An open run in MLflow, to which stages write."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mlflow.entities import Metric, Param, RunTag
from mlflow.utils.mlflow_tags import MLFLOW_LOGGED_ARTIFACTS, MLFLOW_RUN_NOTE

from mlflow_compress.records import MetricResult
from mlflow_compress.records.judged_answers import JudgedAnswer
from mlflow_compress.tracking import run_names
from mlflow_compress.tracking.logged_values import new_parameters, rounded
from mlflow_compress.tracking.shared_store.waiting import PatientClient
from mlflow_compress.tracking.traces.judgment_traces import log_judged_answers

_NOTE_LIMIT = 8000
_TAG_LIMIT = 5000


class TrackedRun:
    """One open run, to which stages write.

    Parameters
    ----------
    client : PatientClient
        Connected client.
    run_id : str
        The run's id.
    """

    def __init__(self, client: PatientClient, run_id: str) -> None:
        self._client = client
        self.run_id = run_id

    @property
    def info(self) -> Any:
        """The run's MLflow information (experiment id, artifact location, status)."""
        return self._client.get_run(self.run_id).info

    def rename(self, name: str) -> None:
        """Give the run a short name."""
        self._client.update_run(self.run_id, name=name)

    def end(self, status: str, message: str) -> None:
        """End the run with a status, and say why in a tag and in its note."""
        self.set_tags({run_names.ERROR: message})
        self.set_note(f"**{status}:** {message}")
        self._client.set_terminated(self.run_id, status)

    def set_tags(self, tags: Mapping[str, object]) -> None:
        """Set tags, each cut to MLflow's limit."""
        self._client.log_batch(self.run_id, tags=[RunTag(k, str(v)[:_TAG_LIMIT]) for k, v in tags.items()])

    def log_params(self, params: Mapping[str, object]) -> None:
        """Log parameters. If the run has a parameter with another value, the new value is logged as ``resolved/NAME``.

        `mlflow run` logs every parameter as it was given ("auto"), and MLflow cannot change a logged parameter.
        """
        there = self._client.get_run(self.run_id).data.params
        new = new_parameters(there, {key: str(value) for key, value in params.items()})
        self._client.log_batch(self.run_id, params=[Param(key, value) for key, value in new.items()])

    def remove_tags(self, *keys: str) -> None:
        """Remove those of these tags that the run has."""
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
        """Store a table, which MLflow's UI can compare between runs. A table of the same name is replaced.

        `MlflowClient.log_table` would append to it, and would store every image twice more.
        """
        rows = [[None if value != value else value for value in row] for row in zip(*columns.values(), strict=True)]
        self.log_json({"columns": list(columns), "data": rows}, name)
        tables = json.loads(self._client.get_run(self.run_id).data.tags.get(MLFLOW_LOGGED_ARTIFACTS, "[]"))
        if (table := {"path": name, "type": "table"}) not in tables:
            self._client.set_tag(self.run_id, MLFLOW_LOGGED_ARTIFACTS, json.dumps([*tables, table]))

    def log_figures(self, folder: Path, names: Sequence[str]) -> None:
        """Store the PNG files of a folder as `figures/`, and as a table that MLflow's UI compares between runs."""
        self.log_folder(folder, "figures")
        paths = [f"figures/{name}.png" for name in names]
        images = [{"type": "image", "filepath": path, "compressed_filepath": path} for path in paths]
        self.log_table({"figure": names, "image": images}, "figures.json")

    def log_judged_answers(self, judged: Sequence[JudgedAnswer]) -> None:
        """Show judged answers as traces of this run, with an assessment per judgment."""
        log_judged_answers(self._client.uri, str(self.info.experiment_id), self.run_id, judged)

    def set_note(self, markdown: str) -> None:
        """Set the run's description, cut to MLflow's limit."""
        self._client.set_tag(self.run_id, MLFLOW_RUN_NOTE, markdown[:_NOTE_LIMIT])
